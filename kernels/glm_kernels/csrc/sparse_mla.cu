// Sparse MLA over bf16 rows: up to 64 query rows against a gathered list of cache rows, in tiles of 64.
//
// The 64 rows of a block are the heads of one token, or of several tokens of a request that share one
// list (the union of their selections), each list entry saying which of them selected it. One warpgroup
// gathers, two compute, on two tiles at a time: each scores one of the tiles, and each accumulates half of the 512
// latent columns of both. The second takes its maxima after the first's, so that one's exponentials run beside the
// other's products; it adds the first tile's values before its own exponentials.
// A tile has a fixed place, so every descriptor is a constant; its probabilities overwrite its rotary
// columns, which nothing reads after the scores. A half of a place is refilled as soon as its columns are summed.

constexpr int kBlockBytes = 64 * 128;        // 64 rows of 64 16-bit values, 128-byte swizzle
constexpr int kTileBytes = 9 * kBlockBytes;  // 576 columns
constexpr int kRowBytes = 1152;
// A maximum stays until it is exceeded by more than kSlack, so probabilities reach 2^(kShift + kSlack).
constexpr float kSlack = 8.0f, kShift = 8.0f;

// Barriers of one computing warpgroup, and of both.
template <int kHalf>
__device__ __forceinline__ void own_barrier() {
  asm volatile("bar.sync %0, 128;\n" ::"n"(2 + kHalf) : "memory");
}
__device__ __forceinline__ void math_barrier() { asm volatile("bar.sync 1, 256;\n" ::: "memory"); }

// Arrival of a whole warp, for what all its lanes did before.
__device__ __forceinline__ void warp_arrive(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Address of a 16-byte chunk (of 8 values) in a swizzled tile.
__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
  return (chunk / 8) * kBlockBytes + row * 128 + (((chunk % 8) ^ (row & 7)) * 16);
}

// Starts the copy of a chunk, of zeros for slot -1.
__device__ __forceinline__ void copy_chunk(uint32_t target, const uint8_t* cache, int slot, int chunk) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(target),
               "l"(cache + static_cast<int64_t>(slot < 0 ? 0 : slot) * kRowBytes + chunk * 16),
               "r"(slot < 0 ? 0 : 16)
               : "memory");
}

// A warp's 16 rows of half of a tile's latent columns, a chunk of each row a lane.
template <int kHalf>
__device__ __forceinline__ void copy_half(uint32_t tile, const uint8_t* cache, int slot, int first) {
  const int lane = threadIdx.x % 32;
  const uint32_t target = tile + (lane / 8 + 4 * kHalf) * kBlockBytes + first * 128;
#pragma unroll
  for (int row = 0; row < 16; ++row) {
    const int s = __shfl_sync(0xFFFFFFFF, slot, row);
    copy_chunk(target + row * 128 + ((lane % 8 ^ (row & 7)) * 16), cache, s, lane + 32 * kHalf);
  }
}

__device__ __forceinline__ void copy_rotary(uint32_t tile, const uint8_t* cache, int slot, int first) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int s = __shfl_sync(0xFFFFFFFF, slot, 4 * i + lane / 8);
    copy_chunk(tile + tile_offset(first + 4 * i + lane / 8, 64 + lane % 8), cache, s, 64 + lane % 8);
  }
}

template <int kPending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

struct Launch {
  const uint8_t *q, *cache;
  const int *lists, *counts;
  const uint8_t* members;
  uint8_t* out;
  float* lse;
  int rows, num_heads, list_stride, total_rows, splits, items;
  float scale_log2;
};

// What a block does at a time: a piece of a group's list.
struct Item {
  int group, split, used;
  int begin, end;  // pairs of tiles
};

__device__ __forceinline__ Item item_at(const Launch& p, int index) {
  const int group = index / p.splits, split = index % p.splits;
  const int used = p.counts ? p.counts[group] : p.list_stride;
  const int pairs = (used + 127) / 128;
  return {group, split, used, pairs * split / p.splits, pairs * (split + 1) / p.splits};
}

struct Shared {
  float exchange[2][64];  // of the two tiles: maxima so far in the loop, row sums after it
  uint8_t selected[2][64];
  uint64_t full[2], probabilities[2];
  uint64_t empty[2][2];  // of a tile and a half of the columns
};

struct Entry {  // of a list
  int slot;
  uint32_t flags;
};

// It runs ahead into the block's next item.
__device__ __forceinline__ void gather(const Launch& p, Shared& shared, uint32_t tiles) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
  int parity = 1;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Item item = item_at(p, index);
    const int64_t list_at = static_cast<int64_t>(item.group) * p.list_stride;
    auto entry_at = [&](int tile) {
      Entry entry{-1, 0xFF};
      const int at = tile * 64 + first + lane % 16;
      if (tile >= 2 * item.end || at >= item.used) return entry;
      entry.slot = p.lists[list_at + at];
      if (p.members) entry.flags = p.members[list_at + at];
      return entry;
    };
    Entry entries[2] = {entry_at(2 * item.begin), entry_at(2 * item.begin + 1)};
    for (int pair = item.begin; pair < item.end; ++pair) {
      // Both copies are on their way before the first is waited for.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t tile = tiles + i * kTileBytes;
        mbarrier_wait(smem_address(&shared.empty[i][0]), parity);
        copy_half<0>(tile, p.cache, entries[i].slot, first);
        mbarrier_wait(smem_address(&shared.empty[i][1]), parity);
        copy_half<1>(tile, p.cache, entries[i].slot, first);
        // Its place held the probabilities, which both halves needed.
        copy_rotary(tile, p.cache, entries[i].slot, first);
        asm volatile("cp.async.commit_group;\n" ::: "memory");
        if (lane < 16) shared.selected[i][first + lane] = entries[i].slot < 0 ? 0 : entries[i].flags;
      }
      entries[0] = entry_at(2 * pair + 2);
      entries[1] = entry_at(2 * pair + 3);
      copies_wait<1>();
      fence_async_proxy();
      mbarrier_arrive(smem_address(&shared.full[0]));
      copies_wait<0>();
      fence_async_proxy();
      mbarrier_arrive(smem_address(&shared.full[1]));
      parity ^= 1;
    }
    const int next = index + gridDim.x;
    if (threadIdx.x == 0 && next < p.items)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(
                       p.q + static_cast<int64_t>(next / p.splits) * p.rows * 1152),
                   "r"(p.rows * 1152)
                   : "memory");
  }
}

// Keeps the compiler from moving uses of a product's registers above the wait for it.
template <int kCount>
__device__ __forceinline__ void pin(float (&v)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(v[i])::"memory");
}

// Of the thread's two query rows.
struct State {
  float max_low, max_high, sum_low, sum_high;
};

// Raises the maxima and brings sums and accumulators to them.
__device__ __forceinline__ void raise_maxima(State& state, float (&o)[128], float low, float high) {
  // A row with nothing selected yet has no maximum to subtract.
  const float keep_low = exp2_fast(state.max_low - (low == -infinity() ? 0.0f : low));
  const float keep_high = exp2_fast(state.max_high - (high == -infinity() ? 0.0f : high));
  state.max_low = low;
  state.max_high = high;
  state.sum_low *= keep_low;
  state.sum_high *= keep_high;
  if (__any_sync(0xFFFFFFFF, keep_low != 1.0f || keep_high != 1.0f)) {
#pragma unroll
    for (int i = 0; i < 128; i += 4) {
      o[i] *= keep_low;
      o[i + 1] *= keep_low;
      o[i + 2] *= keep_high;
      o[i + 3] *= keep_high;
    }
  }
}

// kHalf: the tile of each pair that this warpgroup scores, and the half of the columns that it sums.
template <int kHalf>
__device__ __forceinline__ void attend(const Launch& p, const Item& item, int& parity, Shared& shared,
                                       uint8_t* smem_q, uint8_t* smem_k) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const int bit_low = row / p.num_heads, bit_high = (row + 8) / p.num_heads;
  const int64_t row_at = static_cast<int64_t>(item.group) * p.rows;
  const int64_t first_row = static_cast<int64_t>(item.split) * p.total_rows + row_at;
  const uint8_t* q = p.q + row_at * 1152;
  // Nobody writes the last item's rows any more.
  math_barrier();
  int thread = threadIdx.x - 128;
  // Opaque, or the compiler keeps all the addresses in registers from one item to the next.
  asm volatile("" : "+r"(thread));
#pragma unroll
  for (int j = 0; j < 18; ++j) {
    const int i = thread + j * 256;
    const int query = i / 72, chunk = i % 72;
    uint4 v = {0, 0, 0, 0};
    if (query < p.rows) v = *reinterpret_cast<const uint4*>(q + query * 1152 + chunk * 16);
    *reinterpret_cast<uint4*>(smem_q + tile_offset(query, chunk)) = v;
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
  State state{-infinity(), -infinity(), 0.0f, 0.0f};
  auto add_values = [&](int tile) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma_ss_n256(o, probabilities_low + tile * (kTileBytes >> 4) + k * 2,
                    values_low + tile * (kTileBytes >> 4) + k * 128, 1);
    wgmma_commit();
  };
  auto values_added = [&](int tile) {
    wgmma_wait<0>();
    pin(o);
    warp_arrive(smem_address(&shared.empty[tile][kHalf]));
  };

  for (int pair = item.begin; pair < item.end; ++pair, parity ^= 1) {
    mbarrier_wait(smem_address(&shared.full[kHalf]), parity);
    float s[32];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 36; ++k) {
      const uint32_t offset = ((k / 4) * kBlockBytes + (k % 4) * 32) >> 4;
      wgmma_ss_n64(s, queries_low + offset, keys_low + offset, k != 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);

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
    if (kHalf == 1) {
      mbarrier_wait(smem_address(&shared.probabilities[0]), parity);
      raise_maxima(state, o, shared.exchange[0][row], shared.exchange[0][row + 8]);
      add_values(0);
    }
    if (!(new_low > state.max_low + kSlack)) new_low = state.max_low;
    if (!(new_high > state.max_high + kSlack)) new_high = state.max_high;
    if (quad == 0) {
      shared.exchange[kHalf][row] = new_low;
      shared.exchange[kHalf][row + 8] = new_high;
    }
    const float base_low = (new_low == -infinity() ? 0.0f : new_low) - kShift;
    const float base_high = (new_high == -infinity() ? 0.0f : new_high) - kShift;
    float sum_low = 0.0f, sum_high = 0.0f;
    // Past it, no warp reads the rotary columns of the tile.
    own_barrier<kHalf>();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float a = exp2_fast(s[4 * j] - base_low), b = exp2_fast(s[4 * j + 1] - base_low);
      const float c = exp2_fast(s[4 * j + 2] - base_high), d = exp2_fast(s[4 * j + 3] - base_high);
      sum_low += a + b;
      sum_high += c + d;
      // Rows 8 apart have the same swizzle.
      uint8_t* target = own_p + tile_offset(row, j) + quad * 4;
      *reinterpret_cast<uint32_t*>(target) = pack_bf16(a, b);
      *reinterpret_cast<uint32_t*>(target + 8 * 128) = pack_bf16(c, d);
    }
    fence_async_proxy();
    warp_arrive(smem_address(&shared.probabilities[kHalf]));
    if (kHalf == 1) values_added(0);
    raise_maxima(state, o, new_low, new_high);
    state.sum_low += sum_low;
    state.sum_high += sum_high;
    mbarrier_wait(smem_address(&shared.probabilities[kHalf]), parity);
    add_values(kHalf);
    if (kHalf == 0) {
      values_added(0);
      mbarrier_wait(smem_address(&shared.probabilities[1]), parity);
      raise_maxima(state, o, shared.exchange[1][row], shared.exchange[1][row + 8]);
      add_values(1);
    }
    values_added(1);
  }

  float sum_low = state.sum_low, sum_high = state.sum_high;
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
  const float log_sum[2] = {sum_low > 0.0f ? (state.max_low + log2f(sum_low) - kShift) * kLn2 : -infinity(),
                            sum_high > 0.0f ? (state.max_high + log2f(sum_high) - kShift) * kLn2 : -infinity()};
  if (kHalf == 0 && quad == 0) {
    if (row < p.rows) p.lse[first_row + row] = log_sum[0];
    if (row + 8 < p.rows) p.lse[first_row + row + 8] = log_sum[1];
  }
  // Through the place of the queries, which nothing reads any more, so that whole rows are written.
  constexpr int kPitch = 512 + 16;
  uint8_t* staged = smem_q + kHalf * 64 * kPitch;
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    uint8_t* values = staged + (row + 8 * upper) * kPitch + quad * 4;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float a = o[4 * j + 2 * upper] * inverse[upper];
      const float b = o[4 * j + 2 * upper + 1] * inverse[upper];
      *reinterpret_cast<uint32_t*>(values + j * 16) = pack_bf16(a, b);
    }
  }
  __syncwarp();
  const int first = row - lane / 4;
  uint8_t* target = p.out + (first_row + first) * 1024 + kHalf * 512 + lane * 16;
#pragma unroll 8
  for (int i = 0; i < 16; ++i)
    if (first + i < p.rows)
      *reinterpret_cast<uint4*>(target + i * 1024) =
          *reinterpret_cast<const uint4*>(staged + (first + i) * kPitch + lane * 16);
}

// A block takes every gridDim.x-th of groups * splits items. Group g holds query rows [g * rows_per_group, ...) of [num_tokens * num_heads];
// lists holds list_stride slots a group, counts (or null: list_stride) how many are in use, members (or
// null: everyone) one byte an entry whose bit i says that token i of the group selected it.
extern "C" __global__ void __launch_bounds__(384, 1)
    sparse_mla_kernel(const uint8_t* __restrict__ q, const uint8_t* __restrict__ cache,
                      const int* __restrict__ lists, const int* __restrict__ counts,
                      const uint8_t* __restrict__ members, uint8_t* __restrict__ out,
                      float* __restrict__ lse, int rows_per_group, int num_heads, int list_stride,
                      int total_rows, int splits, float scale_log2) {
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ __align__(16) Shared shared;
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    for (int tile = 0; tile < 2; ++tile) {
      mbarrier_init(smem_address(&shared.full[tile]), 128);
      mbarrier_init(smem_address(&shared.probabilities[tile]), 4);
      mbarrier_init(smem_address(&shared.empty[tile][0]), 4);
      mbarrier_init(smem_address(&shared.empty[tile][1]), 4);
    }
  }
  __syncthreads();
  wait_for_previous_kernel();
  const int items = total_rows / rows_per_group * splits;
  const Launch p{q,   cache,          lists,     counts,      members,    out,    lse,
                 rows_per_group, num_heads, list_stride, total_rows, splits, items, scale_log2};
  uint8_t* smem_k = smem + kTileBytes;
  int parity = 0;
  if (threadIdx.x < 128) {
    register_decrease<72>();
    gather(p, shared, smem_address(smem_k));
  } else if (threadIdx.x < 256) {
    register_increase<216>();
    for (int index = blockIdx.x; index < items; index += gridDim.x)
      attend<0>(p, item_at(p, index), parity, shared, smem, smem_k);
  } else {
    register_increase<216>();
    for (int index = blockIdx.x; index < items; index += gridDim.x)
      attend<1>(p, item_at(p, index), parity, shared, smem, smem_k);
  }
}
