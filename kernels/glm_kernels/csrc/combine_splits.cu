// Joins the parts of query rows whose lists were split.
//
// Defines: HALF (parts are fp16, else bf16), AT_ONCE (parts of a row in flight).

// Joins the parts of each row by their log-sum-exp. A block takes four rows, 64 threads each of eight columns; splits
// is at most 32.
extern "C" __global__ void __launch_bounds__(256)
    combine_splits_kernel(const uint8_t* __restrict__ parts, const float* __restrict__ part_lse,
                          uint8_t* __restrict__ out, float* __restrict__ lse, int total_rows, int splits) {
  const int lane = threadIdx.x % 32, at = threadIdx.x % 64 * 16;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / 64;
  let_next_kernel_start();
  if (row >= total_rows) return;
  wait_for_previous_kernel();
  uint4 v[AT_ONCE];
  auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (first + i < splits)
        v[i] = *reinterpret_cast<const uint4*>(parts + ((first + i) * static_cast<int64_t>(total_rows) + row) * 1024 + at);
  };
  // Every warp holds all the weights of its row, one a lane.
  const float own = lane < splits ? part_lse[lane * static_cast<int64_t>(total_rows) + row] : -infinity();
  load(0);
  float largest = own;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, offset));
  const float weight = own > -infinity() ? exp2_fast((own - largest) / kLn2) : 0.0f;
  float total = weight;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(0xFFFFFFFF, total, offset);
  float sum[8] = {};
  for (int first = 0; first < splits; first += AT_ONCE) {
    if (first > 0) load(first);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const float share = __shfl_sync(0xFFFFFFFF, weight, (first + i) % 32);
      if (first + i < splits) {
        const uint32_t pairs[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint16_t bits = pairs[j / 2] >> (16 * (j % 2));
          float value;
#if HALF
          asm("cvt.f32.f16 %0, %1;\n" : "=f"(value) : "h"(bits));
#else
          value = __uint_as_float(static_cast<uint32_t>(bits) << 16);
#endif
          sum[j] = fmaf(share, value, sum[j]);
        }
      }
    }
  }
  const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
  *reinterpret_cast<uint4*>(out + row * 1024 + at) = {
      pack_bf16(sum[0] * inverse, sum[1] * inverse), pack_bf16(sum[2] * inverse, sum[3] * inverse),
      pack_bf16(sum[4] * inverse, sum[5] * inverse), pack_bf16(sum[6] * inverse, sum[7] * inverse)};
  if (at == 0) lse[row] = total > 0.0f ? largest + log2f(total) * kLn2 : -infinity();
}
