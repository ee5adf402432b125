// Paged index scores: NEXT_N query tokens of a request against each page of 64 keys, loaded once.
//
// A block is one warpgroup. A page is one tile of the matrix instruction's M dimension; every token of the
// request is a group of NUM_HEADS columns of N. Several blocks share a multiprocessor, so that the
// weighted ReLU of one overlaps the products of another; STAGES pages are in flight in each.
//
// Defines: NUM_HEADS, NEXT_N, TOKENS (tokens a pass), PASSES, STAGES, MIN_BLOCKS. The kernels differ in what
// they do with a score: store it, store a sample, keep it above a threshold, or repair such a selection.

constexpr int kColumns = TOKENS * NUM_HEADS;
constexpr int kAccumulators = kColumns / 2;
constexpr int kKeyBytes = 64 * 128;
constexpr int kPageBytes = 64 * 132;

struct Smem {
  uint8_t* keys;     // [STAGES][64][128], 128-byte swizzle
  uint8_t* q;        // [PASSES * kColumns][128], same
  float* scales;     // [STAGES][64]
  float* weights;    // [PASSES * kColumns]
};

__device__ __forceinline__ Smem smem_layout() {
  extern __shared__ __align__(1024) uint8_t smem_raw[];
  uint8_t* q = smem_raw + STAGES * kKeyBytes;
  float* scales = reinterpret_cast<float*>(q + PASSES * kColumns * 128);
  return {smem_raw, q, scales, scales + STAGES * 64};
}

__device__ __forceinline__ void copy_async(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void load_page(const Smem& smem, const uint8_t* cache, int page, int stage) {
  const uint8_t* base = cache + static_cast<int64_t>(page) * kPageBytes;
  const uint32_t keys = smem_address(smem.keys + stage * kKeyBytes);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int chunk = threadIdx.x + i * 128, row = chunk / 8;
    copy_async(keys + row * 128 + (((chunk % 8) ^ (row & 7)) * 16), base + chunk * 16);
  }
  if (threadIdx.x < 16)
    copy_async(smem_address(smem.scales + stage * 64) + threadIdx.x * 16,
               base + kKeyBytes + threadIdx.x * 16);
}

__device__ __forceinline__ void load_queries(const Smem& smem, const uint8_t* q, const float* weights) {
  for (int i = threadIdx.x; i < PASSES * kColumns * 8; i += 128) {
    const int column = i / 8, chunk = i % 8;
    uint4 value = {0, 0, 0, 0};
    if (column < NEXT_N * NUM_HEADS)
      value = *reinterpret_cast<const uint4*>(q + column * 128 + chunk * 16);
    *reinterpret_cast<uint4*>(smem.q + column * 128 + ((chunk ^ (column & 7)) * 16)) = value;
  }
  for (int i = threadIdx.x; i < PASSES * kColumns; i += 128)
    smem.weights[i] = i < NEXT_N * NUM_HEADS ? weights[i] : 0.0f;
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
template <typename Visit>
__device__ __forceinline__ void score_pages(const Smem& smem, const uint8_t* cache, const int* table,
                                            int length, int from, int to, int step, Visit visit) {
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int row = threadIdx.x / 32 * 16 + group;
  // Page numbers are read an iteration before their copies start.
  int ahead = table[from * step];
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (from + i < to) {
      load_page(smem, cache, ahead, i);
      ahead = from + i + 1 < to ? table[(from + i + 1) * step] : 0;
    }
    asm volatile("cp.async.commit_group;\n" ::: "memory");
  }
  int stage = 0;
  for (int i = from; i < to; ++i) {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(STAGES - 2) : "memory");
    fence_async_proxy();
    __syncthreads();  // the page is here, and every warp is done with the stage that is refilled next
    if (i + STAGES - 1 < to) {
      load_page(smem, cache, ahead, (stage + STAGES - 1) % STAGES);
      ahead = i + STAGES < to ? table[(i + STAGES) * step] : 0;
    }
    asm volatile("cp.async.commit_group;\n" ::: "memory");
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      float d[kAccumulators];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t keys = smem_address(smem.keys) + stage * kKeyBytes + k * 32;
        const uint32_t queries = smem_address(smem.q) + pass * kColumns * 128 + k * 32;
        WGMMA_FP8(d, smem_descriptor(keys, 16, 1024), smem_descriptor(queries, 16, 1024), k != 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      const float scale = smem.scales[stage * 64 + row + 8 * (quad & 1)];
      // Each lane holds two columns in eight of both its rows: a token's sum spans the four lanes of a
      // quad. Exchanging rows first and tokens second leaves one row and every other token a lane.
      float sums[TOKENS];
#pragma unroll
      for (int token = 0; token < TOKENS; ++token) {
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int j = 0; j < NUM_HEADS / 8; ++j) {
          const int c = token * (NUM_HEADS / 8) + j;
          const float2 w =
              *reinterpret_cast<const float2*>(smem.weights + pass * kColumns + c * 8 + quad * 2);
          low = fmaf(fmaxf(d[4 * c], 0.0f), w.x, low);
          low = fmaf(fmaxf(d[4 * c + 1], 0.0f), w.y, low);
          high = fmaf(fmaxf(d[4 * c + 2], 0.0f), w.x, high);
          high = fmaf(fmaxf(d[4 * c + 3], 0.0f), w.y, high);
        }
        const float given = quad & 1 ? low : high;
        const float kept = quad & 1 ? high : low;
        sums[token] = kept + __shfl_xor_sync(0xFFFFFFFF, given, 1);
      }
      const int in_page = row + 8 * (quad & 1);
      const int position = i * step * 64 + in_page;
#pragma unroll
      for (int pair = 0; pair < (TOKENS + 1) / 2; ++pair) {
        const float even = sums[2 * pair];
        const float odd = 2 * pair + 1 < TOKENS ? sums[2 * pair + 1] : 0.0f;
        const float given = quad & 2 ? even : odd;
        const float kept = quad & 2 ? odd : even;
        const float score = (kept + __shfl_xor_sync(0xFFFFFFFF, given, 2)) * scale;
        const int in_pass = 2 * pair + (quad >> 1);
        const int token = pass * TOKENS + in_pass;
        const bool real = in_pass < TOKENS && token < NEXT_N;
        // Row t of the request sees length - NEXT_N + t + 1 positions.
        visit(real ? token : -1, position, i * 64 + in_page, score,
              real && position < length - NEXT_N + token + 1);
      }
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
}

// Divides the pages of all requests evenly over the blocks and scores this block's share.
template <typename Visit>
__device__ __forceinline__ void score_share(const uint8_t* q, const uint8_t* cache, const float* weights,
                                            const int* cache_seqlens, const int* block_table,
                                            int batch_size, int max_num_blocks, Pages pages,
                                            Visit visit) {
  const Smem smem = smem_layout();
  int64_t total = 0;
  for (int request = 0; request < batch_size; ++request) total += pages.of(cache_seqlens[request]);
  const int64_t begin = total * blockIdx.x / gridDim.x;
  const int64_t end = total * (blockIdx.x + 1) / gridDim.x;
  int64_t seen = 0;
  for (int request = 0; request < batch_size && seen < end; ++request) {
    const int length = cache_seqlens[request];
    const int count = pages.of(length);
    const int from = begin > seen ? static_cast<int>(begin - seen) : 0;
    const int to = static_cast<int>(end - seen < count ? end - seen : count);
    seen += count;
    if (from >= to) continue;
    __syncthreads();
    const int64_t first = static_cast<int64_t>(request) * NEXT_N * NUM_HEADS;
    load_queries(smem, q + first * 128, weights + first);
    __syncthreads();
    const int* table = block_table + static_cast<int64_t>(request) * max_num_blocks;
    score_pages(smem, cache, table, length, from, to, pages.step,
                [&](int token, int position, int index, float score, bool valid) {
                  visit(request * NEXT_N + token, token >= 0, position, index, score, valid);
                });
  }
}

extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS)
    paged_mqa_logits_kernel(const uint8_t* __restrict__ q, const uint8_t* __restrict__ cache,
                            const float* __restrict__ weights, const int* __restrict__ cache_seqlens,
                            const int* __restrict__ block_table, float* __restrict__ out,
                            int batch_size, int max_num_blocks, int out_stride) {
  score_share(q, cache, weights, cache_seqlens, block_table, batch_size, max_num_blocks,
              Pages{1, max_num_blocks},
              [&](int row, bool, int position, int, float score, bool valid) {
                if (valid) out[static_cast<int64_t>(row) * out_stride + position] = score;
              });
}

// Scores of every step-th page, packed; positions past a row's length become -inf.
extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS)
    paged_mqa_sample_kernel(const uint8_t* __restrict__ q, const uint8_t* __restrict__ cache,
                            const float* __restrict__ weights, const int* __restrict__ cache_seqlens,
                            const int* __restrict__ block_table, float* __restrict__ sample,
                            int batch_size, int max_num_blocks, int sample_stride, int step) {
  score_share(q, cache, weights, cache_seqlens, block_table, batch_size, max_num_blocks,
              Pages{step, sample_stride / 64},
              [&](int row, bool real, int, int index, float score, bool valid) {
                if (real)
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
  score_share(q, cache, weights, cache_seqlens, block_table, batch_size, max_num_blocks,
              Pages{1, max_num_blocks},
              [&](int row, bool, int position, int, float score, bool valid) {
                if (valid && score >= thresholds[row] && selectable(score)) {
                  const int at = atomicAdd(counts + row, 1);
                  if (at < capacity)
                    candidates[static_cast<int64_t>(row) * capacity + at] = selection_key(score, position);
                }
              });
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
