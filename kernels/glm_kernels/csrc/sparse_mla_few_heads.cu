// Sparse MLA over packed rows for at most eight heads a token: keys are the M side of the products.
//
// Few heads leave the matrix unit idle and the gather is all the work, so each pair of warps is on its own: it
// gathers 16 rows at a time by bulk copies into its ring. A warp scores and sums its half of the columns for all
// eight heads; the two add their partial scores and are one step apart at most.
// Rows stay as they lie in the cache, 656 bytes apart, which is free of bank conflicts in both
// products. Codes become fp16 without rounding; the scale of a row's 128 columns multiplies the partial
// scores, and the probability before the values. The blocks of a cluster share a token's list and join
// their parts through distributed shared memory.
//
// Defines: CLUSTER (blocks a token, 1 to 8), STAGES (of a pair's ring).

constexpr int kRowBytes = 656;
constexpr int kRopeAt = 528, kScalesAt = 512;
constexpr int kKeys = 16;
constexpr int kStageBytes = kKeys * kRowBytes;
constexpr int kTeams = 4;  // pairs of warps
constexpr int kThreads = kTeams * 64;
constexpr int kHeads = 8;
constexpr int kQuerySteps = 18;                  // 16-byte pieces of a lane's queries
constexpr int kPartPitch = 512 + 4;              // floats between heads of a pair's part
constexpr float kShift = 14.0f;                  // probabilities reach 2^14

__device__ const uint4 kNoRow[kRowBytes / 16] = {};  // what an absent slot is gathered from

// fp16 of the two low codes of a word, and of its two high ones; exact.
__device__ __forceinline__ uint32_t low_codes(uint32_t word) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(halves) : "h"(static_cast<uint16_t>(word)));
  return halves;
}
__device__ __forceinline__ uint32_t high_codes(uint32_t word) {
  uint32_t halves;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}\n"
      : "=r"(halves)
      : "r"(word));
  return halves;
}

// D[16, 8] += A[16, 16] @ B[16, 8].
__device__ __forceinline__ void mma_half(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Transpose of an 8 x 8 matrix of 16-bit values spread over the warp.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  uint32_t turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(turned) : "r"(pair));
  return turned;
}

__device__ __forceinline__ void store_shared(uint32_t address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// Address of another block's shared memory, by its rank in the cluster.
__device__ __forceinline__ uint32_t of_block(uint32_t address, int rank) {
#if CLUSTER > 1
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
#else
  return address;
#endif
}

__device__ __forceinline__ float4 load_cluster(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ float2 load_pair(uint32_t address) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];\n" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void cluster_barrier() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#else
  __syncthreads();
#endif
}

// Barrier of a pair of warps.
__device__ __forceinline__ void team_barrier(int team) {
  asm volatile("bar.sync %0, 64;\n" ::"r"(team + 1) : "memory");
}

// Starts the copies of a stage: each warp of the pair expects and copies half of its rows.
__device__ __forceinline__ void start_rows(uint32_t stage, uint32_t barrier, const uint8_t* cache, int slot,
                                           int half) {
  const int lane = threadIdx.x % 32;
  if (lane == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "n"(kStageBytes / 2)
                 : "memory");
  __syncwarp();
  if (lane / 8 == half) {
    const uint8_t* row = slot < 0 ? reinterpret_cast<const uint8_t*>(kNoRow)
                                  : cache + static_cast<int64_t>(slot) * kRowBytes;
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
            stage + lane * kRowBytes),
        "l"(row), "n"(kRowBytes), "r"(barrier)
        : "memory");
  }
}

// grid (CLUSTER, tokens).
#if CLUSTER > 1
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, 2)
#else
extern "C" __global__ void __launch_bounds__(kThreads, 2)
#endif
    sparse_mla_few_heads_kernel(const uint8_t* __restrict__ q, const uint8_t* __restrict__ cache,
                                const int* __restrict__ slots, uint8_t* __restrict__ out,
                                float* __restrict__ lse, int num_heads, int list_length, float scale_log2) {
  extern __shared__ __align__(128) uint8_t smem[];  // [kTeams][STAGES][kStageBytes], then queries
  __shared__ __align__(8) uint64_t barriers[kTeams][STAGES];
  __shared__ __align__(16) float4 partial[kTeams][2][32];  // scores over half of the columns, a lane's
  __shared__ __align__(8) float2 sums[kTeams][kHeads];     // maximum and sum of exponentials
  __shared__ __align__(8) float2 block_sums[kHeads];
  const int lane = threadIdx.x % 32, team = threadIdx.x / 64, half = threadIdx.x / 32 % 2;
  const int group = lane / 4, quad = lane % 4;
  const int token = blockIdx.y, split = blockIdx.x;
  let_next_kernel_start();
  const uint32_t ring = smem_address(smem) + team * STAGES * kStageBytes;
  const uint32_t queries = smem_address(smem) + kTeams * STAGES * kStageBytes;
  const uint32_t barrier = smem_address(&barriers[team][0]);

  // The pairs of a token's blocks take its tiles of 16 in turn.
  const int tiles = (list_length + kKeys - 1) / kKeys;
  const int step = kTeams * CLUSTER;
  const int* list = slots + static_cast<int64_t>(token) * list_length;
  auto slot_at = [&](int tile) {
    const int at = tile * kKeys + lane;
    return lane < kKeys && at < list_length ? list[at] : -1;
  };
  const int first = split * kTeams + team;
  if (half == 0 && lane == 0) {
    for (int i = 0; i < STAGES; ++i) mbarrier_init(barrier + 8 * i, 2);
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  team_barrier(team);
  wait_for_previous_kernel();
  uint32_t present[STAGES];  // which rows of a stage are real
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    present[i] = 0;
    if (first + i * step < tiles) {
      const int slot = slot_at(first + i * step);
      present[i] = __ballot_sync(0xFFFFFFFF, slot >= 0);
      start_rows(ring + i * kStageBytes, barrier + 8 * i, cache, slot, half);
    }
  }

  // Queries in the order of the products: piece i of a lane holds eight columns of head lane / 4.
  for (int i = threadIdx.x; i < kQuerySteps * 32; i += kThreads) {
    const int piece = i / 32, head = i % 32 / 4, part = i % 4;
    const int column = piece < 16 ? piece / 4 * 128 + part * 32 + piece % 4 * 8 : 512 + part * 16 + (piece - 16) * 8;
    uint4 v = {0, 0, 0, 0};
    if (head < num_heads)
      v = *reinterpret_cast<const uint4*>(q + (static_cast<int64_t>(token) * num_heads + head) * 1152 + column * 2);
    if (piece < 16) {
      uint32_t* words = reinterpret_cast<uint32_t*>(&v);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = pack_half_clamped(__uint_as_float(words[j] << 16), __uint_as_float(words[j] & 0xFFFF0000u));
    }
    *reinterpret_cast<uint4*>(smem + kTeams * STAGES * kStageBytes + i * 16) = v;
  }
  __syncthreads();

  float o[2][8][4];  // column group of this half, pair of columns, {column, head}
#pragma unroll
  for (int i = 0; i < 64; ++i) o[i / 32][i / 4 % 8][i % 4] = 0.0f;
  // Of heads 2 * quad and 2 * quad + 1. The sums are of this lane's keys only.
  float max_even = -infinity(), max_odd = -infinity(), sum_even = 0.0f, sum_odd = 0.0f;
  int exponent = 0;  // the values are summed in units of two to this power, biased

  int stage = 0, parity = 0;
  for (int tile = first; tile < tiles; tile += step) {
    const int ahead = tile + STAGES * step;
    const int next_slot = ahead < tiles ? slot_at(ahead) : -1;
    const uint32_t base = ring + stage * kStageBytes;
    uint32_t real = present[0];
#pragma unroll
    for (int i = 1; i < STAGES; ++i) real = stage == i ? present[i] : real;
    mbarrier_wait(barrier + 8 * stage, parity);

    // Scores of keys group and group + 8, for two heads each.
    const uint32_t low_row = base + group * kRowBytes, high_row = low_row + 8 * kRowBytes;
    const uint32_t scales = kScalesAt + half * 8;
    const uint2 low_bits = load_two(low_row + scales), high_bits = load_two(high_row + scales);
    const float low_scale[2] = {__uint_as_float(low_bits.x), __uint_as_float(low_bits.y)};
    const float high_scale[2] = {__uint_as_float(high_bits.x), __uint_as_float(high_bits.y)};
    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    {
      const uint4 low = load_four(low_row + kRopeAt + quad * 32 + half * 16);
      const uint4 high = load_four(high_row + kRopeAt + quad * 32 + half * 16);
      const uint4 query = load_four(queries + ((16 + half) * 32 + lane) * 16);
      mma_bf16(s, low.x, high.x, low.y, high.y, query.x, query.y);
      mma_bf16(s, low.z, high.z, low.w, high.w, query.z, query.w);
    }
#pragma unroll
    for (int own = 0; own < 2; ++own) {
      const int columns = 2 * half + own;
      float part[2][4] = {};  // two chains of products
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint4 low = load_four(low_row + columns * 128 + quad * 32 + c * 16);
        const uint4 high = load_four(high_row + columns * 128 + quad * 32 + c * 16);
        const uint32_t low_words[4] = {low.x, low.y, low.z, low.w};
        const uint32_t high_words[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const uint4 query = load_four(queries + ((columns * 4 + c * 2 + k) * 32 + lane) * 16);
          const uint32_t low_even = low_words[2 * k], high_even = high_words[2 * k];
          const uint32_t low_odd = low_words[2 * k + 1], high_odd = high_words[2 * k + 1];
          mma_half(part[c], low_codes(low_even), low_codes(high_even), high_codes(low_even),
                   high_codes(high_even), query.x, query.y);
          mma_half(part[c], low_codes(low_odd), low_codes(high_odd), high_codes(low_odd), high_codes(high_odd),
                   query.z, query.w);
        }
      }
      s[0] = fmaf(part[0][0] + part[1][0], low_scale[own], s[0]);
      s[1] = fmaf(part[0][1] + part[1][1], low_scale[own], s[1]);
      s[2] = fmaf(part[0][2] + part[1][2], high_scale[own], s[2]);
      s[3] = fmaf(part[0][3] + part[1][3], high_scale[own], s[3]);
    }
    partial[team][half][lane] = {s[0], s[1], s[2], s[3]};
    team_barrier(team);
    const float4 other = partial[team][1 - half][lane];
    s[0] += other.x;
    s[1] += other.y;
    s[2] += other.z;
    s[3] += other.w;

    const bool low_real = real >> group & 1, high_real = real >> (group + 8) & 1;
    s[0] = low_real ? s[0] * scale_log2 : -infinity();
    s[1] = low_real ? s[1] * scale_log2 : -infinity();
    s[2] = high_real ? s[2] * scale_log2 : -infinity();
    s[3] = high_real ? s[3] * scale_log2 : -infinity();
    float even = fmaxf(s[0], s[2]), odd = fmaxf(s[1], s[3]);
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      even = fmaxf(even, __shfl_xor_sync(0xFFFFFFFF, even, distance));
      odd = fmaxf(odd, __shfl_xor_sync(0xFFFFFFFF, odd, distance));
    }
    even = fmaxf(max_even, even);
    odd = fmaxf(max_odd, odd);
    // A head without a key yet has no maximum to subtract.
    const float base_even = (even == -infinity() ? 0.0f : even) - kShift;
    const float base_odd = (odd == -infinity() ? 0.0f : odd) - kShift;
    float keep_even = exp2_fast(max_even - kShift - base_even);
    float keep_odd = exp2_fast(max_odd - kShift - base_odd);
    max_even = even;
    max_odd = odd;
    s[0] = exp2_fast(s[0] - base_even);
    s[1] = exp2_fast(s[1] - base_odd);
    s[2] = exp2_fast(s[2] - base_even);
    s[3] = exp2_fast(s[3] - base_odd);
    sum_even = fmaf(sum_even, keep_even, s[0] + s[2]);
    sum_odd = fmaf(sum_odd, keep_odd, s[1] + s[3]);

    // Scales are brought below two by a power of two that all values share, so that no product of a
    // probability and a scale leaves fp16. Rows that are not real have scale zero.
    const float largest = fmaxf(fmaxf(low_scale[0], low_scale[1]), fmaxf(high_scale[0], high_scale[1]));
    const int wanted = min(253, __reduce_max_sync(0xFFFFFFFF, __float_as_int(largest) >> 23));
    if (wanted > exponent) {
      const float unit = wanted - exponent > 126 ? 0.0f : __int_as_float((127 - (wanted - exponent)) << 23);
      keep_even *= unit;
      keep_odd *= unit;
      exponent = wanted;
    }
    const float inverse = __int_as_float((254 - exponent) << 23);
    if (__any_sync(0xFFFFFFFF, keep_even != 1.0f || keep_odd != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 64; i += 2) {
        o[i / 32][i / 4 % 8][i % 4] *= keep_even;
        o[i / 32][i / 4 % 8][i % 4 + 1] *= keep_odd;
      }
    }

    // Values: lane (group, quad) takes 16 columns of keys 2 quad, 2 quad + 1, and eight further.
    const uint32_t key = base + 2 * quad * kRowBytes + half * 256 + group * 16;
#pragma unroll
    for (int columns = 0; columns < 2; ++columns) {
      const float low_factor = low_scale[columns] * inverse, high_factor = high_scale[columns] * inverse;
      const uint32_t b0 = transpose(pack_half_clamped(s[0] * low_factor, s[1] * low_factor));
      const uint32_t b1 = transpose(pack_half_clamped(s[2] * high_factor, s[3] * high_factor));
      const uint4 v0 = load_four(key + columns * 128), v1 = load_four(key + kRowBytes + columns * 128);
      const uint4 v2 = load_four(key + 8 * kRowBytes + columns * 128);
      const uint4 v3 = load_four(key + 9 * kRowBytes + columns * 128);
      const uint32_t w0[4] = {v0.x, v0.y, v0.z, v0.w}, w1[4] = {v1.x, v1.y, v1.z, v1.w};
      const uint32_t w2[4] = {v2.x, v2.y, v2.z, v2.w}, w3[4] = {v3.x, v3.y, v3.z, v3.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t near_low = __byte_perm(w0[w], w1[w], 0x5140), near_high = __byte_perm(w0[w], w1[w], 0x7362);
        const uint32_t far_low = __byte_perm(w2[w], w3[w], 0x5140), far_high = __byte_perm(w2[w], w3[w], 0x7362);
        mma_half(o[columns][2 * w], low_codes(near_low), high_codes(near_low), low_codes(far_low),
                 high_codes(far_low), b0, b1);
        mma_half(o[columns][2 * w + 1], low_codes(near_high), high_codes(near_high), low_codes(far_high),
                 high_codes(far_high), b0, b1);
      }
    }
    // Both warps have read the stage before the copies that replace its rows.
    team_barrier(team);
    if (ahead < tiles) {
      const uint32_t found = __ballot_sync(0xFFFFFFFF, next_slot >= 0);
#pragma unroll
      for (int i = 0; i < STAGES; ++i) present[i] = stage == i ? found : present[i];
      start_rows(base, barrier + 8 * stage, cache, next_slot, half);
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }

  // The warp's half of its pair's part: eight heads of 256 columns relative to the pair's maxima.
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    sum_even += __shfl_xor_sync(0xFFFFFFFF, sum_even, distance);
    sum_odd += __shfl_xor_sync(0xFFFFFFFF, sum_odd, distance);
  }
  __syncwarp();
  const float unit = __int_as_float(exponent << 23);
#pragma unroll
  for (int columns = 0; columns < 2; ++columns) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const uint32_t target = ring + ((2 * quad + odd) * kPartPitch + half * 256 + columns * 128 + group * 16) * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store_shared(target + i * 16, o[columns][2 * i][odd] * unit, o[columns][2 * i][2 + odd] * unit,
                     o[columns][2 * i + 1][odd] * unit, o[columns][2 * i + 1][2 + odd] * unit);
    }
  }
  if (half == 0 && group == 0) {
    sums[team][2 * quad] = {max_even, sum_even};
    sums[team][2 * quad + 1] = {max_odd, sum_odd};
  }
  __syncthreads();

  // The block's part replaces that of its first pair. A thread takes four columns of every other head.
  const uint32_t parts = smem_address(smem);
  const int column = threadIdx.x % 128 * 4;
#pragma unroll
  for (int head = threadIdx.x / 128; head < kHeads; head += 2) {
    float most = -infinity(), total = 0.0f;
#pragma unroll
    for (int i = 0; i < kTeams; ++i) most = fmaxf(most, sums[i][head].x);
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kTeams; ++i) {
      const float weight = sums[i][head].x > -infinity() ? exp2_fast(sums[i][head].x - most) : 0.0f;
      total = fmaf(weight, sums[i][head].y, total);
      const uint32_t own = parts + i * STAGES * kStageBytes + (head * kPartPitch + column) * 4;
      const uint4 bits = load_four(own);
      v[0] = fmaf(weight, __uint_as_float(bits.x), v[0]);
      v[1] = fmaf(weight, __uint_as_float(bits.y), v[1]);
      v[2] = fmaf(weight, __uint_as_float(bits.z), v[2]);
      v[3] = fmaf(weight, __uint_as_float(bits.w), v[3]);
    }
    store_shared(parts + (head * kPartPitch + column) * 4, v[0], v[1], v[2], v[3]);
    if (threadIdx.x % 128 == 0) block_sums[head] = {most, total};
  }
  cluster_barrier();

  // Each block of the cluster joins its share of the columns of all heads.
  for (int i = split * kThreads + threadIdx.x; i < kHeads * 128; i += CLUSTER * kThreads) {
    const int head = i / 128;
    if (head >= num_heads) break;
    float2 stats[CLUSTER];
    float most = -infinity(), total = 0.0f;
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) {
      stats[rank] = load_pair(of_block(smem_address(&block_sums[head]), rank));
      most = fmaxf(most, stats[rank].x);
    }
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) {
      const float weight = stats[rank].x > -infinity() ? exp2_fast(stats[rank].x - most) : 0.0f;
      total = fmaf(weight, stats[rank].y, total);
      const float4 part = load_cluster(of_block(parts + (head * kPartPitch + column) * 4, rank));
      v[0] = fmaf(weight, part.x, v[0]);
      v[1] = fmaf(weight, part.y, v[1]);
      v[2] = fmaf(weight, part.z, v[2]);
      v[3] = fmaf(weight, part.w, v[3]);
    }
    const float scale = total > 0.0f ? 1.0f / total : 0.0f;
    const int64_t row = static_cast<int64_t>(token) * num_heads + head;
    *reinterpret_cast<uint2*>(out + row * 1024 + column * 2) = {pack_bf16(v[0] * scale, v[1] * scale),
                                                               pack_bf16(v[2] * scale, v[3] * scale)};
    if (i % 128 == 0) lse[row] = total > 0.0f ? (most + log2f(total) - kShift) * kLn2 : -infinity();
  }
#if CLUSTER > 1
  // No block leaves while another reads its part.
  cluster_barrier();
#endif
}
