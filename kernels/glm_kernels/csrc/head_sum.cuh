// The weighted sum over the heads as a second product. The accumulators of keys against queries lie in
// registers as m16n8k16 wants its left side, so that a pair of them, rectified and rounded to fp16, is an operand
// without an exchange: keys are rows, heads the inner dimension. The right side holds the head weights, and
// its eight columns are four tokens of two columns each: the weights in fp16, and what that rounding left.
// Only a token's own two columns are of use in its product.
//
// Error: a product is rounded to 11 bits once, about what the matrix unit itself loses on e4m3. Weights count
// to 22 bits. Needs NUM_HEADS and NEXT_N.
#pragma once

constexpr int kSteps = NUM_HEADS / 16;   // small products of a token
constexpr int kSets = (NEXT_N + 3) / 4;  // of four tokens, one for each lane of a quad
// |q . k| is at most 128 * 448 * 448, or 49 * 2^19; a 512th of it is below the largest fp16.
constexpr float kProductScale = 1.0f / 512;

struct Weights {
  uint32_t pairs[kSets][kSteps][2];  // of token set * 4 + lane / 8; the rest where lane / 4 is odd
  float factor[kSets];               // undoes the scaling of token set * 4 + lane % 4
};

__device__ __forceinline__ uint32_t pack_half(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;\n" : "=r"(pair) : "f"(low), "f"(high));
  return pair;
}
__device__ __forceinline__ float through_half(float value) {
  float rounded;
  asm("{\n.reg .b16 h;\ncvt.rn.f16.f32 h, %1;\ncvt.f32.f16 %0, h;\n}\n" : "=f"(rounded) : "f"(value));
  return rounded;
}

// weights: [NEXT_N][NUM_HEADS] of a request.
__device__ __forceinline__ Weights load_weights(const float* weights) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  Weights result;
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    const int token = set * 4 + lane / 8;
    float own[kSteps * 4], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) {
      const int head = i / 4 * 16 + i % 4 / 2 * 8 + quad * 2 + i % 2;
      own[i] = token < NEXT_N ? weights[token * NUM_HEADS + head] : 0.0f;
      largest = fmaxf(largest, fabsf(own[i]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
    // A power of two above the largest weight: exact to divide by and to multiply with.
    const uint32_t exponent = min((__float_as_uint(largest) >> 23) + 1, 240u);
    const float inverse = __uint_as_float((254 - exponent) << 23);
    const float factor = __uint_as_float(exponent << 23) / kProductScale;
    result.factor[set] = __shfl_sync(0xFFFFFFFF, factor, quad * 8);
#pragma unroll
    for (int i = 0; i < kSteps * 2; ++i) {
      float pair[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float scaled = own[i * 2 + j] * inverse, rounded = through_half(scaled);
        const float rest = scaled - rounded;  // NaN for infinite weights
        pair[j] = lane & 4 ? (rest == rest ? rest : 0.0f) : rounded;
      }
      result.pairs[set][i / 2][i % 2] = pack_half(pair[0], pair[1]);
    }
  }
  return result;
}

// NaN stays NaN. Volatile, like the product, to stay behind the wait for the accumulators.
__device__ __forceinline__ uint32_t rectified_pair(float low, float high) {
  uint32_t pair;
  asm volatile("cvt.rn.relu.f16x2.f32 %0, %2, %1;\n"
               : "=r"(pair)
               : "f"(low * kProductScale), "f"(high * kProductScale));
  return pair;
}

// One token's sum from its accumulators c; sums[0] is that of key lane / 4 of the warp's sixteen and sums[1] of
// the key eight below it, in the lane of the quad that holds the token's columns.
__device__ __forceinline__ void sum_heads(const float* c, const uint32_t (&weights)[kSteps][2], float (&sums)[2]) {
  float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int step = 0; step < kSteps; ++step, c += 8) {
    const uint32_t a[4] = {rectified_pair(c[0], c[1]), rectified_pair(c[2], c[3]), rectified_pair(c[4], c[5]),
                           rectified_pair(c[6], c[7])};
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(weights[step][0]), "r"(weights[step][1]));
  }
  sums[0] = d[0] + d[1];
  sums[1] = d[2] + d[3];
}
