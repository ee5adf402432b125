// Sparse MLA: up to 64 query rows against a gathered list of cache rows, in tiles of 64.
//
// The 64 rows of a block are the heads of one token, or of several tokens of a request that share one
// list (the union of their selections), each list entry saying which of them selected it. One warpgroup
// gathers: packed rows become fp16 codes times scale on the way into shared memory, bf16 rows are copied.
// Two warpgroups compute, on two tiles at a time: each scores one of the tiles, they exchange row maxima and
// probabilities through shared memory, and each accumulates half of the 512 latent columns of both tiles.
// A tile has a fixed place, so every descriptor is a constant; its probabilities overwrite its rotary
// columns, which nothing reads after the scores.
//
// Defines: PACKED (656-byte rows, else bf16).

constexpr int kBlockBytes = 64 * 128;       // 64 rows of 64 16-bit values, 128-byte swizzle
constexpr int kTileBytes = 9 * kBlockBytes;  // 576 columns
constexpr int kStages = 2;  // one a computing warpgroup
constexpr int kRowBytes = PACKED ? 656 : 1152;
constexpr float kShift = 8.0f;  // probabilities reach 2^8, which keeps small ones out of fp16 subnormals
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack_half(float low, float high) {
  uint32_t packed;
#if PACKED
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
#endif
  return packed;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Two bf16 values as the operand type.
__device__ __forceinline__ uint32_t to_operand(uint32_t bf16x2) {
#if PACKED
  return pack_half(__uint_as_float(bf16x2 << 16), __uint_as_float(bf16x2 & 0xFFFF0000u));
#else
  return bf16x2;
#endif
}

__device__ __forceinline__ uint4 to_operand(uint4 v) {
  return {to_operand(v.x), to_operand(v.y), to_operand(v.z), to_operand(v.w)};
}

// Barrier of the two computing warpgroups.
__device__ __forceinline__ void math_barrier() { asm volatile("bar.sync 1, 256;\n" ::: "memory"); }

// Address of a 16-byte chunk (of 8 values) in a swizzled tile.
__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
  return (chunk / 8) * kBlockBytes + row * 128 + (((chunk % 8) ^ (row & 7)) * 16);
}

#if PACKED
// fp16 of two codes times the scale, which comes twice.
__device__ __forceinline__ uint32_t scaled_codes(uint32_t two_codes, uint32_t scale) {
  uint32_t codes, product;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(codes) : "h"(static_cast<uint16_t>(two_codes)));
  asm("mul.rn.f16x2 %0, %1, %2;\n" : "=r"(product) : "r"(codes), "r"(scale));
  return product;
}

__device__ __forceinline__ uint4 scaled_codes(uint32_t first, uint32_t second, uint32_t scale) {
  return {scaled_codes(first, scale), scaled_codes(first >> 16, scale), scaled_codes(second, scale),
          scaled_codes(second >> 16, scale)};
}

__device__ __forceinline__ void store_shared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Sixteen packed rows on their way through a warp's registers. Codes go by pairs of rows: lanes 4..7 of eight
// hold the odd row, whose swizzle puts it into the banks that the even row leaves free.
struct Rows {
  uint4 codes[8][2];  // pieces lane_piece() and 16 more, of 16 codes
  uint4 rope[4];      // row 4 i + lane / 8, chunk lane % 8
  float scale[2];     // row 8 i + lane / 4, group lane % 4
};

__device__ __forceinline__ int lane_odd() { return threadIdx.x >> 2 & 1; }
__device__ __forceinline__ int lane_piece() { return (threadIdx.x & 3) | (threadIdx.x % 32 >> 3) << 2; }

// slot is the lane's row of the warp's 16 (lanes 0..15), -1 for none.
__device__ __forceinline__ void load_pair(Rows& rows, int pair, const uint8_t* cache, int slot) {
  const int s = __shfl_sync(0xFFFFFFFF, slot, 2 * pair + lane_odd());
  const uint8_t* row = cache + static_cast<int64_t>(s) * kRowBytes + lane_piece() * 16;
  rows.codes[pair][0] = load_streaming(row, s >= 0);
  rows.codes[pair][1] = load_streaming(row + 256, s >= 0);
}

__device__ __forceinline__ void load_rest(Rows& rows, const uint8_t* cache, int slot) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int s = __shfl_sync(0xFFFFFFFF, slot, 8 * i + lane / 4);
    rows.scale[i] = 0.0f;
    if (s >= 0)
      rows.scale[i] =
          __ldg(reinterpret_cast<const float*>(cache + static_cast<int64_t>(s) * kRowBytes + 512) + lane % 4);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int s = __shfl_sync(0xFFFFFFFF, slot, 4 * i + lane / 8);
    rows.rope[i] =
        load_streaming(cache + static_cast<int64_t>(s) * kRowBytes + 528 + lane % 8 * 16, s >= 0);
  }
}

// target: the lane's place in the tile for the warp's first pair; chunk: its swizzled 16 bytes there.
__device__ __forceinline__ void store_pair(const Rows& rows, int pair, const float (&scales)[2], uint32_t target,
                                           uint32_t chunk) {
  const int from = (2 * pair % 8 + lane_odd()) * 4 + lane_piece() / 8;
  const uint32_t at = target + pair * 256 + (chunk ^ (2 * pair % 8 * 16));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float scale = __shfl_sync(0xFFFFFFFF, scales[pair / 4], from + 2 * i);
    const uint32_t twice = pack_half(scale, scale);
    const uint4 codes = rows.codes[pair][i];
    store_shared(at + i * 4 * kBlockBytes, scaled_codes(codes.x, codes.y, twice));
    store_shared((at ^ 16) + i * 4 * kBlockBytes, scaled_codes(codes.z, codes.w, twice));
  }
}

// Stores a tile's rows and loads the next tile's into the registers that become free.
__device__ __forceinline__ void exchange_rows(Rows& rows, uint32_t tile, int first, const uint8_t* cache,
                                              int next_slot) {
  const int lane = threadIdx.x % 32, odd = lane_odd(), piece = lane_piece();
  const uint32_t target = tile + piece / 4 * kBlockBytes + (first + odd) * 128;
  uint32_t chunk = (2 * piece % 8 ^ odd) * 16;
  // Opaque, or the compiler keeps an address for every store in registers and spills the rows instead.
  asm volatile("" : "+r"(chunk));
  const float scales[2] = {rows.scale[0], rows.scale[1]};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    store_shared(tile + tile_offset(first + 4 * i + lane / 8, 64 + lane % 8), to_operand(rows.rope[i]));
  load_rest(rows, cache, next_slot);
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    store_pair(rows, pair, scales, target, chunk);
    load_pair(rows, pair, cache, next_slot);
  }
}
#else
// One warp starts the copy of its 16 rows of a tile, zeros for slot -1. A lane copies two chunks of each row, and
// one of the rotary chunks of every fourth.
__device__ __forceinline__ void copy_chunk(uint32_t target, const uint8_t* cache, int slot, int chunk) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(target),
               "l"(cache + static_cast<int64_t>(slot < 0 ? 0 : slot) * kRowBytes + chunk * 16),
               "r"(slot < 0 ? 0 : 16)
               : "memory");
}

__device__ __forceinline__ void copy_rows(uint32_t tile, const uint8_t* cache, int slot, int first) {
  const int lane = threadIdx.x % 32;
  const uint32_t target = tile + lane / 8 * kBlockBytes + first * 128;
#pragma unroll
  for (int row = 0; row < 16; ++row) {
    const int s = __shfl_sync(0xFFFFFFFF, slot, row);
    const uint32_t at = target + row * 128 + ((lane % 8 ^ (row & 7)) * 16);
    copy_chunk(at, cache, s, lane);
    copy_chunk(at + 4 * kBlockBytes, cache, s, lane + 32);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int s = __shfl_sync(0xFFFFFFFF, slot, 4 * i + lane / 8);
    copy_chunk(tile + tile_offset(first + 4 * i + lane / 8, 64 + lane % 8), cache, s, 64 + lane % 8);
  }
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}
#endif

struct Problem {
  const uint8_t* q;      // of the group
  const uint8_t* cache;
  const int* list;       // of the group
  const uint8_t* member;  // of the group, or null
  uint8_t* out;
  float* lse;
  int rows, num_heads, used;
  int64_t first_row;  // of the group, in the part that this split writes
  int begin, end;     // pairs of tiles
  bool whole;         // the only split
  float scale_log2;
};

struct Shared {
  float exchange[2][64];  // of the two warpgroups: row maxima in the loop, row sums after it
  uint8_t selected[kStages][64];
  uint64_t full[kStages], empty[kStages];
};

struct Entry {  // of a list
  int slot;
  uint32_t flags;
};

__device__ __forceinline__ int load_early(const int* pointer) {
  int value;
  asm volatile("ld.global.nc.s32 %0, [%1];\n" : "=r"(value) : "l"(pointer));
  return value;
}
__device__ __forceinline__ uint32_t load_early(const uint8_t* pointer) {
  uint32_t value;
  asm volatile("ld.global.nc.u8 %0, [%1];\n" : "=r"(value) : "l"(pointer));
  return value;
}

__device__ __forceinline__ void gather(const Problem& p, Shared& shared, uint32_t tiles) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
  const int tile_end = 2 * p.end;
  // Read two tiles ahead, and not where the compiler would rather: its latency is a good part of a tile's time.
  auto entry_at = [&](int tile) {
    Entry entry{-1, 0xFF};
    const int at = tile * 64 + first + lane % 16;
    if (tile >= tile_end || at >= p.used) return entry;
    entry.slot = load_early(p.list + at);
    if (p.member) entry.flags = load_early(p.member + at);
    return entry;
  };
  // Waits until the place of the tile is free and writes who selected its rows.
  auto enter = [&](int tile, Entry entry, int round) {
    const int stage = tile % 2;
    mbarrier_wait(smem_address(&shared.empty[stage]), (round & 1) ^ 1);
    if (lane < 16) shared.selected[stage][first + lane] = entry.slot < 0 ? 0 : entry.flags;
  };
  Entry entry = entry_at(2 * p.begin), next = entry_at(2 * p.begin + 1);
#if PACKED
  // Brings a later tile's rows into the L2 cache: registers have no room for them yet. (Rows of
  // bf16 are bound by the L2 cache itself, and lose by it.)
  auto prefetch = [&](int slot) {
    if (slot < 0) return;
    const uint8_t* row = p.cache + static_cast<int64_t>(slot) * kRowBytes;
#pragma unroll
    for (int i = 0; i < (kRowBytes + 255) / 256; ++i) {
      const int at = (2 * i + lane / 16) * 128;
      if (at < kRowBytes) asm volatile("prefetch.global.L2 [%0];\n" ::"l"(row + at) : "memory");
    }
  };
  // The next tile's rows are loaded as this tile's leave the registers.
  prefetch(next.slot);
  Rows rows;
  load_rest(rows, p.cache, entry.slot);
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) load_pair(rows, pair, p.cache, entry.slot);
  for (int tile = 2 * p.begin; tile < tile_end; ++tile) {
    const Entry later = entry_at(tile + 2);
    enter(tile, entry, tile / 2 - p.begin);
    exchange_rows(rows, tiles + tile % 2 * kTileBytes, first, p.cache, next.slot);
    fence_async_proxy();
    mbarrier_arrive(smem_address(&shared.full[tile % 2]));
    prefetch(later.slot);
    entry = next;
    next = later;
  }
#else
  for (int pair = p.begin; pair < p.end; ++pair) {
    // Both copies are on their way before the first is waited for.
    enter(2 * pair, entry, pair - p.begin);
    copy_rows(tiles, p.cache, entry.slot, first);
    enter(2 * pair + 1, next, pair - p.begin);
    copy_rows(tiles + kTileBytes, p.cache, next.slot, first);
    entry = entry_at(2 * pair + 2);
    next = entry_at(2 * pair + 3);
    copies_wait<1>();
    fence_async_proxy();
    mbarrier_arrive(smem_address(&shared.full[0]));
    copies_wait<0>();
    fence_async_proxy();
    mbarrier_arrive(smem_address(&shared.full[1]));
  }
#endif
}

// kHalf: the tile of each pair that this warpgroup scores, and the half of the columns that it sums.
template <int kHalf>
__device__ __forceinline__ void attend(const Problem& p, Shared& shared, uint8_t* smem_q, uint8_t* smem_k) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const int bit_low = row / p.num_heads, bit_high = (row + 8) / p.num_heads;
#pragma unroll 9
  for (int j = 0; j < 18; ++j) {
    const int i = threadIdx.x - 128 + j * 256;
    const int query = i / 72, chunk = i % 72;
    uint4 v = {0, 0, 0, 0};
    if (query < p.rows) v = *reinterpret_cast<const uint4*>(p.q + query * 1152 + chunk * 16);
    *reinterpret_cast<uint4*>(smem_q + tile_offset(query, chunk)) = to_operand(v);
  }
  fence_async_proxy();
  math_barrier();
  float o[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] = 0.0f;
  const uint32_t queries_low = descriptor_low(smem_address(smem_q));
  const uint32_t keys_low = descriptor_low(smem_address(smem_k) + kHalf * kTileBytes);
  const uint32_t probabilities_low = descriptor_low(smem_address(smem_k) + 8 * kBlockBytes);
  const uint32_t values_low = descriptor_low(smem_address(smem_k) + kHalf * 4 * kBlockBytes, kBlockBytes);
  uint8_t* own_p = smem_k + kHalf * kTileBytes + 8 * kBlockBytes;  // [64 rows][64 keys]
  float max_low = -infinity(), max_high = -infinity(), sum_low = 0.0f, sum_high = 0.0f;

  for (int pair = p.begin; pair < p.end; ++pair) {
    mbarrier_wait(smem_address(&shared.full[kHalf]), (pair - p.begin) & 1);
    float s[32];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 36; ++k) {
      const uint32_t offset = ((k / 4) * kBlockBytes + (k % 4) * 32) >> 4;
      wgmma_ss_n64(s, queries_low + offset, keys_low + offset, k != 0);
    }
    wgmma_commit();
    wgmma_wait<0>();

    float new_low = -infinity(), new_high = -infinity();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t flags = *reinterpret_cast<const uint16_t*>(&shared.selected[kHalf][j * 8 + quad * 2]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t flag = flags >> (8 * i);
        s[4 * j + i] = flag >> bit_low & 1 ? s[4 * j + i] * p.scale_log2 : -infinity();
        s[4 * j + 2 + i] = flag >> bit_high & 1 ? s[4 * j + 2 + i] * p.scale_log2 : -infinity();
        new_low = fmaxf(new_low, s[4 * j + i]);
        new_high = fmaxf(new_high, s[4 * j + 2 + i]);
      }
    }
    new_low = fmaxf(new_low, __shfl_xor_sync(0xFFFFFFFF, new_low, 1));
    new_high = fmaxf(new_high, __shfl_xor_sync(0xFFFFFFFF, new_high, 1));
    new_low = fmaxf(new_low, __shfl_xor_sync(0xFFFFFFFF, new_low, 2));
    new_high = fmaxf(new_high, __shfl_xor_sync(0xFFFFFFFF, new_high, 2));
    if (quad == 0) {
      shared.exchange[kHalf][row] = new_low;
      shared.exchange[kHalf][row + 8] = new_high;
    }
    // Past it, no warp reads the rotary columns of either tile.
    math_barrier();
    new_low = fmaxf(fmaxf(max_low, new_low), shared.exchange[1 - kHalf][row]);
    new_high = fmaxf(fmaxf(max_high, new_high), shared.exchange[1 - kHalf][row + 8]);
    // A row with nothing selected yet has no maximum to subtract.
    const float base_low = (new_low == -infinity() ? 0.0f : new_low) - kShift;
    const float base_high = (new_high == -infinity() ? 0.0f : new_high) - kShift;
    const float keep_low = exp2_fast(max_low - kShift - base_low);
    const float keep_high = exp2_fast(max_high - kShift - base_high);
    max_low = new_low;
    max_high = new_high;
    sum_low *= keep_low;
    sum_high *= keep_high;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float a = exp2_fast(s[4 * j] - base_low), b = exp2_fast(s[4 * j + 1] - base_low);
      const float c = exp2_fast(s[4 * j + 2] - base_high), d = exp2_fast(s[4 * j + 3] - base_high);
      sum_low += a + b;
      sum_high += c + d;
      // Rows 8 apart have the same swizzle.
      uint8_t* target = own_p + tile_offset(row, j) + quad * 4;
      *reinterpret_cast<uint32_t*>(target) = pack_half(a, b);
      *reinterpret_cast<uint32_t*>(target + 8 * 128) = pack_half(c, d);
    }
    fence_async_proxy();
    if (__any_sync(0xFFFFFFFF, keep_low != 1.0f || keep_high != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 128; i += 4) {
        o[i] *= keep_low;
        o[i + 1] *= keep_low;
        o[i + 2] *= keep_high;
        o[i + 3] *= keep_high;
      }
    }
    math_barrier();
    wgmma_fence();
#pragma unroll
    for (int stage = 0; stage < 2; ++stage) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_ss_n256(o, probabilities_low + stage * (kTileBytes >> 4) + k * 2,
                      values_low + stage * (kTileBytes >> 4) + k * 128, 1);
      wgmma_commit();
    }
    // The first tile's place is refilled while the second's values are summed.
    wgmma_wait<1>();
    mbarrier_arrive(smem_address(&shared.empty[0]));
    wgmma_wait<0>();
    mbarrier_arrive(smem_address(&shared.empty[1]));
  }

  sum_low += __shfl_xor_sync(0xFFFFFFFF, sum_low, 1);
  sum_low += __shfl_xor_sync(0xFFFFFFFF, sum_low, 2);
  sum_high += __shfl_xor_sync(0xFFFFFFFF, sum_high, 1);
  sum_high += __shfl_xor_sync(0xFFFFFFFF, sum_high, 2);
  math_barrier();
  if (quad == 0) {
    shared.exchange[kHalf][row] = sum_low;
    shared.exchange[kHalf][row + 8] = sum_high;
  }
  math_barrier();
  // Added in the same order by both.
  sum_low = shared.exchange[0][row] + shared.exchange[1][row];
  sum_high = shared.exchange[0][row + 8] + shared.exchange[1][row + 8];
  const float inverse[2] = {sum_low > 0.0f ? 1.0f / sum_low : 0.0f, sum_high > 0.0f ? 1.0f / sum_high : 0.0f};
  const float log_sum[2] = {sum_low > 0.0f ? (max_low + log2f(sum_low) - kShift) * kLn2 : -infinity(),
                            sum_high > 0.0f ? (max_high + log2f(sum_high) - kShift) * kLn2 : -infinity()};
  if (kHalf == 0 && quad == 0) {
    if (row < p.rows) p.lse[p.first_row + row] = log_sum[0];
    if (row + 8 < p.rows) p.lse[p.first_row + row + 8] = log_sum[1];
  }
  // Through the warp's own rows of a tile, which nothing reads any more, so that whole rows are written. Parts of
  // a split are kept in the operand type; fp16 loses less of them than bf16 would.
  constexpr int kPitch = 512 + 16;
  uint8_t* staged = smem_k + kHalf * kTileBytes;
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    uint8_t* values = staged + (row + 8 * upper) * kPitch + quad * 4;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float a = o[4 * j + 2 * upper] * inverse[upper];
      const float b = o[4 * j + 2 * upper + 1] * inverse[upper];
      *reinterpret_cast<uint32_t*>(values + j * 16) = p.whole ? pack_bf16(a, b) : pack_half(a, b);
    }
  }
  __syncwarp();
  const int first = row - lane / 4;
  uint8_t* target = p.out + (p.first_row + first) * 1024 + kHalf * 512 + lane * 16;
#pragma unroll 8
  for (int i = 0; i < 16; ++i)
    if (first + i < p.rows)
      *reinterpret_cast<uint4*>(target + i * 1024) =
          *reinterpret_cast<const uint4*>(staged + (first + i) * kPitch + lane * 16);
}

// grid (splits, groups). Group g holds query rows [g * rows_per_group, ...) of [num_tokens * num_heads];
// lists holds list_stride slots a group, counts (or null: list_stride) how many are in use, members (or
// null: everyone) one byte an entry whose bit i says that token i of the group selected it.
extern "C" __global__ void __launch_bounds__(384, 1)
    sparse_mla_kernel(const uint8_t* __restrict__ q, const uint8_t* __restrict__ cache,
                      const int* __restrict__ lists, const int* __restrict__ counts,
                      const uint8_t* __restrict__ members, uint8_t* __restrict__ out,
                      float* __restrict__ lse, int rows_per_group, int num_heads, int list_stride,
                      int total_rows, float scale_log2) {
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ __align__(16) Shared shared;
  const int group = blockIdx.y, split = blockIdx.x, splits = gridDim.x;
  wait_for_previous_kernel();
  const int used = counts ? counts[group] : list_stride;
  const int pairs = (used + 127) / 128;
  const int64_t list_at = static_cast<int64_t>(group) * list_stride;
  const int64_t row_at = static_cast<int64_t>(group) * rows_per_group;
  const Problem p{q + row_at * 1152,
                  cache,
                  lists + list_at,
                  members ? members + list_at : nullptr,
                  out,
                  lse,
                  rows_per_group,
                  num_heads,
                  used,
                  static_cast<int64_t>(split) * total_rows + row_at,
                  pairs * split / splits,
                  pairs * (split + 1) / splits,
                  splits == 1,
                  scale_log2};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(smem_address(&shared.full[stage]), 128);
      mbarrier_init(smem_address(&shared.empty[stage]), 256);
    }
  }
  __syncthreads();
  let_next_kernel_start();
  uint8_t* smem_k = smem + kTileBytes;
  if (threadIdx.x < 128) {
    register_decrease<120>();
    gather(p, shared, smem_address(smem_k));
  } else if (threadIdx.x < 256) {
    register_increase<192>();
    attend<0>(p, shared, smem, smem_k);
  } else {
    register_increase<192>();
    attend<1>(p, shared, smem, smem_k);
  }
}

// Joins the parts of each row by their log-sum-exp. A block a row, 128 threads of four columns; splits is
// at most 32.
extern "C" __global__ void __launch_bounds__(128)
    combine_splits_kernel(const uint8_t* __restrict__ parts, const float* __restrict__ part_lse,
                          uint8_t* __restrict__ out, float* __restrict__ lse, int total_rows,
                          int splits) {
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % 32;
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
#if PACKED
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
