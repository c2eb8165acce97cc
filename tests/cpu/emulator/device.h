// A thread block on the CPU: enough of CUDA and of kernels_native/include to run the mma.sync kernels' own source.
//
// Threads are fibers. A warp runs until it waits for other warps, and on a coin's fall now and then; who goes on is
// random. So warps are as far apart as the barriers let them be, and a missing one shows. Shared memory starts as NaN.
// A wait that never ends, a misaligned tile and an arrival too many abort.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static  // blocks run one after another
#define ATTN_INFINITY INFINITY

using std::max;
using std::min;

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __logf(float x) { return logf(x); }

constexpr int kMostThreads = 256;
extern unsigned char shared[];  // dynamic shared memory
struct Index {
  int x;
};
extern Index threadIdx, blockIdx;

struct Barrier {
  int arrived = 0, generation = 0;
};
extern Barrier warp_barriers[kMostThreads / 32], block_barriers[16];
extern int block_threads;
extern unsigned posted[kMostThreads][8];  // what each thread shows the others of its warp

void give_way(bool to_another_warp);
[[noreturn]] void fail(const char* what);

inline void meet(Barrier& barrier, int threads) {
  const int generation = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  for (long turns = 0; barrier.generation == generation; ++turns) {
    if (turns > 10000000) fail("a barrier that not all threads reach");
    give_way(threads > 32);
  }
}
inline void __syncwarp() { meet(warp_barriers[threadIdx.x / 32], 32); }
inline void __syncthreads() { meet(block_barriers[0], block_threads); }
inline void __threadfence() {}

inline float __shfl_xor_sync(unsigned, float x, int lanes) {
  memcpy(posted[threadIdx.x], &x, 4);
  __syncwarp();
  float y;
  memcpy(&y, posted[threadIdx.x ^ lanes], 4);
  __syncwarp();
  return y;
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  posted[threadIdx.x][0] = vote;
  __syncwarp();
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i) votes |= posted[threadIdx.x / 32 * 32 + i][0] << i;
  __syncwarp();
  return votes;
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }

namespace attn {

using u32 = unsigned;
using u64 = unsigned long long;
constexpr float kLn2 = 0.693147180559945f, kLog2e = 1.44269504088896341f;

inline u32 smem_address(const void* p) { return static_cast<u32>((intptr_t)p - (intptr_t)shared); }
inline unsigned char* shared_at(u32 address) { return shared + static_cast<int>(address); }

struct Transactions {
  int arrivals, missing;
  long bytes;
  int phase;
};
extern std::map<u32, Transactions> mbarriers;

inline void settle(Transactions& b) {
  if (b.missing < 0) fail("an arrival too many");
  if (b.missing == 0 && b.bytes == 0) {
    ++b.phase;
    b.missing = b.arrivals;
  }
}
inline void mbarrier_init(u32 barrier, u32 arrivals) { mbarriers[barrier] = {(int)arrivals, (int)arrivals, 0, 0}; }
constexpr u32 kWarpArrivals = 1;
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(u32 barrier) {
  Transactions& b = mbarriers.at(barrier);
  --b.missing;
  settle(b);
}
inline void mbarrier_expect(u32 barrier, u32 bytes) {
  Transactions& b = mbarriers.at(barrier);
  b.bytes += bytes;
  --b.missing;
  settle(b);
}
inline void complete(u32 barrier, u32 bytes) {
  Transactions& b = mbarriers.at(barrier);
  b.bytes -= bytes;
  settle(b);
}
inline void mbarrier_wait(u32 barrier, u32 parity) {
  Transactions& b = mbarriers.at(barrier);
  for (long turns = 0; (b.phase & 1) == (int)parity; ++turns) {
    if (turns > 10000000) fail("an mbarrier whose phase never ends");
    give_way(true);
  }
}
inline void named_barrier_sync(int id, int threads) { meet(block_barriers[id], threads); }

// What the test puts in place of the driver's tensor map.
struct alignas(64) TensorMap {
  const uint16_t* address;
  uint64_t shape[4], strides[3];  // bytes
  uint32_t box[4];
  unsigned char unused[48];
};
inline u32 swizzled(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
inline void tma_load_4d(u32 destination, const TensorMap& map, u32 barrier, int c0, int c1, int c2, int c3) {
  if (destination % 1024) fail("a tile that is not aligned to 1,024 bytes");
  for (u32 row = 0; row < map.box[1]; ++row)
    for (u32 column = 0; column < 64; ++column) {
      const long at[4] = {c0 + (long)column, c1 + (long)row, c2, c3};
      bool inside = true;
      long offset = 2 * at[0];
      for (int i = 0; i < 4; ++i) {
        inside = inside && at[i] >= 0 && at[i] < (long)map.shape[i];
        if (i > 0) offset += at[i] * (long)map.strides[i - 1];
      }
      uint16_t value = 0;
      if (inside) memcpy(&value, (const char*)map.address + offset, 2);
      memcpy(shared_at(destination + swizzled(row, column / 8) + column % 8 * 2), &value, 2);
    }
  complete(barrier, map.box[1] * 128);
}
inline void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
  if ((intptr_t)source % 16 || destination % 16 || bytes % 16) fail("a bulk copy that is not aligned to 16 bytes");
  memcpy(shared_at(destination), source, bytes);
  complete(barrier, bytes);
}

// Matrix i's row r is at the address that lane 8 i + r gives.
inline void load_matrices(u32 (&r)[4], u32 address, bool transposed) {
  if (address % 16) fail("an ldmatrix row that is not aligned to 16 bytes");
  posted[threadIdx.x][0] = address;
  __syncwarp();
  const int warp = threadIdx.x / 32 * 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int j = 0; j < 2; ++j) {
      const int row = transposed ? 2 * t + j : g, column = transposed ? g : 2 * t + j;
      memcpy(&pair[j], shared_at(posted[warp + 8 * i + row][0] + 2 * column), 2);
    }
    r[i] = pair[0] | (u32)pair[1] << 16;
  }
  __syncwarp();
}
inline void ldmatrix(u32 (&r)[4], u32 address) { load_matrices(r, address, false); }
inline void ldmatrix_transposed(u32 (&r)[4], u32 address) { load_matrices(r, address, true); }
inline void stmatrix(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  posted[threadIdx.x][0] = address;
  __syncwarp();
  const int warp = threadIdx.x / 32 * 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const u32 r[4] = {r0, r1, r2, r3};
  for (int i = 0; i < 4; ++i) memcpy(shared_at(posted[warp + 8 * i + g][0] + 4 * t), &r[i], 4);
  __syncwarp();
}

inline float from_bf16(u32 bits) {
  bits <<= 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline u32 to_bf16(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack2(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline float2 unpack2(u32 packed) { return {from_bf16(packed & 0xffff), from_bf16(packed >> 16)}; }

inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  unsigned* mine = posted[threadIdx.x];
  for (int i = 0; i < 4; ++i) mine[i] = a[i];
  mine[4] = b0;
  mine[5] = b1;
  __syncwarp();
  const int warp = threadIdx.x / 32 * 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int e = 0; e < 4; ++e) {
    const int row = g + e / 2 * 8, column = 2 * t + e % 2;
    for (int k = 0; k < 16; ++k) {
      const u32 left = posted[warp + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const u32 right = posted[warp + column * 4 + k % 8 / 2][4 + k / 8];
      c[e] += from_bf16(left >> 16 * (k % 2) & 0xffff) * from_bf16(right >> 16 * (k % 2) & 0xffff);
    }
  }
  __syncwarp();
}
inline u32 rows_then_columns(u32 tile, int lane) { return tile + swizzled(lane & 15, lane >> 4); }
inline u32 columns_then_rows(u32 tile, int lane) {
  return tile + swizzled((lane & 7) + (lane >> 4 << 3), lane >> 3 & 1);
}

template <int ROWS, int PANELS>
void zero_rows(u32 tile, int first, int thread, int threads) {
  for (int panel = 0; panel < PANELS; ++panel)
    for (int i = first * 8 + thread; i < ROWS * 8; i += threads)
      memset(shared_at(tile + (panel * ROWS * 8 + i) * 16), 0, 16);
}
inline float exp2_mufu(float x) { return exp2f(x); }
inline uint4 load_shared_16(u32 address) {
  uint4 x;
  memcpy(&x, shared_at(address), 16);
  return x;
}
inline void add_global(float* address, const float (&x)[4]) {
  for (int i = 0; i < 4; ++i) address[i] += x[i];
}
inline int load_acquire(const int* address) {
  give_way(true);
  return *address;
}
inline void store_release(int* address, int x) { *address = x; }

}  // namespace attn
