// Exact top-k in three steps: a threshold from a sample that lets a little more than k scores pass, the
// keys at or above it, and one sort of them. A row whose candidates turn out too few or too many is
// selected by radix over its scores instead, so the result never depends on the sample.
//
// Defines: CAPACITY (candidates a row, a power of two).

constexpr int kMaxSamples = 16384;  // of a row

// Window of a row: columns [start, end) of the logits, or the visible length of a paged row.
struct Rows {
  const int* ks;
  const int* ke;
  const int* cache_seqlens;
  int width;
  int next_n;
  __device__ __forceinline__ int start(int row) const { return ks ? ks[row] : 0; }
  __device__ __forceinline__ int length(int row) const {
    if (cache_seqlens) return cache_seqlens[row / next_n] - next_n + row % next_n + 1;
    const int end = ke && ke[row] < width ? ke[row] : width;
    return end - start(row);
  }
};

// At least the rank-th smallest (from 1) of the sampled high keys, rounded up in its low 16 bits. Each thread
// keeps the best of its samples and the threads' keys are searched: where a thread holds two of the best, the
// next best counts in its place, which lets some 6 % more pass with 65 of 512 and costs no pass over all samples.
__device__ __forceinline__ uint32_t sample_threshold(const float* base, int64_t step, int samples, uint32_t rank) {
  constexpr int kBatch = 16;
  float best = -__int_as_float(0x7F800000);
  for (int first = threadIdx.x; first < samples; first += kBatch * kThreads) {
    float scores[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = first + i * kThreads;
      scores[i] = at < samples ? __ldg(base + at * step) : -__int_as_float(0x7F800000);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) best = fmaxf(best, scores[i]);  // which passes NaN over
  }
  const uint32_t held = selectable(best) ? static_cast<uint32_t>(selection_key(best, 0) >> 32) : 0xFFFFFFFF;
  uint32_t low = 0;  // the largest prefix with fewer than rank keys below it
  for (int bit = 31; bit >= 16; --bit) {
    const uint32_t candidate = low | 1u << bit;
    if (__syncthreads_count(held < candidate) < rank) low = candidate;
  }
  return low | 0xFFFF;
}

// Threshold of each row, and its candidate count set to zero. Samples are either every step-th score of
// the row, or already packed (packed != 0) with one page in step.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    topk_threshold_kernel(const float* __restrict__ values, float* __restrict__ thresholds,
                          int* __restrict__ counts, const int* ks, const int* ke,
                          const int* cache_seqlens, int width, int next_n, int stride, int step,
                          int packed, int topk) {
  const Rows rows{ks, ke, cache_seqlens, width, next_n};
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = blockIdx.x, length = rows.length(row);
  if (threadIdx.x == 0) counts[row] = 0;
  const float everything = -__int_as_float(0x7F800000);
  if (length <= CAPACITY) {
    if (threadIdx.x == 0) thresholds[row] = everything;
    return;
  }
  int samples = length / step;
  if (packed) {
    const int pages = (cache_seqlens[row / next_n] + 63) >> 6;
    samples = (pages + step - 1) / step * 64;
  }
  const float* base = values + static_cast<int64_t>(row) * stride + (packed ? 0 : rows.start(row));
  const int64_t stride_in_row = packed ? 1 : step;
  // Rank in the sample at which, but for one time in millions, at least topk scores of the row pass.
  const float mean = static_cast<float>(topk) * samples / length;
  const uint32_t rank = static_cast<uint32_t>(mean + 4.5f * sqrtf(mean) + 8.0f);
  const uint32_t bits = sample_threshold(base, stride_in_row, min(samples, kMaxSamples), rank);
  if (threadIdx.x == 0) {
    // 0xFF800000 and beyond are -inf and NaN patterns: so few scores need no filter.
    thresholds[row] = bits >= 0xFF800000u ? everything
                                          : __uint_as_float(bits >> 31 ? bits : bits ^ 0x7FFFFFFFu);
  }
}

// Keys at or above the threshold; grid (pieces, rows). A block gathers its keys in shared memory and takes
// one global atomic for all of them; keys beyond that room, rare at any sensible threshold, take their own.
extern "C" __global__ void __launch_bounds__(256)
    topk_filter_kernel(const float* __restrict__ values, const float* __restrict__ thresholds,
                       int* __restrict__ counts, uint64_t* __restrict__ candidates, const int* ks,
                       const int* ke, const int* cache_seqlens, int width, int next_n, int stride) {
  constexpr int kRoom = 1024, kBatch = 8;
  __shared__ uint64_t gathered[kRoom];
  __shared__ int found, target;
  const Rows rows{ks, ke, cache_seqlens, width, next_n};
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = blockIdx.y, length = rows.length(row);
  if (length <= 0) return;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  const float* base = values + static_cast<int64_t>(row) * stride + rows.start(row);
  const float threshold = thresholds[row];
  uint64_t* own = candidates + static_cast<int64_t>(row) * CAPACITY;
  const int piece = (length + gridDim.x - 1) / gridDim.x;
  const int from = blockIdx.x * piece, to = min(from + piece, length);
  for (int first = from; first < to; first += 256 * kBatch) {
    float held[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = first + i * 256 + threadIdx.x;
      held[i] = at < to ? __ldg(base + at) : -__int_as_float(0x7F800000);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (!(held[i] >= threshold) || !selectable(held[i])) continue;
      const uint64_t key = selection_key(held[i], first + i * 256 + threadIdx.x);
      const int at = atomicAdd(&found, 1);
      if (at < kRoom) {
        gathered[at] = key;
      } else {
        const int beyond = atomicAdd(counts + row, 1);
        if (beyond < CAPACITY) own[beyond] = key;
      }
    }
  }
  __syncthreads();
  const int kept = min(found, kRoom);
  if (threadIdx.x == 0 && kept > 0) target = atomicAdd(counts + row, kept);
  __syncthreads();
  for (int i = threadIdx.x; i < kept; i += 256)
    if (target + i < CAPACITY) own[target + i] = gathered[i];
}

// Exactly the min(topk, selectable) best keys of a row of scores, unordered, into keys. Returns how many.
__device__ uint32_t radix_select(const float* base, int length, uint32_t topk, uint64_t* keys,
                                 uint32_t* counters) {
  __shared__ uint32_t digit, before, total, kept;
  uint64_t prefix = 0;
  uint32_t rank = 0;
  const int padded = (length + kThreads - 1) / kThreads * kThreads;
  for (int shift = 56; shift >= 0; shift -= 8) {
    if (threadIdx.x < 256) counters[threadIdx.x] = 0;
    __syncthreads();
    for (int at = threadIdx.x; at < padded; at += kThreads) {
      const float score = at < length ? base[at] : -__int_as_float(0x7F800000);
      const uint64_t key = selection_key(score, at);
      const bool same = shift == 56 || key >> (shift + 8) == prefix;
      count_digit(counters, key >> shift & 255, selectable(score) && same);
    }
    __syncthreads();
    if (shift == 56) {
      if (threadIdx.x < 32) {
        uint32_t sum = 0;
        for (int i = threadIdx.x; i < 256; i += 32) sum += counters[i];
        sum = __reduce_add_sync(0xFFFFFFFF, sum);
        if (threadIdx.x == 0) total = sum, kept = 0;
      }
      __syncthreads();
      if (total == 0) return 0;
      rank = min(total, topk);
    }
    if (threadIdx.x < 32) find_digit(counters, rank, &digit, &before);
    __syncthreads();
    prefix = prefix << 8 | digit;
    rank -= before;
    __syncthreads();
  }
  for (int at = threadIdx.x; at < length; at += kThreads) {
    if (!selectable(base[at])) continue;
    const uint64_t key = selection_key(base[at], at);
    if (key <= prefix) keys[atomicAdd(&kept, 1u)] = key;
  }
  __syncthreads();
  return kept;
}

// Sorts a row's candidates and writes the best topk as positions, or as slots through block_table.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    topk_sort_kernel(const float* __restrict__ values, const float* __restrict__ thresholds,
                     const int* __restrict__ counts, const uint64_t* __restrict__ candidates,
                     const int* ks, const int* ke, const int* cache_seqlens, int width, int next_n,
                     int stride, const int* __restrict__ block_table,
                     const int* __restrict__ row_to_batch, int rows_per_request, int max_num_blocks,
                     int page_size, int* __restrict__ out, int topk) {
  extern __shared__ __align__(16) uint64_t keys[];
  uint32_t* counters = reinterpret_cast<uint32_t*>(keys + CAPACITY);
  const Rows rows{ks, ke, cache_seqlens, width, next_n};
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int row = blockIdx.x, length = rows.length(row);
  int count = length <= 0 ? 0 : counts[row];
  const bool whole = length <= 0 || sound(thresholds[row], count, CAPACITY, topk);
  if (!whole && values == nullptr) return;  // left to the repair of scores that were not kept
  const int request = row_to_batch ? row_to_batch[row] : row / rows_per_request;
  auto emit = [&](int rank, uint64_t key) {
    if (rank >= topk) return;
    int result = static_cast<int>(key & 0xFFFFFFFF);
    if (block_table != nullptr) {
      const int page = block_table[static_cast<int64_t>(request) * max_num_blocks + result / page_size];
      result = page * page_size + result % page_size;
    }
    out[static_cast<int64_t>(row) * topk + rank] = result;
  };
  if (!whole) {
    const float* base = values + static_cast<int64_t>(row) * stride + rows.start(row);
    count = radix_select(base, length, topk, keys, counters);
    pad_and_sort(keys, count);
    for (int i = threadIdx.x; i < count; i += kThreads) emit(i, keys[i]);
  } else {
    count = bucket_sort<CAPACITY / kThreads>(candidates + static_cast<int64_t>(row) * CAPACITY, count, keys, counters, topk, emit);
  }
  for (int i = count + threadIdx.x; i < topk; i += kThreads)
    out[static_cast<int64_t>(row) * topk + i] = -1;
}
