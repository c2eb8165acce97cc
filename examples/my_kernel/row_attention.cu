// Attention as plainly as CUDA can say it: one warp per query and head, keys one after another, an online softmax.
// q, k, v and out are bf16 with the head dim contiguous; strides count elements.
struct Strides {
  long long batch, row, head;
};

__device__ float to_float(unsigned short bf16) { return __uint_as_float(static_cast<unsigned>(bf16) << 16); }

__device__ unsigned short to_bf16(float x) {
  unsigned short bf16;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bf16) : "f"(x));
  return bf16;
}

// D: head dim, a multiple of 32. Blocks: (ceil(rows / warps), heads, batch).
template <int D>
__global__ void row_attention(const unsigned short* q, const unsigned short* k, const unsigned short* v,
                              unsigned short* out, float* lse, Strides sq, Strides sk, Strides sv, int rows, int keys,
                              int heads, int group, float scale, bool causal) {
  constexpr int EACH = D / 32;
  const int lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const int head = blockIdx.y, batch = blockIdx.z;
  if (row >= rows) return;
  q += batch * sq.batch + row * sq.row + head * sq.head + lane * EACH;
  k += batch * sk.batch + head / group * sk.head + lane * EACH;
  v += batch * sv.batch + head / group * sv.head + lane * EACH;
  float query[EACH], sum[EACH] = {}, highest = -__int_as_float(0x7f800000), total = 0.f;
  for (int i = 0; i < EACH; ++i) query[i] = to_float(q[i]) * scale;

  const int visible = causal ? min(keys, row + 1 + keys - rows) : keys;  // aligned bottom-right
  for (int key = 0; key < visible; ++key) {
    float score = 0.f;
    for (int i = 0; i < EACH; ++i) score += query[i] * to_float(k[key * sk.row + i]);
    for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(0xffffffffu, score, step);
    const float higher = fmaxf(highest, score), shrink = expf(highest - higher), weight = expf(score - higher);
    for (int i = 0; i < EACH; ++i) sum[i] = sum[i] * shrink + weight * to_float(v[key * sv.row + i]);
    total = total * shrink + weight;
    highest = higher;
  }
  const long long at = (static_cast<long long>(batch) * rows + row) * heads + head;
  for (int i = 0; i < EACH; ++i) out[at * D + lane * EACH + i] = to_bf16(visible > 0 ? sum[i] / total : 0.f);
  if (lane == 0) {
    lse[(static_cast<long long>(batch) * heads + head) * rows + row] =
        visible > 0 ? highest + logf(total) : -__int_as_float(0x7f800000);
  }
}
