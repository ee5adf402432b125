// Sparse MLA over packed rows for up to 64 query rows: one list a block, keys as they lie in the cache.
//
// Raw rows of 656 bytes come by bulk copies into a ring of tiles of 64, and no converted copy of them exists in
// shared memory: codes become fp16 times scale on the way into the registers of a product's A operand. So keys are
// the M side of the scores (S^T = K Q^T) and latent columns that of the values (O^T = V^T P^T). Of a pair of tiles
// each of two warpgroups scores one; each sums half of the columns of both. They work one after the other through
// the chain of maxima, so that one's exponentials run beside the other's products.
// A maximum is rounded to an integer, so that rescaling is by powers of two and loses nothing; and it stays until it
// is exceeded clearly, since any row's rise costs a pass over all accumulators.
//
// Queries lie in the order in which a lane meets a row's bytes (see load_queries).
//
// Defines: ROWS (query rows of a group, rounded up to a multiple of 16, at most 64), MEMBERS (each entry of a list says
// which tokens of the group selected it), WGMMA_SCORES, WGMMA_ROTARY, WGMMA_VALUES (products of ROWS query rows).

constexpr int kRowBytes = 656;
constexpr int kScalesAt = 512, kRopeAt = 528;
constexpr int kKeys = 64;                   // of a tile
constexpr int kEights = ROWS / 8;
constexpr int kStages = 3;
constexpr int kStageBytes = kKeys * kRowBytes;
constexpr int kBlockBytes = 64 * 128;       // 64 rows of 64 16-bit values, 128-byte swizzle
constexpr int kQueryBytes = 9 * kBlockBytes;
constexpr int kMathThreads = 256;
// A maximum stays until it is exceeded by more than kSlack, so probabilities reach 2^(kShift + kSlack + 0.5).
constexpr float kSlack = 5.0f, kShift = 10.0f;
// A float with this added is an integer whose bits are ordered like its value.
constexpr float kMagic = 12582912.0f;
constexpr float kLimit = 4.0e6f;  // maxima are kept within it, where that holds

__device__ const uint4 kNoRow[kRowBytes / 16] = {};  // what an absent slot is gathered from

// fp16 of the two low codes of a word times a pair of scales, and of its two high ones.
__device__ __forceinline__ uint32_t low_codes(uint32_t word, uint32_t scales) {
  uint32_t product;
  asm("{\n.reg .b32 codes;\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 codes, low;\nmul.rn.f16x2 %0, codes, %2;\n}\n"
      : "=r"(product)
      : "r"(word), "r"(scales));
  return product;
}
__device__ __forceinline__ uint32_t high_codes(uint32_t word, uint32_t scales) {
  uint32_t product;
  asm("{\n.reg .b32 codes;\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 codes, high;\nmul.rn.f16x2 %0, codes, %2;\n}\n"
      : "=r"(product)
      : "r"(word), "r"(scales));
  return product;
}

__device__ __forceinline__ float load_float(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float2 load_floats(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_word(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void raise_to(uint32_t address, float v) {
  asm volatile("red.relaxed.cta.shared::cta.max.u32 [%0], %1;\n" ::"r"(address), "r"(__float_as_uint(v)) : "memory");
}

__device__ __forceinline__ void math_barrier() { asm volatile("bar.sync 1, 256;\n" ::: "memory"); }

// Arrival of a whole warp, for what all its lanes did before.
__device__ __forceinline__ void warp_arrive(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Maximum or sum over the lanes of a quad position. Of a lane's 16 values (query rows 8 j + 2 quad + {0, 1}), lane i
// ends with those of query rows 2 i and 2 i + 1 in the first two.
template <int kCount, bool kSum>
__device__ __forceinline__ void fold(float (&v)[16]) {
  const bool upper = threadIdx.x & (2 * kCount);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float send = upper ? v[i] : v[i + kCount], keep = upper ? v[i + kCount] : v[i];
    const float got = __shfl_xor_sync(0xFFFFFFFF, send, 2 * kCount);
    v[i] = kSum ? keep + got : fmaxf(keep, got);
  }
  if constexpr (kCount > 2) fold<kCount / 2, kSum>(v);
}

// Keeps the compiler from moving uses of a product's registers above the wait for it.
template <int kCount>
__device__ __forceinline__ void pin(float (&v)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(v[i])::"memory");
}

struct Shared {
  float maxima[4][64];     // after each tile, of the tiles so far, plus kMagic; a ring of tiles
  int changed[4];          // the tile, if it raised any maximum
  float sums[8][64];       // of the warps
  float inverse[64];
  __align__(8) uint16_t present[kStages][4];  // which rows of a stage are real
#if MEMBERS
  uint8_t flags[kStages][kKeys];  // bit i: token i of the group selected the row
  __align__(16) uint16_t rows_of[4][8];         // of a quad and a token: bit i for the lanes' i-th query row
#endif
  uint64_t full[kStages], empty[kStages];
  uint64_t maxima_ready[2], probabilities_ready[2], probabilities_empty[2];
};

struct Launch {
  const uint8_t *q, *cache;
  const int *lists, *counts;
  const uint8_t* members;
  uint8_t* out;
  float* lse;
  int rows, list_stride, total_rows, splits, items;
  float scale_log2;
};

// What a block does at a time: a piece of a group's list.
struct Item {
  int group, split, used;
  int begin, end;  // tiles
};

__device__ __forceinline__ Item item_at(const Launch& p, int index) {
  const int group = index / p.splits, split = index % p.splits;
  const int used = p.counts ? p.counts[group] : p.list_stride;
  const int tiles = (used + kKeys - 1) / kKeys;
  return {group, split, used, tiles * split / p.splits, tiles * (split + 1) / p.splits};
}

// Four warps, each of 16 rows of a tile: a warp starts bulk copies one lane after the other, some 80 cycles each. They
// run ahead into the block's next item.
__device__ __forceinline__ void gather(const Launch& p, Shared& shared, uint32_t ring) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = 16 * warp + lane;
  int stage = 0, parity = 1;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Item item = item_at(p, index);
    const int64_t list_at = static_cast<int64_t>(item.group) * p.list_stride;
    const int* list = p.lists + list_at;
    auto slot_at = [&](int tile) {
      const int at = tile * kKeys + row;
      return lane < 16 && tile < item.end && at < item.used ? list[at] : -1;
    };
    int slot = slot_at(item.begin);
    for (int tile = item.begin; tile < item.end; ++tile) {
      const int next_slot = slot_at(tile + 1);
      const uint32_t barrier = smem_address(&shared.full[stage]);
      const uint32_t real = __ballot_sync(0xFFFFFFFF, slot >= 0);
      mbarrier_wait(smem_address(&shared.empty[stage]), parity);
#if MEMBERS
      if (lane < 16) shared.flags[stage][row] = slot >= 0 ? p.members[list_at + tile * kKeys + row] : 0;
      __syncwarp();
#endif
      if (lane == 0) {
        shared.present[stage][warp] = real;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier),
                     "n"(kStageBytes / 4)
                     : "memory");
      }
      __syncwarp();
      if (lane < 16) {
        const uint8_t* source = slot < 0 ? reinterpret_cast<const uint8_t*>(kNoRow)
                                         : p.cache + static_cast<int64_t>(slot) * kRowBytes;
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
                ring + stage * kStageBytes + row * kRowBytes),
            "l"(source), "n"(kRowBytes), "r"(barrier)
            : "memory");
      }
      slot = next_slot;
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    const int next = index + gridDim.x;
    if (warp == 0 && lane == 0 && next < p.items)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(
                       p.q + static_cast<int64_t>(next / p.splits) * p.rows * 1152),
                   "r"(p.rows * 1152)
                   : "memory");
  }
}

// Queries as the B operand of the scores. A lane of quad q meets the 128 columns of a scale by two pieces c of 16
// bytes at 32 q + 16 c, four codes a step of the product, so those columns are its k indices
// 2 q, 2 q + 1, 2 q + 8, 2 q + 9. Rotary columns, two bytes each: 16 q + 8 c and two steps a piece.
__device__ __forceinline__ void load_queries(const uint8_t* q, int rows, uint32_t queries) {
  int thread = threadIdx.x;
  // Opaque, or the compiler keeps all the addresses in registers from one item to the next.
  asm volatile("" : "+r"(thread));
  const int eighth = thread % 8, first_row = thread / 32 * 8 + thread % 32 / 8;  // eight lanes read 128 bytes
#pragma unroll
  for (int i = 0; i < 18; ++i) {
    const int row = first_row + i % 2 * 4, piece = i / 2 * 8 + eighth;  // of eight columns
    uint4 v = {0, 0, 0, 0};
    if (row < rows) v = *reinterpret_cast<const uint4*>(q + row * 1152 + piece * 16);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    const bool rotary = i >= 16;  // stays bf16
    const int quad = rotary ? eighth / 2 : piece / 4 % 4;
    const int block = rotary ? 8 : piece / 16 * 2 + piece / 2 % 2;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t word = rotary ? words[j]
                                   : pack_half_clamped(__uint_as_float(words[j] << 16), __uint_as_float(words[j] & 0xFFFF0000u));
      store_word(queries + block * kBlockBytes + row * 128 + ((eighth % 2 * 4 + j) ^ (row & 7)) * 16 + quad * 4, word);
    }
  }
}

// S^T[64 keys, ROWS query rows] of a tile. rows: the lane's key of the tile; the other is 8 further.
__device__ __forceinline__ void score(float (&s)[ROWS / 2], uint32_t rows, uint32_t queries_low) {
  const int quad = threadIdx.x % 4;
  const uint32_t low = rows + quad * 32, high = low + 8 * kRowBytes;
  uint32_t a[2][16];  // of four steps
  uint4 low_piece = load_four(low), high_piece = load_four(high);
  float low_scale = load_float(rows + kScalesAt), high_scale = load_float(rows + 8 * kRowBytes + kScalesAt);
  uint32_t low_twice = 0, high_twice = 0;
#pragma unroll
  for (int group = 0; group < 9; ++group) {  // of four steps: a piece of codes, at last both rotary pieces
    uint32_t(&f)[16] = a[group % 2];
    const uint4 l = low_piece, h = high_piece;
    if (group < 8) {
      if (group % 2 == 0) {
        low_twice = pack_half_clamped(low_scale, low_scale);
        high_twice = pack_half_clamped(high_scale, high_scale);
      }
      const int next = group + 1;
      const uint32_t at = next < 8 ? next / 2 * 128 + next % 2 * 16 : kRopeAt;
      low_piece = load_four(low + at);
      high_piece = load_four(high + at);
      if (next % 2 == 0 && next < 8) {
        low_scale = load_float(rows + kScalesAt + next / 2 * 4);
        high_scale = load_float(rows + 8 * kRowBytes + kScalesAt + next / 2 * 4);
      }
      if (group >= 2) wgmma_wait<1>();
      const uint32_t low_words[4] = {l.x, l.y, l.z, l.w}, high_words[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        f[4 * i] = low_codes(low_words[i], low_twice);
        f[4 * i + 1] = low_codes(high_words[i], high_twice);
        f[4 * i + 2] = high_codes(low_words[i], low_twice);
        f[4 * i + 3] = high_codes(high_words[i], high_twice);
      }
    } else {
      wgmma_wait<1>();
      const uint4 l2 = load_four(low + kRopeAt + 16), h2 = load_four(high + kRopeAt + 16);
      f[0] = l.x, f[1] = h.x, f[2] = l.y, f[3] = h.y;
      f[4] = l.z, f[5] = h.z, f[6] = l.w, f[7] = h.w;
      f[8] = l2.x, f[9] = h2.x, f[10] = l2.y, f[11] = h2.y;
      f[12] = l2.z, f[13] = h2.z, f[14] = l2.w, f[15] = h2.w;
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t query = queries_low + ((group * kBlockBytes + i * 32) >> 4);
      if (group < 8)
        WGMMA_SCORES(s, f[4 * i], f[4 * i + 1], f[4 * i + 2], f[4 * i + 3], query, group > 0 || i > 0);
      else
        WGMMA_ROTARY(s, f[4 * i], f[4 * i + 1], f[4 * i + 2], f[4 * i + 3], query, 1);
    }
    wgmma_commit();
  }
  wgmma_wait<0>();
  pin(s);
}

#if MEMBERS
// Which of a lane's 16 query rows belong to tokens that selected a row.
__device__ __forceinline__ uint32_t rows_of_tokens(uint4 rows_of, uint32_t flags) {
  const uint32_t words[4] = {rows_of.x, rows_of.y, rows_of.z, rows_of.w};
  uint32_t rows = 0;
#pragma unroll
  for (int token = 0; token < 8; ++token)
    rows |= flags >> token & 1 ? words[token / 2] >> (16 * (token % 2)) : 0;
  return rows;
}
#endif

// O^T[256 columns, ROWS query rows] += V^T P^T. columns: the lane's first of eight columns of the tile's key 2 quad;
// scales: of those columns for that key. Block b of 64 rows holds columns 2 b and 2 b + 1 of each lane's eight.
__device__ __forceinline__ void add_values(float (&o)[4][ROWS / 2], uint32_t columns, uint32_t scales,
                                           uint32_t probabilities_low, uint32_t empty) {
  uint32_t a[2][16];
  uint2 v[4];
  float scale[4];
  auto load = [&](int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 16 * step + i / 2 * 8 + i % 2;
      v[i] = load_two(columns + key * kRowBytes);
      scale[i] = load_float(scales + key * kRowBytes);
    }
  };
  load(0);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t(&f)[16] = a[step % 2];
    if (step >= 2) wgmma_wait<1>();
    const uint32_t near = pack_half_clamped(scale[0], scale[1]), far = pack_half_clamped(scale[2], scale[3]);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint32_t order = b % 2 ? 0x7362 : 0x5140;
      const uint32_t n = b < 2 ? __byte_perm(v[0].x, v[1].x, order) : __byte_perm(v[0].y, v[1].y, order);
      const uint32_t m = b < 2 ? __byte_perm(v[2].x, v[3].x, order) : __byte_perm(v[2].y, v[3].y, order);
      f[4 * b] = low_codes(n, near);
      f[4 * b + 1] = high_codes(n, near);
      f[4 * b + 2] = low_codes(m, far);
      f[4 * b + 3] = high_codes(m, far);
    }
    if (step < 3)
      load(step + 1);
    else
      warp_arrive(empty);  // the tile's bytes are in registers
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < 4; ++b)
      WGMMA_VALUES(o[b], f[4 * b], f[4 * b + 1], f[4 * b + 2], f[4 * b + 3], probabilities_low + step * 128, 1);
    wgmma_commit();
  }
}

// Where a computing warpgroup stands in the ring and in the phases of its barriers.
struct Position {
  int stage, parity, phase;
};

__device__ __forceinline__ void attend(const Launch& p, const Item& item, Position& position, Shared& shared,
                                       uint32_t queries, uint32_t probabilities, uint32_t ring) {
  const int half = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = lane / 4, quad = lane % 4;
  const int tiles = item.end - item.begin;
  const int64_t row_at = static_cast<int64_t>(item.group) * p.rows;
  const int64_t first_row = static_cast<int64_t>(item.split) * p.total_rows + row_at;
  shared.maxima[threadIdx.x / 64][threadIdx.x % 64] = kMagic - kLimit;
  if (threadIdx.x < 4) shared.changed[threadIdx.x] = -1;
  load_queries(p.q + row_at * 1152, p.rows, queries);
  fence_async_proxy();
  math_barrier();
  const uint32_t queries_low = descriptor_low(queries);
  const uint32_t probabilities_low = descriptor_low(probabilities, kBlockBytes);
  const uint32_t maxima = smem_address(&shared.maxima[0][0]);
  const int key = 16 * warp + group;
  const uint32_t own_p = probabilities + half * kBlockBytes + key * 128 + quad * 4;
  const uint32_t column = 2 * quad * kRowBytes + 256 * half + 64 * warp + 8 * group;
  const uint32_t scale = 2 * quad * kRowBytes + kScalesAt + (2 * half + warp / 2) * 4;
  auto maxima_after = [&](int tile) { return maxima + (tile & 3) * 256; };

  float o[4][ROWS / 2];
#pragma unroll
  for (int i = 0; i < 2 * ROWS; ++i) o[i / (ROWS / 2)][i % (ROWS / 2)] = 0.0f;
  float sums[16];  // of query rows 8 j + 2 quad + {0, 1}, relative to the maxima after the own tile
#pragma unroll
  for (int i = 0; i < 16; ++i) sums[i] = 0.0f;

  for (int pair = 0; 2 * pair < tiles; ++pair) {
    const int tile = 2 * pair + half, now = position.phase;
    int stages[2] = {position.stage, position.stage + 1}, parities[2] = {position.parity, position.parity};
    if (stages[1] == kStages) stages[1] = 0, parities[1] ^= 1;
    const int own_stage = half ? stages[1] : stages[0];
    if (tile < tiles) {
      float s[ROWS / 2];
      mbarrier_wait(smem_address(&shared.full[own_stage]), half ? parities[1] : parities[0]);
      score(s, ring + own_stage * kStageBytes + key * kRowBytes, queries_low);
#pragma unroll
      for (int i = 0; i < ROWS / 2; ++i) s[i] *= p.scale_log2;
#if MEMBERS
      const uint4 rows_of = load_four(smem_address(&shared.rows_of[quad][0]));
      const uint32_t low_rows = rows_of_tokens(rows_of, shared.flags[own_stage][key]);
      const uint32_t high_rows = rows_of_tokens(rows_of, shared.flags[own_stage][key + 8]);
#pragma unroll
      for (int i = 0; i < ROWS / 4; ++i) {
        float &low = s[i / 2 * 4 + i % 2], &high = s[i / 2 * 4 + 2 + i % 2];
        low = low_rows >> i & 1 ? low : -infinity();
        high = high_rows >> i & 1 ? high : -infinity();
      }
#else
      const uint64_t present = *reinterpret_cast<const uint64_t*>(shared.present[own_stage]);
      if (present != ~0ull) {
        const bool low_real = present >> key & 1, high_real = present >> (key + 8) & 1;
#pragma unroll
        for (int i = 0; i < ROWS / 2; i += 4) {
          s[i] = low_real ? s[i] : -infinity();
          s[i + 1] = low_real ? s[i + 1] : -infinity();
          s[i + 2] = high_real ? s[i + 2] : -infinity();
          s[i + 3] = high_real ? s[i + 3] : -infinity();
        }
      }
#endif
      // The warp's maxima; lane i ends with query rows 2 i and 2 i + 1.
      float most[16];
#pragma unroll
      for (int i = 0; i < 16; ++i)
        most[i] = i < ROWS / 4 ? fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + 2 + i % 2]) : -infinity();
      fold<8, false>(most);
      // One tile's maxima after the other's. What is left in the ring's place is older and so never larger.
      if (tile > 0) mbarrier_wait(smem_address(&shared.maxima_ready[1 - half]), half ? now : now ^ 1);
      const float2 before = load_floats(maxima_after(tile - 1) + lane * 8);
      const float wanted[2] = {kMagic + fminf(fmaxf(most[0], -kLimit), kLimit),
                               kMagic + fminf(fmaxf(most[1], -kLimit), kLimit)};
      const float raised[2] = {wanted[0] > before.x + kSlack ? wanted[0] : before.x,
                               wanted[1] > before.y + kSlack ? wanted[1] : before.y};
      raise_to(maxima_after(tile) + lane * 8, raised[0]);
      raise_to(maxima_after(tile) + lane * 8 + 4, raised[1]);
      if (raised[0] > before.x || raised[1] > before.y) shared.changed[tile & 3] = tile;
      warp_arrive(smem_address(&shared.maxima_ready[half]));
      mbarrier_wait(smem_address(&shared.maxima_ready[half]), now);
      const volatile int* changed = shared.changed;
      if (changed[tile & 3] == tile || (tile > 0 && changed[tile - 1 & 3] == tile - 1)) {
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          const float2 old = load_floats(maxima_after(tile - 2) + (8 * j + 2 * quad) * 4);
          const float2 base = load_floats(maxima_after(tile) + (8 * j + 2 * quad) * 4);
          sums[2 * j] *= exp2_fast(old.x - base.x);
          sums[2 * j + 1] *= exp2_fast(old.y - base.y);
        }
      }
      mbarrier_wait(smem_address(&shared.probabilities_empty[half]), now ^ 1);
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        float2 base = load_floats(maxima_after(tile) + (8 * j + 2 * quad) * 4);
        base.x -= kMagic + kShift;
        base.y -= kMagic + kShift;
        const float a = exp2_fast(s[4 * j] - base.x), b = exp2_fast(s[4 * j + 1] - base.y);
        const float c = exp2_fast(s[4 * j + 2] - base.x), d = exp2_fast(s[4 * j + 3] - base.y);
        sums[2 * j] += a + c;
        sums[2 * j + 1] += b + d;
        const uint32_t at = own_p + ((j ^ group) * 16);
        store_word(at, pack_half_clamped(a, b));
        store_word(at + 8 * 128, pack_half_clamped(c, d));
      }
      fence_async_proxy();
    } else {
      // The phases go on without the tile, but not before the other warpgroup has seen the last ones.
      mbarrier_wait(smem_address(&shared.maxima_ready[0]), now);
      warp_arrive(smem_address(&shared.maxima_ready[half]));
    }
    warp_arrive(smem_address(&shared.probabilities_ready[half]));
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      const int of = 2 * pair + which, at = which ? stages[1] : stages[0];
      if (of == tiles) {
        warp_arrive(smem_address(&shared.probabilities_empty[which]));
        break;
      }
      if (which != half) mbarrier_wait(smem_address(&shared.full[at]), which ? parities[1] : parities[0]);
      mbarrier_wait(smem_address(&shared.probabilities_ready[which]), now);
      const volatile int* changed = shared.changed;
      if (changed[of & 3] == of) {
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          const float2 old = load_floats(maxima_after(of - 1) + (8 * j + 2 * quad) * 4);
          const float2 base = load_floats(maxima_after(of) + (8 * j + 2 * quad) * 4);
          const float even = exp2_fast(old.x - base.x), odd = exp2_fast(old.y - base.y);
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            o[b][4 * j] *= even;
            o[b][4 * j + 1] *= odd;
            o[b][4 * j + 2] *= even;
            o[b][4 * j + 3] *= odd;
          }
        }
      }
      const uint32_t rows = ring + at * kStageBytes;
      add_values(o, rows + column, rows + scale, probabilities_low + which * (kBlockBytes >> 4),
                 smem_address(&shared.empty[at]));
      wgmma_wait<0>();
#pragma unroll
      for (int b = 0; b < 4; ++b) pin(o[b]);
      warp_arrive(smem_address(&shared.probabilities_empty[which]));
    }
    position.phase ^= 1;
    position.stage += min(2, tiles - 2 * pair);
    if (position.stage >= kStages) position.stage -= kStages, position.parity ^= 1;
  }

  const int last = tiles - 1, own_last = last - ((last & 1) ^ half);
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    const float2 old = load_floats(maxima_after(own_last) + (8 * j + 2 * quad) * 4);
    const float2 base = load_floats(maxima_after(last) + (8 * j + 2 * quad) * 4);
    sums[2 * j] *= exp2_fast(old.x - base.x);
    sums[2 * j + 1] *= exp2_fast(old.y - base.y);
  }
  fold<8, true>(sums);
  shared.sums[threadIdx.x / 32][2 * lane] = sums[0];
  shared.sums[threadIdx.x / 32][2 * lane + 1] = sums[1];
  math_barrier();
  if (threadIdx.x < 64) {
    const int row = threadIdx.x;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) total += shared.sums[i][row];
    shared.inverse[row] = total > 0.0f ? 1.0f / total : 0.0f;
    if (row < p.rows)
      p.lse[first_row + row] =
          total > 0.0f ? (shared.maxima[last & 3][row] - kMagic - kShift + log2f(total)) * kLn2 : -infinity();
  }
  math_barrier();
  uint8_t* target = p.out + first_row * 1024 + (256 * half + 64 * warp + 8 * group) * 2;
#pragma unroll
  for (int i = 0; i < ROWS / 4; ++i) {
    const int at = i / 2 * 4 + i % 2, row = 8 * (i / 2) + 2 * quad + i % 2;
    const float inverse = shared.inverse[row];
    uint32_t words[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float x = o[b][at] * inverse, y = o[b][at + 2] * inverse;
      words[b] = p.splits == 1 ? pack_bf16(x, y) : pack_half_clamped(x, y);
    }
    if (row < p.rows)
      *reinterpret_cast<uint4*>(target + row * 1024) = {words[0], words[1], words[2], words[3]};
  }
}

// A block takes every gridDim.x-th of groups * splits items. Group g holds query rows [g * rows_per_group, ...) of [num_tokens * num_heads];
// lists holds list_stride slots a group, counts (or null: list_stride) how many are in use, members one byte an entry
// whose bit i says that token i of the group selected it.
extern "C" __global__ void __launch_bounds__(384, 1)
    sparse_mla_packed_kernel(const uint8_t* __restrict__ q, const uint8_t* __restrict__ cache,
                             const int* __restrict__ lists, const int* __restrict__ counts,
                             const uint8_t* __restrict__ members, uint8_t* __restrict__ out,
                             float* __restrict__ lse, int rows_per_group, int num_heads, int list_stride,
                             int total_rows, int splits, float scale_log2) {
  extern __shared__ __align__(1024) uint8_t smem[];  // queries, probabilities of two tiles, ring
  __shared__ __align__(16) Shared shared;
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_address(&shared.full[i]), 4);
      mbarrier_init(smem_address(&shared.empty[i]), 8);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(smem_address(&shared.maxima_ready[i]), 4);
      mbarrier_init(smem_address(&shared.probabilities_ready[i]), 4);
      mbarrier_init(smem_address(&shared.probabilities_empty[i]), 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
#if MEMBERS
  if (threadIdx.x < 32) {
    const int quad = threadIdx.x / 8, token = threadIdx.x % 8;
    int rows = 0;
    for (int i = 0; i < 16; ++i) rows |= ((8 * (i / 2) + 2 * quad + i % 2) / num_heads == token) << i;
    shared.rows_of[quad][token] = rows;
  }
#endif
  __syncthreads();
  wait_for_previous_kernel();
  const int items = total_rows / rows_per_group * splits;
  const Launch p{q,   cache, lists,          counts,      members,    out,
                 lse, rows_per_group, list_stride, total_rows, splits, items, scale_log2};
  const uint32_t queries = smem_address(smem), probabilities = queries + kQueryBytes;
  const uint32_t ring = probabilities + 2 * kBlockBytes;
  if (threadIdx.x < kMathThreads) {
    register_increase<232>();
    Position position{0, 0, 0};
    for (int index = blockIdx.x; index < items; index += gridDim.x)
      attend(p, item_at(p, index), position, shared, queries, probabilities, ring);
  } else {
    register_decrease<40>();
    gather(p, shared, ring);
  }
}
