// Paged index scores: NEXT_N query tokens of a request against each page of 64 keys, loaded once.
//
// A page is one tile of the matrix instruction's M dimension and a warpgroup's work; every token of the request
// is a group of NUM_HEADS columns of N. The tokens form GROUPS groups: while one group's heads are summed, the
// next group's products run. Warpgroups of a block share the queries and nothing else; several blocks share a
// multiprocessor. The kernels differ in what they do with a score: store it, store a sample, keep it above a
// threshold, or repair such a selection.
//
// Defines: NUM_HEADS, NEXT_N, GROUPS (1 or even), TOKENS (a group), WARPGROUPS, STAGES (of each), MIN_BLOCKS.
// Comes after order.cuh, index_pages.cuh and head_sum.cuh.

constexpr int kAccumulators = kColumns / 2;

struct Nothing {
  template <typename... Arguments>
  __device__ __forceinline__ void operator()(Arguments...) const {}
};

// Scores a warpgroup's pages in order; calls visit(set, position, index, score, valid) in whole warps. The
// score is that of token set * 4 + lane % 4, index counts positions of the launch's pages, and valid says
// that there is such a token and that it sees the position. page_end() follows each page.
template <typename Visit, typename PageEnd = Nothing>
__device__ __forceinline__ void score_pages(const Smem& smem, Pipeline& pipeline, const Weights& weights,
                                            int length, Visit visit, PageEnd page_end = {}) {
  const int quad = threadIdx.x % 4;
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;  // and the row eight below it
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
  // Before the next page may take this one's place.
  auto read_scales = [&] {
    scales[0] = smem.scales[pipeline.stage * 64 + row];
    scales[1] = smem.scales[pipeline.stage * 64 + row + 8];
  };
  auto sum_group = [&](const float (&d)[kAccumulators], int group) {
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      const int token = group * TOKENS + i, set = token / 4;
      if (token >= NEXT_N) break;
      float sums[2];
      sum_heads(d + i * (NUM_HEADS / 2), weights.pairs[set], sums);
      if (token % 4 == 0 || quad == token % 4) scores[set][0] = sums[0], scores[set][1] = sums[1];
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
  if (count <= 0) return;
  pipeline.ready(smem, 0);
#if GROUPS == 1
  float d[kAccumulators];
  for (int j = 0; j < count; ++j) {
    issue(d, 0);
    read_scales();
    wgmma_wait<0>();
    if (j + 1 < count) pipeline.ready(smem, j + 1);
    sum_group(d, 0);
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
      sum_group(even, 2 * pair);
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
      sum_group(odd, 2 * pair + 1);
    }
    visit_page(j);
  }
#endif
}

// What is scored: queries [batch_size][NEXT_N][NUM_HEADS][128], pages of the cache, head weights.
struct Batch {
  const uint8_t* q;
  const uint8_t* cache;
  const float* weights;
  const int* cache_seqlens;
  const int* block_table;
  int size;
  int table_stride;
};

// Divides the pages of all requests over the blocks and scores this block's share: the first even_blocks share
// evenly, seven eighths of the pages where other blocks follow, which then even out when those end. enter(request)
// comes before the first score of each request in the share, page_end(request) after each page, and
// leave(request) after the last.
template <typename Visit, typename Enter, typename PageEnd = Nothing, typename Leave = Nothing>
__device__ __forceinline__ void score_share(const TensorMap& codes, const Batch& batch, Pages pages, int even_blocks,
                                            Visit visit, Enter enter, PageEnd page_end = {}, Leave leave = {}) {
  const Smem smem = smem_layout();
  const int lane = threadIdx.x % 32;
  Pipeline pipeline(codes, batch.cache, smem);
  // A lane a request: reading one length after the other would cost a small batch its whole time.
  auto length_of = [&](int request) { return request < batch.size ? batch.cache_seqlens[request] : 0; };
  int64_t total = 0;
  for (int first = 0; first < batch.size; first += 32)
    total += __reduce_add_sync(0xFFFFFFFF, static_cast<uint32_t>(pages.of(length_of(first + lane))));
  const int later_blocks = gridDim.x - even_blocks;
  const int64_t bulk = later_blocks == 0 ? total : total * 7 / 8;
  auto boundary = [&](int block) {
    return block <= even_blocks ? bulk * block / even_blocks
                                : bulk + (total - bulk) * (block - even_blocks) / later_blocks;
  };
  const int64_t begin = boundary(blockIdx.x), end = boundary(blockIdx.x + 1);
  int64_t seen = 0;
  for (int first = 0; first < batch.size && seen < end; first += 32) {
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
    for (int i = skipped; i < 32 && first + i < batch.size && seen < end; ++i) {
      const int request = first + i, length = __shfl_sync(0xFFFFFFFF, own_length, i);
      const int count = __shfl_sync(0xFFFFFFFF, own_count, i);
      const int from = begin > seen ? static_cast<int>(begin - seen) : 0;
      const int to = static_cast<int>(end - seen < count ? end - seen : count);
      seen += count;
      if (from >= to) continue;
      __syncthreads();
      const int64_t row = static_cast<int64_t>(request) * NEXT_N * NUM_HEADS;
      pipeline.start(smem, batch.block_table + static_cast<int64_t>(request) * batch.table_stride, from, to,
                     pages.step);
      const HeadWeights head_weights = read_weights(batch.weights + row);
      load_queries(smem, batch.q + row * 128);
      enter(request);
      fence_async_proxy();
      __syncthreads();
      const Weights weights = split_weights(head_weights, smem.factors);
      score_pages(smem, pipeline, weights, length, visit, [&] { page_end(request); });
      leave(request);
    }
  }
}

// Row of token set * 4 + lane % 4 in a matrix of one row a token; of use only where there is such a token.
__device__ __forceinline__ float* token_row(float* matrix, int request, int set, int stride) {
  return matrix + static_cast<int64_t>(request * NEXT_N + set * 4 + threadIdx.x % 4) * stride;
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    paged_mqa_logits_kernel(const __grid_constant__ TensorMap codes, const uint8_t* __restrict__ q,
                            const uint8_t* __restrict__ cache, const float* __restrict__ weights,
                            const int* __restrict__ cache_seqlens, const int* __restrict__ block_table,
                            float* __restrict__ out, int batch_size, int table_stride, int table_width,
                            int even_blocks, int out_stride) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  float* rows[kSets] = {};
  score_share(
      codes, Batch{q, cache, weights, cache_seqlens, block_table, batch_size, table_stride},
      Pages{1, table_width}, even_blocks,
      [&](int set, int position, int, float score, bool valid) {
        // Predicated, not branched around: some of the lanes always stay out.
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}\n" ::"l"(
                         rows[set] + position),
                     "f"(score), "r"(static_cast<int>(valid))
                     : "memory");
      },
      [&](int request) {
#pragma unroll
        for (int set = 0; set < kSets; ++set) rows[set] = token_row(out, request, set, out_stride);
      });
}

// Scores of every step-th page, packed; positions past a row's length become -inf.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    paged_mqa_sample_kernel(const __grid_constant__ TensorMap codes, const uint8_t* __restrict__ q,
                            const uint8_t* __restrict__ cache, const float* __restrict__ weights,
                            const int* __restrict__ cache_seqlens, const int* __restrict__ block_table,
                            float* __restrict__ sample, int batch_size, int table_stride,
                            int sample_stride, int step) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  float* rows[kSets] = {};
  score_share(
      codes, Batch{q, cache, weights, cache_seqlens, block_table, batch_size, table_stride},
      Pages{step, sample_stride / 64}, gridDim.x,
      [&](int set, int, int index, float score, bool valid) {
        if (set * 4 + threadIdx.x % 4 < NEXT_N) rows[set][index] = valid ? score : -__int_as_float(0x7F800000);
      },
      [&](int request) {
#pragma unroll
        for (int set = 0; set < kSets; ++set) rows[set] = token_row(sample, request, set, sample_stride);
      });
}

// Keys of the scores at or above each row's threshold, in any order; counts may pass the capacity.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    paged_mqa_filter_kernel(const __grid_constant__ TensorMap codes, const uint8_t* __restrict__ q,
                            const uint8_t* __restrict__ cache, const float* __restrict__ weights,
                            const int* __restrict__ cache_seqlens, const int* __restrict__ block_table,
                            const float* __restrict__ thresholds, int* __restrict__ counts,
                            uint64_t* __restrict__ candidates, int batch_size, int table_stride,
                            int table_width, int num_pages, int capacity) {
  const Pages pages{1, table_width};
  let_next_kernel_start();
  // With one token the pages that come early cost more than they save.
  if (NEXT_N > 1) prefetch_share(cache, num_pages, cache_seqlens, block_table, batch_size, table_stride, pages);
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
    // Lane t stands for token t: one atomic a token serves the whole queue, then each round of the warp.
    int total = 0;
#pragma unroll 1
    for (int first = 0; first < waiting; first += 32) {
      const uint32_t token = first + lane < waiting ? queue[first + lane].y >> kTokenShift : 15;
#pragma unroll
      for (int t = 0; t < NEXT_N; ++t) {
        const uint32_t same = __ballot_sync(0xFFFFFFFF, token == t);
        if (lane == t) total += __popc(same);
      }
    }
    int place = 0;
    if (total > 0) place = atomicAdd(counts + request * NEXT_N + lane, total);
#pragma unroll 1
    for (int first = 0; first < waiting; first += 32) {
      const bool mine = first + lane < waiting;
      const uint2 entry = mine ? queue[first + lane] : uint2{0, 15u << kTokenShift};
      const uint32_t token = entry.y >> kTokenShift;
      int before = 0, taken = 0;
#pragma unroll
      for (int t = 0; t < NEXT_N; ++t) {
        const uint32_t same = __ballot_sync(0xFFFFFFFF, token == t);
        if (token == t) before = __popc(same & below);
        if (lane == t) taken = __popc(same);
      }
      const int at = __shfl_sync(0xFFFFFFFF, place, token) + before;
      place += taken;
      if (mine && at < capacity)
        candidates[static_cast<int64_t>(request * NEXT_N + token) * capacity + at] =
            selection_key(__uint_as_float(entry.x), entry.y & ((1u << kTokenShift) - 1));
    }
    waiting = 0;
    __syncwarp();
  };
  score_share(
      codes, Batch{q, cache, weights, cache_seqlens, block_table, batch_size, table_stride}, pages,
      gridDim.x,
      [&](int set, int position, int, float score, bool valid) {
        const bool passes = valid && score >= least[set];
        const uint32_t passed = __ballot_sync(0xFFFFFFFF, passes);
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.shared.v2.b32 [%0], {%1, %2};\n}\n" ::"r"(
                         smem_address(queue + waiting + __popc(passed & below))),
                     "r"(__float_as_uint(score)),
                     "r"(position | static_cast<uint32_t>(set * 4 + lane % 4) << kTokenShift),
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

// Rows whose candidates are too few or too many, which the sort leaves out: an exact radix selection by scoring
// the request once a byte of the key, then ranks by counting. A block a request; it returns at once where every
// row is sound. It runs beside the sort: that lets it start only when the counts are final, and it ends
// after the sort does, so that what follows need wait for it alone.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    paged_mqa_repair_kernel(const __grid_constant__ TensorMap codes, const uint8_t* __restrict__ q,
                            const uint8_t* __restrict__ cache, const float* __restrict__ weights,
                            const int* __restrict__ cache_seqlens, const int* __restrict__ block_table,
                            const float* __restrict__ thresholds, const int* __restrict__ counts,
                            uint64_t* __restrict__ candidates, int table_stride, int capacity,
                            int* __restrict__ out, int slots, int topk) {
  __shared__ uint32_t counters[NEXT_N][256];
  __shared__ uint64_t prefix[NEXT_N];
  __shared__ uint32_t rank[NEXT_N];
  __shared__ uint32_t digit, before, valid_total[NEXT_N], kept[NEXT_N];
  let_next_kernel_start();
  const int request = blockIdx.x, length = cache_seqlens[request];
  const int pages = length <= 0 ? 0 : (length + 63) >> 6;

  // A lane a token: one read after the other would cost every sound batch their latencies.
  const int lane = threadIdx.x % 32, seen = length - NEXT_N + lane + 1;
  bool unsound = false;
  if (lane < NEXT_N && seen > 0) {
    const int row = request * NEXT_N + lane;
    const int threshold = load_relaxed(reinterpret_cast<const int*>(thresholds) + row, true);
    unsound = !sound(__int_as_float(threshold), load_relaxed(counts + row, true), capacity, topk);
  }
  const uint32_t broken = __ballot_sync(0xFFFFFFFF, unsound);
  if (broken == 0) {
    wait_for_previous_kernel();
    return;
  }

  const Smem smem = smem_layout();
  const int64_t first = static_cast<int64_t>(request) * NEXT_N * NUM_HEADS;
  const int* table = block_table + static_cast<int64_t>(request) * table_stride;
  const HeadWeights head_weights = read_weights(weights + first);
  if (threadIdx.x < NEXT_N) prefix[threadIdx.x] = 0, kept[threadIdx.x] = 0;
  // Scores the request; counts the digits at shift of the keys that begin with the prefix, or, where shift is
  // negative, keeps the keys up to the prefix.
  Pipeline pipeline(codes, cache, smem);
  auto scan = [&](int shift) {
    __syncthreads();
    pipeline.start(smem, table, 0, pages, 1);
    load_queries(smem, q + first * 128);
    fence_async_proxy();
    __syncthreads();
    const Weights own = split_weights(head_weights, smem.factors);
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
  for (int token = 0; token < NEXT_N; ++token) {
    if (!(broken >> token & 1)) continue;
    const int64_t row = static_cast<int64_t>(request) * NEXT_N + token;
    const uint64_t* keys = candidates + row * capacity;
    for (int i = threadIdx.x; i < topk; i += kThreads) {
      int rank = i, result = -1;
      if (i < kept[token]) {
        rank = 0;
        for (int j = 0; j < kept[token]; ++j) rank += keys[j] < keys[i];
        result = static_cast<int>(keys[i] & 0xFFFFFFFF);
        if (slots) result = table[result / 64] * 64 + result % 64;
      }
      out[row * topk + rank] = result;
    }
  }
  wait_for_previous_kernel();
}
