// Union of the selections of a request's tokens: sort (slot, token) pairs, keep each slot once with one
// bit a token. A block a request.
//
// Defines: SIZE (power of two, at least tokens * k).

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    union_slots_kernel(const int* __restrict__ slots, uint32_t* scratch,
                       int* __restrict__ lists, uint8_t* __restrict__ members,
                       int* __restrict__ counts, int next_n, int k) {
  extern __shared__ __align__(16) uint32_t pairs[];
  __shared__ uint32_t scan[32];
  const int request = blockIdx.x, entries = next_n * k;
  const int64_t base = static_cast<int64_t>(request) * entries;
  for (int i = threadIdx.x; i < entries; i += kThreads) {
    const int slot = slots[base + i];
    scratch[base + i] = slot < 0 ? 0xFFFFFFFFu : static_cast<uint32_t>(slot) << 3 | i / k;
  }
  __syncthreads();
  uint32_t* unsorted = pairs + SIZE;
  const int count = bucket_sort<SIZE / kThreads>(scratch + base, entries, unsorted, unsorted + SIZE, entries,
                                [&](int rank, uint32_t pair) { pairs[rank] = pair; });
  __syncthreads();
  // Each thread numbers the first pairs of its own stretch.
  constexpr int kStretch = SIZE / kThreads;
  const int first = threadIdx.x * kStretch;
  auto is_head = [&](int i) { return i < count && (i == 0 || pairs[i] >> 3 != pairs[i - 1] >> 3); };
  uint32_t heads = 0, total;
  for (int i = 0; i < kStretch; ++i) heads += is_head(first + i);
  uint32_t at = block_scan(heads, scan, &total) - heads;
  for (int i = first; i < first + kStretch; ++i) {
    if (!is_head(i)) continue;
    uint8_t member = 0;
    for (int j = i; j < count && pairs[j] >> 3 == pairs[i] >> 3; ++j) member |= 1u << (pairs[j] & 7);
    lists[base + at] = pairs[i] >> 3;
    members[base + at] = member;
    ++at;
  }
  if (threadIdx.x == 0) counts[request] = total;
}
