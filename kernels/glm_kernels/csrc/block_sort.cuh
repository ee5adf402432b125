// Sort of a few thousand unsigned keys by a block of 512 threads: into buckets by their high bits, then by
// rank within a bucket. Keys that crowd into one bucket are sorted bitonically instead, which is
// slower and has no bad case. Either way the result is the sorted sequence.
#pragma once

constexpr int kThreads = 512;
constexpr int kBuckets = 8192;
constexpr uint32_t kBucketLimit = 64;
constexpr int kBucketsOfThread = kBuckets / kThreads;
constexpr int kBucketWords = kBuckets + kThreads;  // of shared memory

// Where a bucket's counter lies: a thread's stretch of them starts in a bank of its own.
__device__ __forceinline__ uint32_t bucket_at(uint32_t bucket) { return bucket + bucket / kBucketsOfThread; }

// Where a key falls between the smallest and the largest: evenly by score for 64-bit selection keys (a range
// around zero would spend most buckets on tiny scores if divided by bits), by value for 32-bit keys.
template <typename Key>
struct Buckets {
  uint32_t low;
  int shift;
  float top, scale;  // scale 0: divide by bits

  __device__ __forceinline__ Buckets(uint32_t smallest, uint32_t largest) : low(smallest), scale(0.0f) {
    const uint32_t span = largest >= smallest ? largest - smallest : 0;
    shift = max(0, 32 - __clz(span) - 13);
    if constexpr (sizeof(Key) == 8) {
      top = score_of(smallest);
      const float even = (kBuckets - 1) / (top - score_of(largest));
      if (even > 0.0f && even < 3e38f && top < 3e38f) scale = even;
    }
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t bits) const {
    if constexpr (sizeof(Key) == 8) {
      // Subtraction, product and truncation all keep the order.
      if (scale > 0.0f) return min(static_cast<uint32_t>((top - score_of(bits)) * scale), kBuckets - 1u);
    }
    return (bits - low) >> shift;
  }
};

__device__ __forceinline__ uint32_t high_bits(uint64_t key) { return key >> 32; }
__device__ __forceinline__ uint32_t high_bits(uint32_t key) { return key; }

// size is a power of two, at least 64; keys past the real ones hold the largest key.
template <typename Key>
__device__ __forceinline__ void bitonic_sort(Key* keys, int size) {
  for (int block = 2; block <= size; block *= 2) {
    for (int distance = block / 2; distance > 0; distance /= 2) {
      for (int i = threadIdx.x; i < size / 2; i += kThreads) {
        const int low = 2 * i - (i & (distance - 1)), high = low + distance;
        const Key a = keys[low], b = keys[high];
        if ((a > b) == ((low & block) == 0)) keys[low] = b, keys[high] = a;
      }
      // Up to a distance of 32 a warp's pairs stay within its own 64 keys.
      if (distance > 32) __syncthreads();
      else __syncwarp();
    }
    __syncthreads();
  }
}

template <typename Key>
__device__ __forceinline__ void pad_and_sort(Key* keys, int count) {
  int size = 64;
  while (size < count) size *= 2;
  for (int i = count + threadIdx.x; i < size; i += kThreads) keys[i] = ~static_cast<Key>(0);
  __syncthreads();
  bitonic_sort(keys, size);
}

// Inclusive prefix sum over the block, and the block's total.
__device__ __forceinline__ uint32_t block_scan(uint32_t value, uint32_t* scratch, uint32_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(0xFFFFFFFF, value, offset);
    if (lane >= offset) value += other;
  }
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  const uint32_t sum = lane < kThreads / 32 ? scratch[lane] : 0u;
  const uint32_t below = __reduce_add_sync(0xFFFFFFFF, lane < warp ? sum : 0u);
  *total = __reduce_add_sync(0xFFFFFFFF, sum);
  __syncthreads();
  return value + below;
}

// Sorts count keys of source, at most kHeld a thread, and calls emit(rank, key) for the first limit of them at
// least; keys is scratch for as many, buckets for kBucketWords counters. The all-ones key is dropped; returns how
// many remain.
template <int kHeld, typename Key, typename Emit>
__device__ __forceinline__ int bucket_sort(const Key* source, int count, Key* keys, uint32_t* buckets,
                                           uint32_t limit, Emit emit) {
  __shared__ uint32_t scratch[32], smallest, largest, stop;
  constexpr Key kNone = ~static_cast<Key>(0);
  if (threadIdx.x == 0) smallest = 0xFFFFFFFF, largest = 0;
  // The keys stay in registers for three passes.
  Key held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = threadIdx.x + i * kThreads;
    held[i] = at < count ? source[at] : kNone;
  }
  for (int i = threadIdx.x; i < kBucketWords; i += kThreads) buckets[i] = 0;
  __syncthreads();
  uint32_t low = 0xFFFFFFFF, high = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (held[i] == kNone) continue;
    low = min(low, high_bits(held[i]));
    high = max(high, high_bits(held[i]));
  }
  low = __reduce_min_sync(0xFFFFFFFF, low);
  high = __reduce_max_sync(0xFFFFFFFF, high);
  if (threadIdx.x % 32 == 0) atomicMin(&smallest, low), atomicMax(&largest, high);
  __syncthreads();
  const Buckets<Key> bucket_of(smallest, largest);
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (held[i] != kNone) atomicAdd(buckets + bucket_at(bucket_of(high_bits(held[i]))), 1u);
  __syncthreads();
  uint32_t* stretch = buckets + bucket_at(threadIdx.x * kBucketsOfThread);
  uint32_t own = 0;
  bool crowded = false;
#pragma unroll
  for (int i = 0; i < kBucketsOfThread; ++i) {
    own += stretch[i];
    crowded |= stretch[i] > kBucketLimit;
  }
  uint32_t total;
  uint32_t start = block_scan(own, scratch, &total) - own;
#pragma unroll
  for (int i = 0; i < kBucketsOfThread; ++i) {
    const uint32_t size = stretch[i];
    stretch[i] = start;
    // Where the bucket of the last key that is asked for ends.
    if (start < limit && start + size >= limit) stop = start + size;
    start += size;
  }
  if (threadIdx.x == 0 && total < limit) stop = total;
  crowded = __syncthreads_or(crowded);
  const uint32_t wanted = crowded ? total : stop;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (held[i] == kNone) continue;
    // A bucket's counter goes from its start to its end, and starts past the wanted keys stay there.
    uint32_t* const place = buckets + bucket_at(bucket_of(high_bits(held[i])));
    if (*static_cast<volatile uint32_t*>(place) < wanted) keys[atomicAdd(place, 1u)] = held[i];
  }
  __syncthreads();
  if (crowded) {
    pad_and_sort(keys, total);
    for (int i = threadIdx.x; i < total; i += kThreads) emit(i, keys[i]);
    return total;
  }
  for (int i = threadIdx.x; i < wanted; i += kThreads) {
    const Key key = keys[i];
    const uint32_t bucket = bucket_of(high_bits(key));
    // The scatter left each bucket's end in its counter.
    const uint32_t begin = bucket == 0 ? 0 : buckets[bucket_at(bucket - 1)], end = buckets[bucket_at(bucket)];
    uint32_t rank = begin;
    for (uint32_t j = begin; j < end; ++j) rank += keys[j] < key;
    emit(rank, key);
  }
  __syncthreads();
  return total;
}
