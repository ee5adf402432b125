// The weighted sum over the heads as a second product. The accumulators of keys against queries lie in
// registers as m16n8k16 wants its left side, so that a pair of them, rectified and rounded to fp16, is an operand
// without an exchange: keys are rows, heads the inner dimension. The right side holds the head weights, and
// its eight columns are four tokens of two columns each: the weights in fp16, and what that rounding left.
// Only a token's own two columns are of use in its product.
//
// fp16 ends at 65,504, where |q . k| may reach 128 * 448 * 448. So each query row is divided by a power of two
// when it is loaded, small enough that no key can exceed fp16, and its weight takes the power.
//
// Error: a product is rounded to 11 bits once, about what the matrix unit itself loses on e4m3. Codes below some
// 36th of the row's mean magnitude may lose bits to the division, less than 2^-9 of that mean. Weights count to
// 22 bits. Comes after index_pages.cuh.
#pragma once

constexpr int kSteps = NUM_HEADS / 16;   // small products of a token
constexpr int kSets = (NEXT_N + 3) / 4;  // of four tokens, one for each lane of a quad

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

__device__ __forceinline__ uint32_t codes_to_halves(uint32_t codes) {
  uint32_t halves;
  asm("{\n.reg .b16 c;\ncvt.u16.u32 c, %1;\ncvt.rn.f16x2.e4m3x2 %0, c;\n}\n" : "=r"(halves) : "r"(codes));
  return halves;
}
__device__ __forceinline__ uint32_t halves_to_codes(uint32_t halves) {
  uint32_t codes;
  asm("{\n.reg .b16 c;\ncvt.rn.satfinite.e4m3x2.f16x2 c, %1;\ncvt.u32.u16 %0, c;\n}\n" : "=r"(codes) : "r"(halves));
  return codes;
}
__device__ __forceinline__ float sum_of_magnitudes(uint32_t halves) {
  float low, high;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}\n"
      : "=f"(low), "=f"(high)
      : "r"(halves & 0x7FFF7FFFu));
  return low + high;
}

// q: [NEXT_N][NUM_HEADS][128] of a request. Writes divided rows and their powers; columns past the tokens
// become zeros. Eight threads a row.
__device__ __forceinline__ void load_queries(const Smem& smem, const uint8_t* q) {
  static_assert(GROUPS * kColumns * 8 % 32 == 0, "whole warps");
  for (int i = threadIdx.x; i < GROUPS * kColumns * 8; i += kThreads) {
    const int column = i / 8, chunk = i % 8;
    uint4 value = {0, 0, 0, 0};
    if (column < NEXT_N * NUM_HEADS) value = *reinterpret_cast<const uint4*>(q + i * 16);
    uint32_t words[4] = {value.x, value.y, value.z, value.w}, halves[8];
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      halves[j] = codes_to_halves(words[j / 2] >> (j % 2 * 16) & 0xFFFF);
      sum += sum_of_magnitudes(halves[j]);
    }
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
    // 65,000 leaves room for the sums' rounding. NaN rows stay as they are.
    const float largest = sum * (448.0f / 65000.0f);
    const int exponent = largest > 1.0f ? static_cast<int>(__float_as_uint(largest) >> 23) - 126 : 0;
    const uint32_t inverse = static_cast<uint32_t>(15 - exponent) << 10;  // 2^-exponent, exact in fp16
#pragma unroll
    for (int j = 0; j < 8; ++j)
      asm("mul.rn.f16x2 %0, %0, %1;\n" : "+r"(halves[j]) : "r"(inverse << 16 | inverse));
#pragma unroll
    for (int j = 0; j < 4; ++j)
      words[j] = halves_to_codes(halves[2 * j]) | halves_to_codes(halves[2 * j + 1]) << 16;
    *reinterpret_cast<uint4*>(smem.q + column * 128 + (chunk ^ (column & 7)) * 16) = {words[0], words[1], words[2],
                                                                                     words[3]};
    if (chunk == 0) smem.factors[column] = __uint_as_float((127 + exponent) << 23);
  }
}

struct HeadWeights {
  float own[kSets][kSteps * 4];  // of token set * 4 + lane / 8: the heads of this lane's rows of the right side
};

__device__ __forceinline__ int head_of(int i) { return i / 4 * 16 + i % 4 / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// weights: [NEXT_N][NUM_HEADS] of a request.
__device__ __forceinline__ HeadWeights read_weights(const float* weights) {
  HeadWeights result;
#pragma unroll
  for (int i = 0; i < kSets * kSteps * 4; ++i) {
    const int set = i / (kSteps * 4), token = set * 4 + threadIdx.x % 32 / 8;
    result.own[set][i % (kSteps * 4)] = token < NEXT_N ? weights[token * NUM_HEADS + head_of(i % (kSteps * 4))] : 0.0f;
  }
  return result;
}

// factors: what load_queries divided by.
__device__ __forceinline__ Weights split_weights(const HeadWeights& weights, const float* factors) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  Weights result;
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    const int token = set * 4 + lane / 8;
    float own[kSteps * 4], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) {
      own[i] = token < NEXT_N ? weights.own[set][i] * factors[token * NUM_HEADS + head_of(i)] : 0.0f;
      largest = fmaxf(largest, fabsf(own[i]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
    // A power of two above the largest weight: exact to divide by and to multiply with.
    const uint32_t exponent = min((__float_as_uint(largest) >> 23) + 1, 240u);
    const float inverse = __uint_as_float((254 - exponent) << 23);
    const float factor = __uint_as_float(exponent << 23);
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
  asm volatile("cvt.rn.relu.f16x2.f32 %0, %2, %1;\n" : "=r"(pair) : "f"(low), "f"(high));
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
