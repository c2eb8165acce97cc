// Merges the splits of sm90_forward.cu (SPLIT): one warp a row, out = sum of exp(lse_s - lse) out_s.
#include "arithmetic.cuh"

using namespace attn;

struct CombineParams {
  const float* partial_out;  // [splits, batch, heads, rows, head_dim_v]
  const float* partial_lse;  // [splits, batch, heads, rows]
  unsigned* out;             // [batch, rows, heads, head_dim_v] in pairs of 16-bit values
  float* lse;                // [batch, heads, rows]
  long long total;           // batch * heads * rows
  int heads;
  int rows;
  int head_dim_v;
  int splits;
};

extern "C" __global__ void __launch_bounds__(256) sm90_forward_combine(const __grid_constant__ CombineParams p) {
  const int lane = threadIdx.x & 31;
  const long long n = blockIdx.x * 8ll + threadIdx.x / 32;
  if (n >= p.total) return;
  float high = -ATTN_INFINITY;
  for (int s = 0; s < p.splits; ++s) high = fmaxf(high, p.partial_lse[s * p.total + n]);
  float sum = 0.f;
  // A split that saw no key wrote no output; NaN is neither below nor above, and stays.
  for (int s = 0; s < p.splits; ++s) {
    const float lse = p.partial_lse[s * p.total + n];
    if (lse != -ATTN_INFINITY) sum += __expf(lse - high);
  }
  const long long row = n % p.rows, head = n / p.rows % p.heads, batch = n / p.rows / p.heads;
  const int pairs = p.head_dim_v / 2;
  unsigned* out = p.out + ((batch * p.rows + row) * p.heads + head) * pairs;
  for (int c = lane; c < pairs; c += 32) {
    float x = 0.f, y = 0.f;
    for (int s = 0; s < p.splits; ++s) {
      const float lse = p.partial_lse[s * p.total + n];
      if (lse == -ATTN_INFINITY) continue;
      const float weight = __expf(lse - high) / sum;
      const float2 part = reinterpret_cast<const float2*>(p.partial_out)[(s * p.total + n) * pairs + c];
      x += weight * part.x;
      y += weight * part.y;
    }
    out[c] = pack2(x, y);
  }
  if (lane == 0) p.lse[n] = sum == 0.f ? -ATTN_INFINITY : high + __logf(sum);
}
