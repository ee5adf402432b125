// Paged index scores: NEXT_N query tokens of a request against each page of 64 keys, loaded once.
//
// A block is one warpgroup. A page is one tile of the matrix instruction's M dimension; every token of the
// request is a group of NUM_HEADS columns of N. The tokens form GROUPS groups: while one group's weighted
// ReLU runs, the next group's products do. Several blocks share a multiprocessor.
//
// Defines: NUM_HEADS, NEXT_N, GROUPS (1 or even), TOKENS (a group), STAGES, MIN_BLOCKS. The kernels differ in
// what they do with a score: store it, store a sample, keep it above a threshold, or repair such a
// selection.

constexpr int kColumns = TOKENS * NUM_HEADS;  // of a group
constexpr int kAccumulators = kColumns / 2;
constexpr int kQuadHeads = NUM_HEADS / 4;  // whose columns one lane of a quad holds
constexpr int kStaged = 24;  // keys a token that a warp holds back: 16 of one page, and 8
constexpr int kKeyBytes = 64 * 128;
constexpr int kPageBytes = 64 * 132;

struct Smem {
  uint8_t* keys;     // [STAGES][64][128], 128-byte swizzle
  uint8_t* q;        // [GROUPS * kColumns][128], same
  float* scales;     // [STAGES][64]
  float* weights;    // [GROUPS * TOKENS][4 lanes of a quad][kQuadHeads]
  uint64_t* staged;  // [4 warps][NEXT_N][kStaged]
};

__device__ __forceinline__ Smem smem_layout() {
  extern __shared__ __align__(1024) uint8_t smem_raw[];
  uint8_t* q = smem_raw + STAGES * kKeyBytes;
  float* scales = reinterpret_cast<float*>(q + GROUPS * kColumns * 128);
  float* weights = scales + STAGES * 64;
  return {smem_raw, q, scales, weights, reinterpret_cast<uint64_t*>(weights + GROUPS * kColumns)};
}

__device__ __forceinline__ void copy_async(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(target), "l"(source) : "memory");
}

// A thread's four chunks of a page lie 16 rows apart, so that one swizzled offset serves them all.
__device__ __forceinline__ uint32_t chunk_offset() {
  const int row = threadIdx.x / 8;
  return row * 128 + (((threadIdx.x % 8) ^ (row & 7)) * 16);
}

__device__ __forceinline__ void load_page(const Smem& smem, const uint8_t* cache, int page, int stage,
                                          uint32_t offset) {
  const uint8_t* base = cache + static_cast<int64_t>(page) * kPageBytes + threadIdx.x * 16;
  const uint32_t keys = smem_address(smem.keys) + stage * kKeyBytes + offset;
#pragma unroll
  for (int i = 0; i < 4; ++i) copy_async(keys + i * 2048, base + i * 2048);
  if (threadIdx.x < 16)
    copy_async(smem_address(smem.scales) + stage * 256 + threadIdx.x * 16, base + kKeyBytes);
}

__device__ __forceinline__ void load_queries(const Smem& smem, const uint8_t* q, const float* weights) {
  for (int i = threadIdx.x; i < GROUPS * kColumns * 8; i += 128) {
    const int column = i / 8, chunk = i % 8;
    uint4 value = {0, 0, 0, 0};
    if (column < NEXT_N * NUM_HEADS)
      value = *reinterpret_cast<const uint4*>(q + column * 128 + chunk * 16);
    *reinterpret_cast<uint4*>(smem.q + column * 128 + ((chunk ^ (column & 7)) * 16)) = value;
  }
  for (int i = threadIdx.x; i < GROUPS * kColumns; i += 128) {
    // Head h is column h % 8 of its group of eight; lane q of a quad holds columns 2q and 2q + 1.
    const int head = i % NUM_HEADS, lane = head % 8 / 2;
    smem.weights[(i / NUM_HEADS * 4 + lane) * kQuadHeads + head / 8 * 2 + head % 2] =
        i < NEXT_N * NUM_HEADS ? weights[i] : 0.0f;
  }
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

// Scores pages [from, to) of a request, in order; calls visit(token, position, index, score, valid) in
// whole warps, where index counts positions of the launch's pages and valid says that a token sees the
// position. Lanes without a score call it with token -1.
struct Nothing {
  template <typename... Arguments>
  __device__ __forceinline__ void operator()(Arguments...) const {}
};

template <typename Visit, typename PageEnd = Nothing>
__device__ __forceinline__ void score_pages(const Smem& smem, const uint8_t* cache, const int* table,
                                            int length, int from, int to, int step, Visit visit,
                                            PageEnd page_end = {}) {
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int row = threadIdx.x / 32 * 16 + group;
  // Page numbers are read an iteration before their copies start.
  int ahead = table[from * step];
  const uint32_t offset = chunk_offset();
#pragma unroll
  for (int i = 0; i < STAGES - 2; ++i) {
    if (from + i < to) {
      load_page(smem, cache, ahead, i, offset);
      ahead = from + i + 1 < to ? table[(from + i + 1) * step] : 0;
    }
    asm volatile("cp.async.commit_group;\n" ::: "memory");
  }
  int stage = STAGES - 1;   // of the page that was made ready last
  int refill = STAGES - 2;  // of the next copy
  // Waits for page i, frees the stage of page i - 2 and starts the copy that goes there.
  auto ready = [&](int i) {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(STAGES - 3) : "memory");
    fence_async_proxy();
    __syncthreads();
    const int next = i + STAGES - 2;
    if (next < to) {
      load_page(smem, cache, ahead, refill, offset);
      ahead = next + 1 < to ? table[(next + 1) * step] : 0;
    }
    asm volatile("cp.async.commit_group;\n" ::: "memory");
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    refill = refill + 1 == STAGES ? 0 : refill + 1;
  };
  const uint32_t keys_low = descriptor_low(smem_address(smem.keys));
  const uint32_t queries_low = descriptor_low(smem_address(smem.q));
  auto issue = [&](float (&d)[kAccumulators], int tokens) {
    const uint32_t page = keys_low + stage * (kKeyBytes >> 4);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      WGMMA_FP8(d, page + k * 2, queries_low + tokens * (kColumns * 128 >> 4) + k * 2, k != 0);
    wgmma_commit();
  };
  auto finish = [&](const float (&d)[kAccumulators], int i, int at, int tokens) {
    // Each lane holds two columns in eight of both its rows: a token's sum spans the four lanes of a
    // quad. Exchanging rows first and tokens second leaves one row and every other token a lane.
    const int in_page = row + 8 * (quad & 1);
    const float scale = smem.scales[at * 64 + in_page];
    const float4* weights =
        reinterpret_cast<const float4*>(smem.weights + (tokens * TOKENS * 4 + quad) * kQuadHeads);
    float sums[TOKENS];
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
      float4 w[kQuadHeads / 4];
#pragma unroll
      for (int j = 0; j < kQuadHeads / 4; ++j) w[j] = weights[token * kQuadHeads + j];
      float low[2] = {0.0f, 0.0f}, high[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kQuadHeads / 4; ++j) {
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
      const float of_low = low[0] + low[1], of_high = high[0] + high[1];
      const float given = quad & 1 ? of_low : of_high;
      const float kept = quad & 1 ? of_high : of_low;
      sums[token] = kept + __shfl_xor_sync(0xFFFFFFFF, given, 1);
    }
    const int position = i * step * 64 + in_page;
#pragma unroll
    for (int pair = 0; pair < (TOKENS + 1) / 2; ++pair) {
      const float even = sums[2 * pair];
      const float odd = 2 * pair + 1 < TOKENS ? sums[2 * pair + 1] : 0.0f;
      const float given = quad & 2 ? even : odd;
      const float kept = quad & 2 ? odd : even;
      const float score = (kept + __shfl_xor_sync(0xFFFFFFFF, given, 2)) * scale;
      const int in_group = 2 * pair + (quad >> 1);
      const int token = tokens * TOKENS + in_group;
      const bool real = in_group < TOKENS && token < NEXT_N;
      // Row t of the request sees length - NEXT_N + t + 1 positions.
      visit(real ? token : -1, position, i * 64 + in_page, score,
            real && position < length - NEXT_N + token + 1);
    }
  };

  ready(from);
#if GROUPS == 1
  float d[kAccumulators];
  for (int i = from; i < to; ++i) {
    const int own = stage;
    issue(d, 0);
    wgmma_wait<0>();
    if (i + 1 < to) ready(i + 1);
    finish(d, i, own, 0);
    page_end();
  }
#else
  float even[kAccumulators], odd[kAccumulators];
  issue(even, 0);
  for (int i = from; i < to; ++i) {
    const int own = stage;
#pragma unroll
    for (int pair = 0; pair < GROUPS / 2; ++pair) {
      issue(odd, 2 * pair + 1);
      wgmma_wait<1>();
      finish(even, i, own, 2 * pair);
      if (pair + 1 < GROUPS / 2) {
        issue(even, 2 * pair + 2);
        wgmma_wait<1>();
      } else if (i + 1 < to) {
        ready(i + 1);
        issue(even, 0);
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      finish(odd, i, own, 2 * pair + 1);
    }
    page_end();
  }
#endif
  asm volatile("cp.async.wait_all;\n" ::: "memory");
}

// Divides the pages of all requests evenly over the blocks and scores this block's share; enter(request)
// comes before the first score of each request in the share, page_end(request) after each page, and
// leave(request) after the last.
template <typename Visit, typename Enter = Nothing, typename PageEnd = Nothing,
          typename Leave = Nothing>
__device__ __forceinline__ void score_share(const uint8_t* q, const uint8_t* cache, const float* weights,
                                            const int* cache_seqlens, const int* block_table,
                                            int batch_size, int max_num_blocks, Pages pages,
                                            Visit visit, Enter enter = {},
                                            PageEnd page_end = {}, Leave leave = {}) {
  const Smem smem = smem_layout();
  const int lane = threadIdx.x % 32;
  // A lane a request: reading one length after the other would cost a small batch its whole time.
  auto length_of = [&](int request) { return request < batch_size ? cache_seqlens[request] : 0; };
  int64_t total = 0;
  for (int first = 0; first < batch_size; first += 32)
    total += __reduce_add_sync(0xFFFFFFFF, static_cast<uint32_t>(pages.of(length_of(first + lane))));
  const int64_t begin = total * blockIdx.x / gridDim.x;
  const int64_t end = total * (blockIdx.x + 1) / gridDim.x;
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
      load_queries(smem, q + row * 128, weights + row);
      enter(request);
      __syncthreads();
      const int* table = block_table + static_cast<int64_t>(request) * max_num_blocks;
      score_pages(smem, cache, table, length, from, to, pages.step,
                  [&](int token, int position, int index, float score, bool valid) {
                    visit(request * NEXT_N + token, token, position, index, score, valid);
                  },
                  [&] { page_end(request); });
      leave(request);
    }
  }
}

extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS)
    paged_mqa_logits_kernel(const uint8_t* __restrict__ q, const uint8_t* __restrict__ cache,
                            const float* __restrict__ weights, const int* __restrict__ cache_seqlens,
                            const int* __restrict__ block_table, float* __restrict__ out,
                            int batch_size, int max_num_blocks, int out_stride) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  score_share(q, cache, weights, cache_seqlens, block_table, batch_size, max_num_blocks,
              Pages{1, max_num_blocks},
              [&](int row, int, int position, int, float score, bool valid) {
                // Predicated, not branched around: a quarter of the lanes always stay out.
                asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}\n" ::"l"(
                                 out + static_cast<int64_t>(row) * out_stride + position),
                             "f"(score), "r"(static_cast<int>(valid))
                             : "memory");
              });
}

// Scores of every step-th page, packed; positions past a row's length become -inf.
extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS)
    paged_mqa_sample_kernel(const uint8_t* __restrict__ q, const uint8_t* __restrict__ cache,
                            const float* __restrict__ weights, const int* __restrict__ cache_seqlens,
                            const int* __restrict__ block_table, float* __restrict__ sample,
                            int batch_size, int max_num_blocks, int sample_stride, int step) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  score_share(q, cache, weights, cache_seqlens, block_table, batch_size, max_num_blocks,
              Pages{step, sample_stride / 64},
              [&](int row, int token, int, int index, float score, bool valid) {
                if (token >= 0)
                  sample[static_cast<int64_t>(row) * sample_stride + index] =
                      valid ? score : -__int_as_float(0x7F800000);
              });
}

// Keys of the scores at or above each row's threshold, in any order; counts may pass the capacity.
extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS)
    paged_mqa_filter_kernel(const uint8_t* __restrict__ q, const uint8_t* __restrict__ cache,
                            const float* __restrict__ weights, const int* __restrict__ cache_seqlens,
                            const int* __restrict__ block_table,
                            const float* __restrict__ thresholds, int* __restrict__ counts,
                            uint64_t* __restrict__ candidates, int batch_size, int max_num_blocks,
                            int capacity) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  constexpr int kQueue = NEXT_N * kStaged;
  constexpr int kTokenShift = 28;  // positions stay below it
  const int lane = threadIdx.x % 32;
  const uint32_t below = (1u << lane) - 1;
  uint2* queue = reinterpret_cast<uint2*>(smem_layout().staged) + threadIdx.x / 32 * kQueue;
  __shared__ float least[NEXT_N];
  // Scores wait in the warp's own shared memory, with their position and their token above it: a few global
  // atomics then serve many, and the scoring loop has none and no branch.
  int waiting = 0;
  auto flush = [&](int request) {
    __syncwarp();
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
      q, cache, weights, cache_seqlens, block_table, batch_size, max_num_blocks,
      Pages{1, max_num_blocks},
      [&](int, int token, int position, int, float score, bool valid) {
        const bool passes = valid && score >= least[token < 0 ? 0 : token];
        const uint32_t passed = __ballot_sync(0xFFFFFFFF, passes);
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.shared.v2.b32 [%0], {%1, %2};\n}\n" ::"r"(
                         smem_address(queue + waiting + __popc(passed & below))),
                     "r"(__float_as_uint(score)), "r"(position | static_cast<uint32_t>(token) << kTokenShift),
                     "r"(static_cast<int>(passes))
                     : "memory");
        waiting += __popc(passed);
      },
      [&](int request) {
        // Above the lowest finite score, a score is above -inf and no NaN.
        if (threadIdx.x < NEXT_N)
          least[threadIdx.x] = fmaxf(thresholds[request * NEXT_N + threadIdx.x], -3.402823466e38f);
      },
      // A page adds at most 16 keys a token.
      [&](int request) {
        if (waiting > kQueue - 16 * NEXT_N) flush(request);
      },
      flush);
}

// For rows whose candidates are too few or too many: an exact radix selection by scoring the request
// once a byte of the key. A block a request; it returns at once where every row is sound.
extern "C" __global__ void __launch_bounds__(128, 1)
    paged_mqa_repair_kernel(const uint8_t* __restrict__ q, const uint8_t* __restrict__ cache,
                            const float* __restrict__ weights, const int* __restrict__ cache_seqlens,
                            const int* __restrict__ block_table, const float* __restrict__ thresholds,
                            int* __restrict__ counts, uint64_t* __restrict__ candidates,
                            int max_num_blocks, int capacity, int topk) {
  __shared__ uint32_t counters[NEXT_N][256];
  __shared__ uint64_t prefix[NEXT_N];
  __shared__ uint32_t rank[NEXT_N];
  __shared__ uint32_t digit, before, valid_total[NEXT_N], kept[NEXT_N];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int request = blockIdx.x, length = cache_seqlens[request];
  const int pages = length <= 0 ? 0 : (length + 63) >> 6;

  uint32_t broken = 0;
  for (int token = 0; token < NEXT_N; ++token) {
    const int row = request * NEXT_N + token, seen = length - NEXT_N + token + 1;
    const bool complete = !selectable(thresholds[row]) && counts[row] <= capacity;
    if (seen > 0 && !complete && (counts[row] < topk || counts[row] > capacity)) broken |= 1u << token;
  }
  if (broken == 0) return;

  const Smem smem = smem_layout();
  const int64_t first = static_cast<int64_t>(request) * NEXT_N * NUM_HEADS;
  load_queries(smem, q + first * 128, weights + first);
  const int* table = block_table + static_cast<int64_t>(request) * max_num_blocks;
  if (threadIdx.x < NEXT_N) prefix[threadIdx.x] = 0, kept[threadIdx.x] = 0;
  __syncthreads();
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < NEXT_N * 256; i += 128) (&counters[0][0])[i] = 0;
    __syncthreads();
    score_pages(smem, cache, table, length, 0, pages, 1,
                [&](int token, int position, int, float score, bool valid) {
                  if (!valid || !(broken >> token & 1) || !selectable(score)) return;
                  const uint64_t key = selection_key(score, position);
                  if (shift < 56 && key >> (shift + 8) != prefix[token]) return;
                  atomicAdd(&counters[token][key >> shift & 255], 1u);
                });
    __syncthreads();
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
  score_pages(smem, cache, table, length, 0, pages, 1,
              [&](int token, int position, int, float score, bool valid) {
                if (!valid || !(broken >> token & 1) || !selectable(score)) return;
                const uint64_t key = selection_key(score, position);
                if (key > prefix[token]) return;
                const int64_t row = static_cast<int64_t>(request) * NEXT_N + token;
                candidates[row * capacity + atomicAdd(&kept[token], 1u)] = key;
              });
  __syncthreads();
  if (threadIdx.x < NEXT_N && (broken >> threadIdx.x & 1))
    counts[request * NEXT_N + threadIdx.x] = kept[threadIdx.x];
}
