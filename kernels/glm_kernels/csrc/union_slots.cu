// Union of the selections of a request's tokens: sort (slot, token) pairs, keep each slot once with one
// bit a token. A block a request.
//
// Defines: SIZE (power of two, at least tokens * k).

constexpr int kThreads = 1024;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    union_slots_kernel(const int* __restrict__ slots, int* __restrict__ lists,
                       uint8_t* __restrict__ members, int* __restrict__ counts, int next_n, int k) {
  extern __shared__ __align__(16) uint32_t pairs[];
  __shared__ uint32_t warp_totals[32];
  const int request = blockIdx.x, entries = next_n * k;
  const int* own = slots + static_cast<int64_t>(request) * entries;
  for (int i = threadIdx.x; i < SIZE; i += kThreads) {
    const int slot = i < entries ? own[i] : -1;
    pairs[i] = slot < 0 ? 0xFFFFFFFFu : static_cast<uint32_t>(slot) << 3 | i / k;
  }
  __syncthreads();
  for (int block = 2; block <= SIZE; block *= 2) {
    for (int distance = block / 2; distance > 0; distance /= 2) {
      for (int i = threadIdx.x; i < SIZE / 2; i += kThreads) {
        const int low = 2 * i - (i & (distance - 1)), high = low + distance;
        const uint32_t a = pairs[low], b = pairs[high];
        if ((a > b) == ((low & block) == 0)) pairs[low] = b, pairs[high] = a;
      }
      if (distance > 32) __syncthreads();
      else __syncwarp();
    }
    __syncthreads();
  }
  // Each thread numbers the first pairs of its own stretch.
  constexpr int kStretch = SIZE / kThreads;
  const int first = threadIdx.x * kStretch;
  auto is_head = [&](int i) {
    return pairs[i] != 0xFFFFFFFFu && (i == 0 || pairs[i] >> 3 != pairs[i - 1] >> 3);
  };
  uint32_t heads = 0;
  for (int i = 0; i < kStretch; ++i) heads += is_head(first + i);
  uint32_t sum = heads;
  const int lane = threadIdx.x % 32;
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(0xFFFFFFFF, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) warp_totals[threadIdx.x / 32] = sum;
  __syncthreads();
  uint32_t at = sum - heads;
  for (int warp = 0; warp < threadIdx.x / 32; ++warp) at += warp_totals[warp];
  const int64_t base = static_cast<int64_t>(request) * entries;
  for (int i = first; i < first + kStretch; ++i) {
    if (!is_head(i)) continue;
    uint8_t member = 0;
    for (int j = i; j < SIZE && pairs[j] >> 3 == pairs[i] >> 3; ++j) member |= 1u << (pairs[j] & 7);
    lists[base + at] = pairs[i] >> 3;
    members[base + at] = member;
    ++at;
  }
  if (threadIdx.x == kThreads - 1) counts[request] = at;
}
