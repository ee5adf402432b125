// The one order of selection as unsigned integers: score descending, then position ascending, is
// ascending order of a 64-bit key. NaN and -inf have no key.
#pragma once

__device__ __forceinline__ bool selectable(float score) { return score > -__int_as_float(0x7F800000); }

__device__ __forceinline__ uint64_t selection_key(float score, uint32_t position) {
  // Adding zero makes -0 the +0 that it equals.
  uint32_t bits = __float_as_uint(score + 0.0f);
  bits ^= bits >> 31 ? 0u : 0x7FFFFFFFu;
  return static_cast<uint64_t>(bits) << 32 | position;
}

// The score of a key's high word.
__device__ __forceinline__ float score_of(uint32_t bits) {
  return __uint_as_float(bits >> 31 ? bits : bits ^ 0x7FFFFFFFu);
}

// Whether a row's candidates hold its best topk: as many as that passed the threshold, or there was none, and
// all of them found room.
__device__ __forceinline__ bool sound(float threshold, int count, int capacity, int topk) {
  return count <= capacity && (count >= topk || !selectable(threshold));
}

// Adds one to counters[digit] for each active lane; lanes with the same digit share one atomic.
__device__ __forceinline__ void count_digit(uint32_t* counters, uint32_t digit, bool active) {
  const uint32_t lanes = __ballot_sync(0xFFFFFFFF, active);
  if (!active) return;
  const uint32_t same = __match_any_sync(lanes, digit);
  if ((threadIdx.x & 31) == __ffs(same) - 1) atomicAdd(counters + digit, __popc(same));
}

// Given counts of 256 digits, the digit that holds the rank-th element (rank from 1) and the number of
// elements before it. One warp.
__device__ __forceinline__ void find_digit(const uint32_t* counters, uint32_t rank, uint32_t* digit,
                                           uint32_t* before) {
  const int lane = threadIdx.x & 31;
  uint32_t own = 0;
  for (int i = 0; i < 8; ++i) own += counters[lane * 8 + i];
  uint32_t sum = own;
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(0xFFFFFFFF, sum, offset);
    if (lane >= offset) sum += other;
  }
  uint32_t seen = sum - own;
  if (seen < rank && rank <= sum) {
    int i = 0;
    while (seen + counters[lane * 8 + i] < rank) seen += counters[lane * 8 + i++];
    *digit = lane * 8 + i;
    *before = seen;
  }
  __syncwarp();
}
