// Joins the parts of query rows whose lists were split.
//
// Defines: HALF (parts are fp16, else bf16).

constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Joins the parts of each row by their log-sum-exp. A block a row, 128 threads of four columns; splits is
// at most 32.
extern "C" __global__ void __launch_bounds__(128)
    combine_splits_kernel(const uint8_t* __restrict__ parts, const float* __restrict__ part_lse,
                          uint8_t* __restrict__ out, float* __restrict__ lse, int total_rows,
                          int splits) {
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % 32;
  let_next_kernel_start();
  wait_for_previous_kernel();
  // Every warp holds all the weights, one a lane.
  const float own = lane < splits ? part_lse[lane * static_cast<int64_t>(total_rows) + row] : -infinity();
  float largest = own;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, offset));
  const float weight = own > -infinity() ? exp2_fast((own - largest) / kLn2) : 0.0f;
  float total = weight;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    total += __shfl_xor_sync(0xFFFFFFFF, total, offset);
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 16
  for (int i = 0; i < splits; ++i) {
    const float share = __shfl_sync(0xFFFFFFFF, weight, i);
    const int64_t at = i * static_cast<int64_t>(total_rows) + row;
    const uint2 v = *reinterpret_cast<const uint2*>(parts + at * 1024 + threadIdx.x * 8);
    const uint32_t pairs[2] = {v.x, v.y};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
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
  const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
  *reinterpret_cast<uint2*>(out + row * 1024 + threadIdx.x * 8) = {
      pack_bf16(sum[0] * inverse, sum[1] * inverse), pack_bf16(sum[2] * inverse, sum[3] * inverse)};
  if (threadIdx.x == 0) lse[row] = total > 0.0f ? largest + log2f(total) * kLn2 : -infinity();
}
