// The schedule of packed sequences for sm90_forward.cu. BLOCK_M, a macro, is the rows of a tile.
struct PrepareParams {
  const int* cu_seqlens_q;
  int* tile_offsets;
  int batch;
  int tokens;
};

// Row tiles before each packed sequence; entry `batch` counts the tokens beyond the last sequence as one more. One
// block of 1,024 threads, each with a run of neighbouring sequences.
extern "C" __global__ void __launch_bounds__(1024, 1) sm90_forward_prepare(const __grid_constant__ PrepareParams p) {
  __shared__ int warp_totals[32];
  const int run = (p.batch + 1 + 1023) / 1024;
  const int first = threadIdx.x * run;
  const int last = min(first + run, p.batch + 1);
  const auto tiles = [&](int i) {
    const int length = (i == p.batch ? p.tokens : p.cu_seqlens_q[i + 1]) - p.cu_seqlens_q[i];
    return (max(length, 0) + BLOCK_M - 1) / BLOCK_M;
  };
  int total = 0;
  for (int i = first; i < last; ++i) total += tiles(i);
  int sum = total;
  const int lane = threadIdx.x & 31;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += other;
  }
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
