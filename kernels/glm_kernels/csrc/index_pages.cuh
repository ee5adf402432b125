// Pages of the index cache on their way into shared memory: bulk copies that one thread of a warpgroup starts
// and a barrier a page announces. Needs NUM_HEADS, NEXT_N, GROUPS, TOKENS, WARPGROUPS and STAGES.
#pragma once

constexpr int kThreads = 128 * WARPGROUPS;
constexpr int kColumns = TOKENS * NUM_HEADS;  // of a group of tokens
constexpr int kStaged = 48;  // keys a token that a warp holds back: 16 of one page, and 32
constexpr int kKeyBytes = 64 * 128;
constexpr int kPageBytes = 64 * 132;
// How many pages back the products are surely done when the next page is waited for.
constexpr int kLag = GROUPS == 1 ? 1 : 2;
constexpr int kPrefetched = 8;  // pages of a warpgroup's share that are fetched to the L2 cache in advance

// For whole warps: the exchange tells the compiler that they agree on it.
__device__ __forceinline__ int warpgroup() {
  return WARPGROUPS == 1 ? 0 : __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
}
__device__ __forceinline__ void sync_warpgroup() {
  asm volatile("bar.sync %0, 128;\n" ::"r"(1 + warpgroup()) : "memory");
}

struct Smem {
  uint8_t* keys;     // [STAGES][64][128] of this warpgroup, 128-byte swizzle
  uint8_t* q;        // [GROUPS * kColumns][128], same
  float* scales;     // [STAGES][64] of this warpgroup
  uint64_t* full;    // [STAGES] barriers of this warpgroup
  uint64_t* staged;  // [4 * WARPGROUPS warps][NEXT_N][kStaged]
  float* factors;    // [GROUPS * kColumns], see head_sum.cuh
};

__device__ __forceinline__ Smem smem_layout() {
  extern __shared__ __align__(1024) uint8_t smem_raw[];
  uint8_t* q = smem_raw + WARPGROUPS * STAGES * kKeyBytes;
  float* scales = reinterpret_cast<float*>(q + GROUPS * kColumns * 128);
  uint64_t* full = reinterpret_cast<uint64_t*>(scales + WARPGROUPS * STAGES * 64);
  uint64_t* staged = full + WARPGROUPS * STAGES;
  float* factors = reinterpret_cast<float*>(staged + 4 * WARPGROUPS * NEXT_N * kStaged);
  const int own = warpgroup() * STAGES;
  return {smem_raw + own * kKeyBytes, q, scales + own * 64, full + own, staged, factors};
}

// The driver's description of the cache's codes, [pages][64][128].
struct alignas(64) TensorMap {
  uint8_t bytes[128];
};

// Pages of one launch: every step-th page of a request, count of them at most.
struct Pages {
  int step;
  int count;
  __device__ __forceinline__ int of(int length) const {
    const int pages = length <= 0 ? 0 : (length + 63) >> 6;
    const int taken = (pages + step - 1) / step;
    return taken < count ? taken : count;
  }
};

// Of a launch's pages [from, to) of a request, every WARPGROUPS-th is a warpgroup's.
class Pipeline {
 public:
  int first, count;  // page first + j * WARPGROUPS, for j below count
  int step;
  uint32_t stage;  // of the page that was made ready last

  __device__ __forceinline__ Pipeline(const TensorMap& codes, const uint8_t* cache, const Smem& smem)
      : stage(STAGES - 1), codes_(&codes), cache_(cache), phase_(1) {
    if (threadIdx.x % 128 == 0) {
      for (int i = 0; i < STAGES; ++i) mbarrier_init(smem_address(smem.full + i), 1);
      fence_async_proxy();
    }
  }

  // Starts the first copies. Every page of the request before has been made ready and its products are done.
  __device__ __forceinline__ void start(const Smem& smem, const int* table, int from, int to, int every) {
    table_ = table;
    step = every;
    first = from + warpgroup();
    count = (to - first + WARPGROUPS - 1) / WARPGROUPS;
    if (threadIdx.x % 128 == 0) {
      int numbers[STAGES];
#pragma unroll
      for (int j = 0; j < STAGES; ++j) numbers[j] = number(j);
      ahead_ = number(STAGES);
#pragma unroll
      for (int j = 0; j < STAGES; ++j) {
        const uint32_t place = stage + 1 + j;
        if (j < count) copy(smem, numbers[j], place < STAGES ? place : place - STAGES);
      }
    }
  }

  // Waits for page j, and lets another page take the place of page j - kLag.
  __device__ __forceinline__ void ready(const Smem& smem, int j) {
    if (j >= kLag) {
      sync_warpgroup();
      if (threadIdx.x % 128 == 0 && j - kLag + STAGES < count) {
        copy(smem, ahead_, kLag == 1 ? stage : stage == 0 ? STAGES - 1 : stage - 1);
        ahead_ = number(j - kLag + STAGES + 1);
      }
    }
    if (++stage == STAGES) stage = 0, phase_ ^= 1;
    mbarrier_wait(smem_address(smem.full) + stage * 8, phase_);
  }

 private:
  __device__ __forceinline__ int number(int j) const {
    return j < count ? table_[(first + j * WARPGROUPS) * step] : 0;
  }

  __device__ __forceinline__ void copy(const Smem& smem, int page, uint32_t place) const {
    const uint32_t full = smem_address(smem.full) + place * 8;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(full), "n"(kPageBytes) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %3}], "
        "[%4];\n" ::"r"(smem_address(smem.keys) + place * kKeyBytes),
        "l"(codes_), "r"(0), "r"(page), "r"(full)
        : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];\n" ::"r"(
            smem_address(smem.scales) + place * 256),
        "l"(cache_ + static_cast<int64_t>(page) * kPageBytes + kKeyBytes), "r"(full)
        : "memory");
  }

  const TensorMap* codes_;
  const uint8_t* cache_;
  const int* table_;
  int ahead_;  // number of the next copy's page, read an iteration before it starts
  uint32_t phase_;
};

// Read past the L1 cache, for what another kernel changes while this one may run. Zero where take is false.
__device__ __forceinline__ int load_relaxed(const int* pointer, bool take) {
  int value;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.relaxed.gpu.global.s32 %0, [%1];\n}\n"
      : "=r"(value)
      : "l"(pointer), "r"(static_cast<int>(take))
      : "memory");
  return value;
}

// Brings the first pages of each warpgroup's share to the L2 cache while the kernel before this one still
// runs. Lengths and table may be about to change: what is read here decides only what is fetched, every
// number is checked, and the L1 cache keeps none. Predicated, so that the compiler sees the warps stay whole.
__device__ __forceinline__ void prefetch_share(const uint8_t* cache, int num_pages,
                                               const int* cache_seqlens, const int* block_table, int batch_size,
                                               int table_stride, Pages pages) {
  const int lane = threadIdx.x % 32;
  const int count = pages.of(load_relaxed(cache_seqlens + lane, lane < batch_size));
  int upto = count;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFF, upto, distance);
    upto += lane >= distance ? other : 0;
  }
  const int64_t total = __shfl_sync(0xFFFFFFFF, upto, 31);
  const int64_t begin = total * blockIdx.x / gridDim.x;
  // The request that the share begins in. Where there are more than 32, nothing is fetched.
  const uint32_t reached = __ballot_sync(0xFFFFFFFF, batch_size <= 32 && upto > begin);
  const int request = reached ? __ffs(reached) - 1 : 0;
  const int taken = __shfl_sync(0xFFFFFFFF, count, request);
  const int before = __shfl_sync(0xFFFFFFFF, upto, request) - taken;
  const int64_t at = begin - before + warpgroup() + lane * WARPGROUPS;
  const bool some = reached && threadIdx.x % 128 < kPrefetched && at < taken;
  const int page = load_relaxed(block_table + static_cast<int64_t>(request) * table_stride + at * pages.step, some);
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p cp.async.bulk.prefetch.L2.global [%0], %1;\n}\n" ::"l"(
          cache + static_cast<int64_t>(page) * kPageBytes),
      "n"(kPageBytes), "r"(static_cast<int>(some && page >= 0 && page < num_pages))
      : "memory");
}
