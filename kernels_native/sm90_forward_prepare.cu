// The schedule of packed sequences for sm90_forward.cu. BLOCK_M, a macro, is the rows of a tile.
struct PrepareParams {
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  int* tile_offsets;
  int batch;
  int tokens;
};

constexpr int kBuckets = 128;

// Sequences with more keys have lower buckets; within one, lengths differ by a quarter at most.
__device__ __forceinline__ int bucket_of(int keys) {
  if (keys < 4) return kBuckets - 1 - max(keys, 0);
  const int exponent = 31 - __clz(keys);
  return kBuckets - 1 - (4 * (exponent - 1) + (keys >> (exponent - 2) & 3));
}

// Writes p.tile_offsets: the row tiles before each place of the order of work, [batch + 2], then which sequence has
// that place, [batch + 1]. Sequences with the most keys come first, since their tiles take longest; the tokens beyond
// the last sequence count as one more sequence, in the last place. One block of 1,024 threads, each with a run of
// neighbours.
extern "C" __global__ void __launch_bounds__(1024, 1) sm90_forward_prepare(const __grid_constant__ PrepareParams p) {
  __shared__ int warp_totals[32];
  __shared__ int places[kBuckets];  // sequences of each bucket; then the first free place of each
  int* const order = p.tile_offsets + p.batch + 2;
  const int lane = threadIdx.x & 31;
  const int run = (p.batch + 1 + 1023) / 1024;
  const int first = min(static_cast<int>(threadIdx.x) * run, p.batch + 1);
  const int last = min(first + run, p.batch + 1);
  const auto sum_before = [&](int x) {  // inclusive, across the warp
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, x, d);
      if (lane >= d) x += other;
    }
    return x;
  };
  // Neighbours of one bucket take their places together: 80,000 equal sequences cost 1,024 atomics.
  const auto each_bucket = [&](auto use) {
    const int end = min(last, p.batch);
    for (int i = first; i < end;) {
      const int bucket = bucket_of(p.cu_seqlens_k[i + 1] - p.cu_seqlens_k[i]);
      int j = i + 1;
      while (j < end && bucket_of(p.cu_seqlens_k[j + 1] - p.cu_seqlens_k[j]) == bucket) ++j;
      use(bucket, i, j);
      i = j;
    }
  };

  if (threadIdx.x < kBuckets) places[threadIdx.x] = 0;
  __syncthreads();
  each_bucket([&](int bucket, int begin, int end) { atomicAdd(&places[bucket], end - begin); });
  __syncthreads();
  if (threadIdx.x < 32) {
    constexpr int kEach = kBuckets / 32;
    int total = 0;
    for (int i = 0; i < kEach; ++i) total += places[kEach * lane + i];
    int place = sum_before(total) - total;
    for (int i = 0; i < kEach; ++i) {
      const int count = places[kEach * lane + i];
      places[kEach * lane + i] = place;
      place += count;
    }
  }
  __syncthreads();
  each_bucket([&](int bucket, int begin, int end) {
    int place = atomicAdd(&places[bucket], end - begin);
    for (int i = begin; i < end; ++i) order[place++] = i;
  });
  if (threadIdx.x == 0) order[p.batch] = p.batch;
  __syncthreads();

  const auto tiles = [&](int place) {
    const int i = order[place];
    const int length = (i == p.batch ? p.tokens : p.cu_seqlens_q[i + 1]) - p.cu_seqlens_q[i];
    return (max(length, 0) + BLOCK_M - 1) / BLOCK_M;
  };
  int total = 0;
  for (int i = first; i < last; ++i) total += tiles(i);
  const int sum = sum_before(total);
  if (lane == 31) warp_totals[threadIdx.x / 32] = sum;
  __syncthreads();
  int before = sum - total;
  for (int w = 0; w < static_cast<int>(threadIdx.x) / 32; ++w) before += warp_totals[w];
  if (threadIdx.x == 0) p.tile_offsets[0] = 0;
  for (int i = first; i < last; ++i) {
    before += tiles(i);
    p.tile_offsets[i + 1] = before;
  }
}
