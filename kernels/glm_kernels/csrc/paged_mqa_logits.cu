// Paged index scores: NEXT_N query tokens of a request against each page of 64 keys, loaded once.
//
// A page is one tile of the matrix instruction's M dimension, and a warpgroup's work; every token of the
// request is a group of NUM_HEADS columns of N. Four heads in a thread at a time, the products are rectified,
// rounded to fp16 and summed over the heads by a second, small product with the weights (m16n8k16): the
// accumulators of the first lie in registers as the second wants its left side. The tokens form GROUPS
// groups: while one group is summed, the next group's products run. Warpgroups of a block share the queries
// and nothing else; several blocks share a multiprocessor.
//
// Defines: NUM_HEADS, NEXT_N, GROUPS (1 or even), TOKENS (a group), WARPGROUPS, STAGES (of each), MIN_BLOCKS.
// The kernels differ in what they do with a score: store it, store a sample, keep it above a threshold, or
// repair such a selection.

constexpr int kThreads = 128 * WARPGROUPS;
constexpr int kColumns = TOKENS * NUM_HEADS;  // of a group
constexpr int kAccumulators = kColumns / 2;
constexpr int kSteps = NUM_HEADS / 16;       // small products of a token
constexpr int kSets = (NEXT_N + 3) / 4;      // of four tokens, one for each lane of a quad
constexpr int kStaged = 24;  // keys a token that a warp holds back: 16 of one page, and 8
constexpr int kKeyBytes = 64 * 128;
constexpr int kPageBytes = 64 * 132;
constexpr int kLag = GROUPS == 1 ? 1 : 2;
// Pages in flight while one is scored. With one group its products are done before the next copy starts.
constexpr int kAhead = GROUPS == 1 ? STAGES - 1 : STAGES - 2;
// A product of codes is below 128 * 448 * 448, which is 49 times 2^19: a 512th of it is below fp16's largest.
constexpr float kProductScale = BF16 ? 1.0f : 1.0f / 512;

struct Smem {
  uint8_t* keys;     // [STAGES][64][128] of this warpgroup, 128-byte swizzle
  uint8_t* q;        // [GROUPS * kColumns][128], same
  float* scales;     // [STAGES][64] of this warpgroup
  uint64_t* full;    // [STAGES] barriers of this warpgroup
  uint64_t* staged;  // [4 * WARPGROUPS][NEXT_N][kStaged]
};

// The exchange tells the compiler that a warp agrees on it.
__device__ __forceinline__ int warpgroup() {
  return WARPGROUPS == 1 ? 0 : __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
}

__device__ __forceinline__ Smem smem_layout() {
  extern __shared__ __align__(1024) uint8_t smem_raw[];
  uint8_t* q = smem_raw + WARPGROUPS * STAGES * kKeyBytes;
  float* scales = reinterpret_cast<float*>(q + GROUPS * kColumns * 128);
  uint64_t* full = reinterpret_cast<uint64_t*>(scales + WARPGROUPS * STAGES * 64);
  return {smem_raw + warpgroup() * STAGES * kKeyBytes, q, scales + warpgroup() * STAGES * 64,
          full + warpgroup() * STAGES, full + WARPGROUPS * STAGES};
}

// Sixteen bytes, or zeros where take is false.
__device__ __forceinline__ void copy_async(uint32_t target, const void* source, bool take = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(target), "l"(source),
               "r"(take ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

__device__ __forceinline__ void sync_warpgroup() {
  asm volatile("bar.sync %0, 128;\n" ::"r"(1 + warpgroup()) : "memory");
}

__device__ __forceinline__ void take_turn() {
  asm volatile("bar.sync %0, 256;\n" ::"r"(3 + warpgroup()) : "memory");
}
__device__ __forceinline__ void pass_turn() {
  asm volatile("bar.arrive %0, 256;\n" ::"r"(4 - warpgroup()) : "memory");
}

// A thread's four chunks of a page lie 16 rows apart, so that one swizzled offset serves them all.
__device__ __forceinline__ uint32_t chunk_offset() {
  const int row = threadIdx.x % 128 / 8;
  return row * 128 + (((threadIdx.x % 8) ^ (row & 7)) * 16);
}

__device__ __forceinline__ void load_page(const Smem& smem, const uint8_t* cache, int page, int stage,
                                          uint32_t offset) {
  const int thread = threadIdx.x % 128;
  const uint8_t* base = cache + static_cast<int64_t>(page) * kPageBytes + thread * 16;
  const uint32_t keys = smem_address(smem.keys) + stage * kKeyBytes + offset;
#pragma unroll
  for (int i = 0; i < 4; ++i) copy_async(keys + i * 2048, base + i * 2048);
  if (thread < 16) copy_async(smem_address(smem.scales) + stage * 256 + thread * 16, base + kKeyBytes);
}

// Columns past the tokens become zeros.
__device__ __forceinline__ void load_queries(const Smem& smem, const uint8_t* q) {
  for (int i = threadIdx.x; i < GROUPS * kColumns * 8; i += kThreads) {
    const int column = i / 8, chunk = i % 8;
    const bool real = column < NEXT_N * NUM_HEADS;
    copy_async(smem_address(smem.q) + column * 128 + (chunk ^ (column & 7)) * 16, q + (real ? i * 16 : 0),
               real);
  }
}

// The right side of the small products. A token has two columns, fp16 weights and what their rounding left,
// so that weights count to 22 bits; a set of four tokens fills the eight columns.
struct Weights {
  uint32_t pairs[kSets][kSteps][2];  // of token set * 4 + lane / 8, the rest if lane / 4 is odd
  float factor[kSets];               // undoes the scaling of token set * 4 + lane % 4
};

__device__ __forceinline__ uint32_t pack_half(float low, float high) {
  uint32_t pair;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;\n" : "=r"(pair) : "f"(low), "f"(high));
#else
  asm("cvt.rn.f16x2.f32 %0, %2, %1;\n" : "=r"(pair) : "f"(low), "f"(high));
#endif
  return pair;
}
__device__ __forceinline__ float through_half(float value) {
#if BF16
  return __uint_as_float(pack_half(value, value) & 0xFFFF0000u);
#endif
  float rounded;
  asm("{\n.reg .b16 h;\ncvt.rn.f16.f32 h, %1;\ncvt.f32.f16 %0, h;\n}\n" : "=f"(rounded) : "f"(value));
  return rounded;
}

__device__ __forceinline__ float* ffma_weights() {
  return reinterpret_cast<float*>(smem_layout().staged - (threadIdx.x * 0) + 4 * WARPGROUPS * NEXT_N * kStaged);
}
__device__ __forceinline__ Weights load_weights(const float* weights) {
#if FFMA
  for (int i = threadIdx.x; i < NEXT_N * NUM_HEADS; i += kThreads) {
    const int head = i % NUM_HEADS, lane_of = head % 8 / 2;
    ffma_weights()[(i / NUM_HEADS * 4 + lane_of) * (NUM_HEADS / 4) + head / 8 * 2 + head % 2] = weights[i];
  }
  Weights none = {};
  for (int set = 0; set < kSets; ++set) none.factor[set] = 1.0f;
  return none;
#endif
  const int lane = threadIdx.x % 32, quad = lane % 4;
  Weights result;
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    const int token = set * 4 + lane / 8;
    float own[kSteps][4], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) {
      const int head = i / 4 * 16 + i % 4 / 2 * 8 + quad * 2 + i % 2;
      own[i / 4][i % 4] = token < NEXT_N ? weights[token * NUM_HEADS + head] : 0.0f;
      largest = fmaxf(largest, fabsf(own[i / 4][i % 4]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
    // A power of two above the largest weight, exact to divide by and to multiply with.
    const uint32_t exponent = min((__float_as_uint(largest) >> 23) + 1, 240u);
    const float inverse = __uint_as_float((254 - exponent) << 23);
    const float factor = __uint_as_float(exponent << 23) / kProductScale;
    result.factor[set] = __shfl_sync(0xFFFFFFFF, factor, quad * 8);
#pragma unroll
    for (int i = 0; i < kSteps * 2; ++i) {
      float pair[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float scaled = own[i / 2][i % 2 * 2 + j] * inverse, rounded = through_half(scaled);
        const float rest = scaled - rounded;  // NaN for infinite weights
        pair[j] = lane & 4 ? (rest == rest ? rest : 0.0f) : rounded;
      }
      result.pairs[set][i / 2][i % 2] = pack_half(pair[0], pair[1]);
    }
  }
  return result;
}

// Two products, rectified: NaN stays NaN.
__device__ __forceinline__ uint32_t rectified_pair(float low, float high) {
  uint32_t pair;
#if BF16
  asm volatile("cvt.rn.relu.bf16x2.f32 %0, %2, %1;\n"
#else
  asm volatile("cvt.rn.relu.f16x2.f32 %0, %2, %1;\n"
#endif
               : "=r"(pair)
               : "f"(low * kProductScale), "f"(high * kProductScale));
  return pair;
}

__device__ __forceinline__ void small_product(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
#if BF16
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
#else
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
#endif
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Pages of one launch: every step-th page of a request, count of them at most.
struct Pages {
  int step;
  int count;
  __device__ __forceinline__ int of(int length) const {
    const int pages = length <= 0 ? 0 : (length + 63) >> 6;
    const int taken = (pages + step - 1) / step;
    return taken < count ? taken : count;
  }
};

struct Nothing {
  template <typename... Arguments>
  __device__ __forceinline__ void operator()(Arguments...) const {}
};

struct alignas(64) TensorMap {
  uint8_t bytes[128];
};

#if TMA
// Copies of a warpgroup's pages: of a launch's pages [from, to), every WARPGROUPS-th. One thread starts them.
struct Pipeline {
  const TensorMap* map;  // [pages][64][128] codes of the cache
  const uint8_t* cache;
  uint32_t stage, phase;  // of the page that was made ready last
  const int* table;
  int step;
  int first, count;  // page first + j * WARPGROUPS, for j below count
  int count_of_other;
  int ahead;  // page number of the next copy, read an iteration before it starts

  __device__ __forceinline__ Pipeline(const TensorMap& map, const uint8_t* cache, const Smem& smem)
      : map(&map), cache(cache), stage(STAGES - 1), phase(1) {
    if (threadIdx.x % 128 == 0) {
      for (int i = 0; i < STAGES; ++i) mbarrier_init(smem_address(smem.full + i), 1);
      fence_async_proxy();
    }
  }

  __device__ __forceinline__ int page_number(int j) const {
    return j < count ? table[(first + j * WARPGROUPS) * step] : 0;
  }

  __device__ __forceinline__ void copy(const Smem& smem, int page, uint32_t to) const {
    const uint32_t full = smem_address(smem.full) + to * 8;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(full), "n"(kPageBytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %3}], "
        "[%4];\n" ::"r"(smem_address(smem.keys) + to * kKeyBytes),
        "l"(map), "r"(0), "r"(page), "r"(full)
        : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];\n" ::"r"(
            smem_address(smem.scales) + to * 256),
        "l"(cache + static_cast<int64_t>(page) * kPageBytes + kKeyBytes), "r"(full)
        : "memory");
  }

  template <typename WithFirst>
  __device__ __forceinline__ void start(const Smem& smem, const int* pages, int every, int from, int to,
                                        WithFirst with_first) {
    table = pages;
    step = every;
    first = from + warpgroup();
    count = (to - first + WARPGROUPS - 1) / WARPGROUPS;
    count_of_other = warpgroup() == 0 ? (to - from) / 2 : (to - from + 1) / 2;
    if (threadIdx.x % 128 == 0) {
      int numbers[STAGES];
#pragma unroll
      for (int j = 0; j < STAGES; ++j) numbers[j] = page_number(j);
      ahead = page_number(STAGES);
#pragma unroll
      for (int j = 0; j < STAGES; ++j) {
        const uint32_t place = stage + 1 + j;
        if (j < count) copy(smem, numbers[j], place < STAGES ? place : place - STAGES);
      }
    }
    with_first();
    copy_commit();
  }

  __device__ __forceinline__ void wait() const {
    asm volatile("cp.async.wait_all;\n" ::: "memory");
    fence_async_proxy();
  }

  // Waits for page j, and lets another take the place of page j - kLag, whose products are done.
  __device__ __forceinline__ void ready(const Smem& smem, int j) {
    if (j >= kLag) {
      sync_warpgroup();
      if (threadIdx.x % 128 == 0 && j - kLag + STAGES < count) {
        copy(smem, ahead, kLag == 1 ? stage : stage == 0 ? STAGES - 1 : stage - 1);
        ahead = page_number(j - kLag + STAGES + 1);
      }
    }
    if (++stage == STAGES) stage = 0, phase ^= 1;
    mbarrier_wait(smem_address(smem.full) + stage * 8, phase);
  }
};
#else
// Copies of a warpgroup's pages: of a launch's pages [from, to), every WARPGROUPS-th.
struct Pipeline {
  const uint8_t* cache;
  const int* table;
  int step;
  __device__ __forceinline__ Pipeline(const TensorMap&, const uint8_t* cache, const Smem&) : cache(cache) {}
  int first, count;  // page first + j * WARPGROUPS, for j below count
  int count_of_other;
  uint32_t offset;
  int ahead;   // page number of the next copy, read an iteration before it starts
  int stage;   // of the page that was made ready last
  int refill;  // of the next copy

  __device__ __forceinline__ int page_number(int j) const {
    return j < count ? table[(first + j * WARPGROUPS) * step] : 0;
  }

  // Starts the first copies; the queries' copies, started in between, belong to the first page's.
  template <typename WithFirst>
  __device__ __forceinline__ void start(const Smem& smem, const int* pages, int every, int from, int to,
                                        WithFirst with_first) {
    table = pages;
    step = every;
    first = from + warpgroup();
    count = (to - first + WARPGROUPS - 1) / WARPGROUPS;
    count_of_other = warpgroup() == 0 ? (to - from) / 2 : (to - from + 1) / 2;
    offset = chunk_offset();
    int numbers[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) numbers[j] = page_number(j);
    ahead = page_number(kAhead);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (j < count) load_page(smem, cache, numbers[j], j, offset);
      if (j == 0) with_first();
      copy_commit();
    }
    stage = STAGES - 1;
    refill = kAhead % STAGES;
  }

  __device__ __forceinline__ void wait() const {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kAhead - 1) : "memory");
    fence_async_proxy();
  }

  // Waits for page j and starts the copy that takes the place of a page whose products are done.
  __device__ __forceinline__ void ready(const Smem& smem, int j) {
    wait();
    sync_warpgroup();
    if (j + kAhead < count) {
      load_page(smem, cache, ahead, refill, offset);
      ahead = page_number(j + kAhead + 1);
    }
    copy_commit();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    refill = refill + 1 == STAGES ? 0 : refill + 1;
  }
};
#endif

// Scores a warpgroup's pages in order; calls visit(set, position, index, score, valid) in whole warps. The
// score is that of token set * 4 + lane % 4, index counts positions of the launch's pages, and valid says
// that there is such a token and that it sees the position. page_end() follows each page.
template <typename Visit, typename PageEnd = Nothing>
__device__ __forceinline__ void score_pages(const Smem& smem, Pipeline& pipeline, const Weights& weights,
                                            int length, Visit visit, PageEnd page_end = {}) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int row = threadIdx.x % 128 / 32 * 16 + lane / 4;  // and eight rows below it
  const uint32_t keys_low = descriptor_low(smem_address(smem.keys));
  const uint32_t queries_low = descriptor_low(smem_address(smem.q));
  int visible[kSets];  // row t of the request sees length - NEXT_N + t + 1 positions
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    const int token = set * 4 + quad;
    visible[set] = token < NEXT_N ? length - NEXT_N + token + 1 : 0;
  }
  float scores[kSets][2], scales[2];
  auto issue = [&](float (&d)[kAccumulators], int group) {
    const uint32_t page = keys_low + pipeline.stage * (kKeyBytes >> 4);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      WGMMA_FP8(d, page + k * 2, queries_low + group * (kColumns * 128 >> 4) + k * 2, k != 0);
    wgmma_commit();
  };
  auto read_scales = [&] {
    scales[0] = smem.scales[pipeline.stage * 64 + row];
    scales[1] = smem.scales[pipeline.stage * 64 + row + 8];
  };
  auto sum_heads = [&](const float (&d)[kAccumulators], int group) {
#if FFMA
    float part[kSets * 4][2] = {};
    const float4* table = reinterpret_cast<const float4*>(ffma_weights() + quad * (NUM_HEADS / 4));
#pragma unroll
    for (int token = 0; token < NEXT_N; ++token) {
      float4 w[NUM_HEADS / 16];
#pragma unroll
      for (int j = 0; j < NUM_HEADS / 16; ++j) w[j] = table[token * 4 * (NUM_HEADS / 16) + j];
      float low[2] = {0.0f, 0.0f}, high[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < NUM_HEADS / 16; ++j) {
        const float* c = d + token * (NUM_HEADS / 2) + 8 * j;
        low[0] = fmaf(fmaxf(c[0], 0.0f), w[j].x, low[0]);
        low[1] = fmaf(fmaxf(c[1], 0.0f), w[j].y, low[1]);
        high[0] = fmaf(fmaxf(c[2], 0.0f), w[j].x, high[0]);
        high[1] = fmaf(fmaxf(c[3], 0.0f), w[j].y, high[1]);
        low[0] = fmaf(fmaxf(c[4], 0.0f), w[j].z, low[0]);
        low[1] = fmaf(fmaxf(c[5], 0.0f), w[j].w, low[1]);
        high[0] = fmaf(fmaxf(c[6], 0.0f), w[j].z, high[0]);
        high[1] = fmaf(fmaxf(c[7], 0.0f), w[j].w, high[1]);
      }
      part[token][0] = low[0] + low[1], part[token][1] = high[0] + high[1];
    }
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      float kept[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int pair = i / 2, half = i % 2;
        const float given = quad & 1 ? part[set * 4 + 2 * pair][half] : part[set * 4 + 2 * pair + 1][half];
        const float own = quad & 1 ? part[set * 4 + 2 * pair + 1][half] : part[set * 4 + 2 * pair][half];
        kept[pair][half] = own + __shfl_xor_sync(0xFFFFFFFF, given, 1);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float given = quad & 2 ? kept[0][half] : kept[1][half];
        const float own = quad & 2 ? kept[1][half] : kept[0][half];
        scores[set][half] = own + __shfl_xor_sync(0xFFFFFFFF, given, 2);
      }
    }
    return;
#endif
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      const int token = group * TOKENS + i, set = token / 4;
      if (token >= NEXT_N) break;
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const float* c = d + i * (NUM_HEADS / 2) + step * 8;
        const uint32_t a[4] = {rectified_pair(c[0], c[1]), rectified_pair(c[2], c[3]),
                               rectified_pair(c[4], c[5]), rectified_pair(c[6], c[7])};
        small_product(sum, a, weights.pairs[set][step]);
      }
      // The lane of the quad that holds this token's two columns keeps them.
      if (token % 4 == 0 || quad == token % 4) scores[set][0] = sum[0] + sum[1], scores[set][1] = sum[2] + sum[3];
    }
  };
  auto visit_page = [&](int j) {
    const int i = pipeline.first + j * WARPGROUPS;
    const int position = i * pipeline.step * 64 + row, index = i * 64 + row;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        visit(set, position + half * 8, index + half * 8,
              scores[set][half] * (scales[half] * weights.factor[set]), position + half * 8 < visible[set]);
    }
    page_end();
  };

  const int count = pipeline.count;
#if PINGPONG
  // The first turn is the first warpgroup's.
  if (warpgroup() == 1 && pipeline.count_of_other > 0) pass_turn();
#endif
  if (count > 0) {
    pipeline.ready(smem, 0);
#if GROUPS == 1
    float d[kAccumulators];
    for (int j = 0; j < count; ++j) {
#if PINGPONG
      take_turn();
#endif
      issue(d, 0);
      read_scales();
      wgmma_wait<0>();
#if PINGPONG
      if (j + warpgroup() < pipeline.count_of_other) pass_turn();
#endif
      if (j + 1 < count) pipeline.ready(smem, j + 1);
      sum_heads(d, 0);
      visit_page(j);
    }
#else
    float even[kAccumulators], odd[kAccumulators];
    issue(even, 0);
    for (int j = 0; j < count; ++j) {
      read_scales();
#pragma unroll
      for (int pair = 0; pair < GROUPS / 2; ++pair) {
        issue(odd, 2 * pair + 1);
        wgmma_wait<1>();
        sum_heads(even, 2 * pair);
        if (pair + 1 < GROUPS / 2) {
          issue(even, 2 * pair + 2);
          wgmma_wait<1>();
        } else if (j + 1 < count) {
          pipeline.ready(smem, j + 1);
          issue(even, 0);
          wgmma_wait<1>();
        } else {
          wgmma_wait<0>();
        }
        sum_heads(odd, 2 * pair + 1);
      }
      visit_page(j);
    }
#endif
  }
  asm volatile("cp.async.wait_all;\n" ::: "memory");
}

#if PREFETCH
// Read past the L1 cache, which must not keep what the kernel before this one may yet change. Zero where take
// is false.
__device__ __forceinline__ int load_hint(const int* pointer, bool take) {
  int value;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.relaxed.gpu.global.s32 %0, [%1];\n}\n"
      : "=r"(value)
      : "l"(pointer), "r"(static_cast<int>(take))
      : "memory");
  return value;
}

// Brings the first pages of each warpgroup's share to the L2 cache while the kernel before this one still
// runs. Lengths and table may be about to change: what is read here decides nothing but what is fetched, and
// every page number is checked. Predicated, so that the compiler sees the warps stay whole.
__device__ __forceinline__ void prefetch_share(const uint8_t* cache, const int* cache_seqlens,
                                               const int* block_table, int batch_size, int table_stride,
                                               int num_pages, Pages pages) {
  const int lane = threadIdx.x % 32;
  const int count = pages.of(load_hint(cache_seqlens + lane, lane < batch_size));
  int upto = count;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFF, upto, distance);
    upto += lane >= distance ? other : 0;
  }
  const int64_t total = __shfl_sync(0xFFFFFFFF, upto, 31);
  const int64_t begin = total * blockIdx.x / gridDim.x;
  // The request that the share begins in; of more than 32, only the first are looked at.
  const uint32_t reached = __ballot_sync(0xFFFFFFFF, batch_size <= 32 && upto > begin);
  const int request = reached ? __ffs(reached) - 1 : 0;
  const int taken = __shfl_sync(0xFFFFFFFF, count, request);
  const int before = __shfl_sync(0xFFFFFFFF, upto, request) - taken;
  const int64_t at = begin - before + warpgroup() + lane * WARPGROUPS;
  const bool some = reached && threadIdx.x % 128 < PREFETCH && at < taken;
  const int page = load_hint(block_table + static_cast<int64_t>(request) * table_stride + at * pages.step, some);
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p cp.async.bulk.prefetch.L2.global [%0], %1;\n}\n" ::"l"(
          cache + static_cast<int64_t>(page) * kPageBytes),
      "n"(kPageBytes), "r"(static_cast<int>(some && page >= 0 && page < num_pages))
      : "memory");
}
#endif

// Divides the pages of all requests evenly over the blocks and scores this block's share; enter(request)
// comes before the first score of each request in the share, page_end(request) after each page, and
// leave(request) after the last.
template <typename Visit, typename Enter = Nothing, typename PageEnd = Nothing,
          typename Leave = Nothing>
__device__ __forceinline__ void score_share(const TensorMap& map, const uint8_t* q, const uint8_t* cache, const float* weights,
                                            const int* cache_seqlens, const int* block_table,
                                            int batch_size, int table_stride, Pages pages,
                                            Visit visit, Enter enter = {},
                                            PageEnd page_end = {}, Leave leave = {}) {
  const Smem smem = smem_layout();
  const int lane = threadIdx.x % 32;
  Pipeline pipeline(map, cache, smem);
  // A lane a request: reading one length after the other would cost a small batch its whole time.
  auto length_of = [&](int request) { return request < batch_size ? cache_seqlens[request] : 0; };
  int64_t total = 0;
  for (int first = 0; first < batch_size; first += 32)
    total += __reduce_add_sync(0xFFFFFFFF, static_cast<uint32_t>(pages.of(length_of(first + lane))));
#if TAIL
  const int resident = gridDim.x / 2, later = gridDim.x - resident;
  const int64_t bulk = total * (16 - TAIL) / 16;
  auto boundary = [&](int block) {
    return block < resident ? bulk * block / resident : bulk + (total - bulk) * (block - resident) / later;
  };
  const int64_t begin = boundary(blockIdx.x), end = boundary(blockIdx.x + 1);
#else
  const int64_t begin = total * blockIdx.x / gridDim.x;
  const int64_t end = total * (blockIdx.x + 1) / gridDim.x;
#endif
  int64_t seen = 0;
  for (int first = 0; first < batch_size && seen < end; first += 32) {
    const int own_length = length_of(first + lane), own_count = pages.of(own_length);
    int upto = own_count;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFF, upto, distance);
      if (lane >= distance) upto += other;
    }
    // Requests that end before the share are passed over.
    const uint32_t reached = __ballot_sync(0xFFFFFFFF, seen + upto > begin);
    const int skipped = reached ? __ffs(reached) - 1 : 32;
    if (skipped > 0) seen += __shfl_sync(0xFFFFFFFF, upto, skipped - 1);
    for (int i = skipped; i < 32 && first + i < batch_size && seen < end; ++i) {
      const int request = first + i, length = __shfl_sync(0xFFFFFFFF, own_length, i);
      const int count = __shfl_sync(0xFFFFFFFF, own_count, i);
      const int from = begin > seen ? static_cast<int>(begin - seen) : 0;
      const int to = static_cast<int>(end - seen < count ? end - seen : count);
      seen += count;
      if (from >= to) continue;
      __syncthreads();
      const int64_t row = static_cast<int64_t>(request) * NEXT_N * NUM_HEADS;
      pipeline.start(smem, block_table + static_cast<int64_t>(request) * table_stride, pages.step, from, to,
                     [&] { load_queries(smem, q + row * 128); });
      const Weights own = load_weights(weights + row);
      enter(request);
      pipeline.wait();
      __syncthreads();
      score_pages(smem, pipeline, own, length,
                  [&](int set, int position, int index, float score, bool valid) {
                    visit(set, position, index, score, valid);
                  },
                  [&] { page_end(request); });
      leave(request);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    paged_mqa_logits_kernel(const __grid_constant__ TensorMap map, const uint8_t* __restrict__ q, const uint8_t* __restrict__ cache,
                            const float* __restrict__ weights, const int* __restrict__ cache_seqlens,
                            const int* __restrict__ block_table, float* __restrict__ out,
                            int batch_size, int table_stride, int max_num_blocks, int num_pages, int out_stride) {
  let_next_kernel_start();
#if PREFETCH
  prefetch_share(cache, cache_seqlens, block_table, batch_size, table_stride, num_pages,
                 Pages{1, max_num_blocks});
#endif
  wait_for_previous_kernel();
  float* target[kSets] = {};
  score_share(map, q, cache, weights, cache_seqlens, block_table, batch_size, table_stride,
              Pages{1, max_num_blocks},
              [&](int set, int position, int, float score, bool valid) {
                // Predicated, not branched around: some of the lanes always stay out.
                asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}\n" ::"l"(
                                 target[set] + position),
                             "f"(score), "r"(static_cast<int>(valid))
                             : "memory");
              },
              [&](int request) {
#pragma unroll
                for (int set = 0; set < kSets; ++set)
                  target[set] = out + static_cast<int64_t>(request * NEXT_N + set * 4 + threadIdx.x % 4) * out_stride;
              });
}

// Scores of every step-th page, packed; positions past a row's length become -inf.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    paged_mqa_sample_kernel(const __grid_constant__ TensorMap map, const uint8_t* __restrict__ q, const uint8_t* __restrict__ cache,
                            const float* __restrict__ weights, const int* __restrict__ cache_seqlens,
                            const int* __restrict__ block_table, float* __restrict__ sample,
                            int batch_size, int table_stride, int num_pages, int sample_stride, int step) {
  let_next_kernel_start();
#if PREFETCH
  prefetch_share(cache, cache_seqlens, block_table, batch_size, table_stride, num_pages,
                 Pages{step, sample_stride / 64});
#endif
  wait_for_previous_kernel();
  float* target[kSets] = {};
  score_share(map, q, cache, weights, cache_seqlens, block_table, batch_size, table_stride,
              Pages{step, sample_stride / 64},
              [&](int set, int, int index, float score, bool valid) {
                if (set * 4 + threadIdx.x % 4 < NEXT_N)
                  target[set][index] = valid ? score : -__int_as_float(0x7F800000);
              },
              [&](int request) {
#pragma unroll
                for (int set = 0; set < kSets; ++set)
                  target[set] =
                      sample + static_cast<int64_t>(request * NEXT_N + set * 4 + threadIdx.x % 4) * sample_stride;
              });
}

// Keys of the scores at or above each row's threshold, in any order; counts may pass the capacity.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    paged_mqa_filter_kernel(const __grid_constant__ TensorMap map, const uint8_t* __restrict__ q, const uint8_t* __restrict__ cache,
                            const float* __restrict__ weights, const int* __restrict__ cache_seqlens,
                            const int* __restrict__ block_table,
                            const float* __restrict__ thresholds, int* __restrict__ counts,
                            uint64_t* __restrict__ candidates, int batch_size, int table_stride, int max_num_blocks, int num_pages,
                            int capacity) {
  let_next_kernel_start();
#if PREFETCH
  prefetch_share(cache, cache_seqlens, block_table, batch_size, table_stride, num_pages,
                 Pages{1, max_num_blocks});
#endif
  wait_for_previous_kernel();
  constexpr int kQueue = NEXT_N * kStaged;
  constexpr int kTokenShift = 28;  // positions stay below it
  const int lane = threadIdx.x % 32;
  const uint32_t below = (1u << lane) - 1;
  uint2* queue = reinterpret_cast<uint2*>(smem_layout().staged) + threadIdx.x / 32 * kQueue;
  float least[kSets] = {};
  // Scores wait in the warp's own shared memory, with their position and their token above it: a few global
  // atomics then serve many, and the scoring loop has none and no branch.
  int waiting = 0;
  auto flush = [&](int request) {
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < waiting; first += 32) {
      const bool mine = first + lane < waiting;
      const uint2 entry = mine ? queue[first + lane] : uint2{0, 0};
      const int token = mine ? static_cast<int>(entry.y >> kTokenShift) : 8;
      const uint32_t same = __match_any_sync(0xFFFFFFFF, token);
      const int leader = __ffs(same) - 1, row = request * NEXT_N + token;
      int at = 0;
      if (mine && lane == leader) at = atomicAdd(counts + row, __popc(same));
      at = __shfl_sync(0xFFFFFFFF, at, leader) + __popc(same & below);
      if (mine && at < capacity)
        candidates[static_cast<int64_t>(row) * capacity + at] =
            selection_key(__uint_as_float(entry.x), entry.y & ((1u << kTokenShift) - 1));
    }
    waiting = 0;
    __syncwarp();
  };
  score_share(
      map, q, cache, weights, cache_seqlens, block_table, batch_size, table_stride,
      Pages{1, max_num_blocks},
      [&](int set, int position, int, float score, bool valid) {
        const bool passes = valid && score >= least[set];
        const uint32_t passed = __ballot_sync(0xFFFFFFFF, passes);
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.shared.v2.b32 [%0], {%1, %2};\n}\n" ::"r"(
                         smem_address(queue + waiting + __popc(passed & below))),
                     "r"(__float_as_uint(score)), "r"(position | static_cast<uint32_t>(set * 4 + lane % 4) << kTokenShift),
                     "r"(static_cast<int>(passes))
                     : "memory");
        waiting += __popc(passed);
      },
      [&](int request) {
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          const int token = set * 4 + lane % 4;
          // Above the lowest finite score, a score is above -inf and no NaN.
          if (token < NEXT_N) least[set] = fmaxf(thresholds[request * NEXT_N + token], -3.402823466e38f);
        }
      },
      // A page adds at most 16 keys a token.
      [&](int request) {
        if (waiting > kQueue - 16 * NEXT_N) flush(request);
      },
      flush);
}

// For rows whose candidates are too few or too many: an exact radix selection by scoring the request
// once a byte of the key. A block a request; it returns at once where every row is sound.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    paged_mqa_repair_kernel(const __grid_constant__ TensorMap map, const uint8_t* __restrict__ q, const uint8_t* __restrict__ cache,
                            const float* __restrict__ weights, const int* __restrict__ cache_seqlens,
                            const int* __restrict__ block_table, const float* __restrict__ thresholds,
                            int* __restrict__ counts, uint64_t* __restrict__ candidates,
                            int table_stride, int capacity, int topk) {
  __shared__ uint32_t counters[NEXT_N][256];
  __shared__ uint64_t prefix[NEXT_N];
  __shared__ uint32_t rank[NEXT_N];
  __shared__ uint32_t digit, before, valid_total[NEXT_N], kept[NEXT_N];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int request = blockIdx.x, length = cache_seqlens[request];
  const int pages = length <= 0 ? 0 : (length + 63) >> 6;

  // A lane a token: one read after the other would cost every sound batch their latencies.
  const int lane = threadIdx.x % 32, seen = length - NEXT_N + lane + 1;
  bool unsound = false;
  if (lane < NEXT_N && seen > 0) {
    const float threshold = thresholds[request * NEXT_N + lane];
    const int count = counts[request * NEXT_N + lane];
    unsound = count > capacity || (count < topk && selectable(threshold));
  }
  const uint32_t broken = __ballot_sync(0xFFFFFFFF, unsound);
  if (broken == 0) return;

  const Smem smem = smem_layout();
  const int64_t first = static_cast<int64_t>(request) * NEXT_N * NUM_HEADS;
  const Weights own = load_weights(weights + first);
  const int* table = block_table + static_cast<int64_t>(request) * table_stride;
  if (threadIdx.x < NEXT_N) prefix[threadIdx.x] = 0, kept[threadIdx.x] = 0;
  // Scores the request; counts the digits at shift of the keys that begin with the prefix, or, where shift is
  // negative, keeps the keys up to the prefix.
  Pipeline pipeline(map, cache, smem);
  __syncthreads();
  auto scan = [&](int shift) {
    pipeline.start(smem, table, 1, 0, pages, [&] { load_queries(smem, q + first * 128); });
    pipeline.wait();
    __syncthreads();
    score_pages(smem, pipeline, own, length, [&](int set, int position, int, float score, bool valid) {
      const int token = set * 4 + threadIdx.x % 4;
      if (valid && (broken >> token & 1) && selectable(score)) {
        const uint64_t key = selection_key(score, position);
        if (shift < 0) {
          const int64_t row = static_cast<int64_t>(request) * NEXT_N + token;
          if (key <= prefix[token]) candidates[row * capacity + atomicAdd(&kept[token], 1u)] = key;
        } else if (shift == 56 || key >> (shift + 8) == prefix[token]) {
          atomicAdd(&counters[token][key >> shift & 255], 1u);
        }
      }
      __syncwarp();
    });
    __syncthreads();
  };
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < NEXT_N * 256; i += kThreads) (&counters[0][0])[i] = 0;
    __syncthreads();
    scan(shift);
    for (int token = 0; token < NEXT_N; ++token) {
      if (!(broken >> token & 1)) continue;
      if (threadIdx.x == 0 && shift == 56) {
        uint32_t total = 0;
        for (int i = 0; i < 256; ++i) total += counters[token][i];
        valid_total[token] = total;
        rank[token] = total < topk ? total : topk;
      }
      __syncthreads();
      if (threadIdx.x < 32 && valid_total[token] > 0)
        find_digit(counters[token], rank[token], &digit, &before);
      __syncthreads();
      if (threadIdx.x == 0 && valid_total[token] > 0) {
        prefix[token] = prefix[token] << 8 | digit;
        rank[token] -= before;
      }
      __syncthreads();
    }
  }
  scan(-1);
  if (threadIdx.x < NEXT_N && (broken >> threadIdx.x & 1))
    counts[request * NEXT_N + threadIdx.x] = kept[threadIdx.x];
}
