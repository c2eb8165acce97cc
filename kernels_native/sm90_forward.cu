// FlashAttention forward for sm_90a: TMA loads by one producer warp, wgmma by two or three consumer warpgroups.
//
// Persistent thread blocks take query tiles of 64 rows a warpgroup and walk their keys from right to left. The next
// block's scores are issued before this block's P V, so that softmax runs under the tensor cores; P stays in registers.
// Method: FlashAttention-2/3 (arXiv 2307.08691, 2407.08608).
//
// Specialised by macros (sm90_forward.py chooses them):
//   HEAD_DIM, HEAD_DIM_V  multiples of 16; the tensors may be narrower, TMA pads with zeros
//   BLOCK_N               keys a block
//   WARPGROUPS            consumer warpgroups, 64 rows each
//   STAGES, Q_STAGES      buffers of K and of V; of Q (O is staged in the Q buffer it came from)
//   AHEAD                 the next tile's first scores run with this tile's last P V (needs two Q_STAGES)
//   CAUSAL, VARLEN        0 or 1
//   DYNAMIC               tiles are handed out in order instead of dealt to and fro
//   SPLIT                 few queries: the query heads of a group are rows of one tile, the keys are shared out among
//                         thread blocks, and sm90_forward_combine.cu merges what they write
//   PINGPONG              warpgroups take turns at the tensor cores
//   DIAGONAL_HALVES       causal, BLOCK_N and the tile 128, keys - rows a multiple of 128: the first warpgroup sees
//                         only the left half of the tile's last key block and computes only that
//   Q_REGISTERS           Q is held in registers instead of being read from shared memory again and again
//   RESCALE_EARLY         O is rescaled before P V is issued instead of after it is done
//   EXP_FIRST             see keep_order
//   QUICK                 see softmax_step
//
// In reading order: forward_tile.cuh (what a tile is and which keys it needs), forward_producer.cuh (who hands out
// tiles and who loads them), forward_products.cuh, forward_consumer.cuh (the loop over keys), forward_epilogue.cuh.
#include "forward_consumer.cuh"
#include "forward_producer.cuh"

using namespace attn;

constexpr int kProducerRegisters = WARPGROUPS == 3 ? 32 : 24;
constexpr int kConsumerRegisters = WARPGROUPS == 3 ? 160 : 240;

extern "C" __global__ void __launch_bounds__(kThreads, 1) sm90_forward(const __grid_constant__ Params p) {
  extern __shared__ unsigned char dynamic_smem[];
  const u32 start = smem_address(dynamic_smem);
  const u32 q_smem = (start + 1023) & ~1023u;
  const u32 k_smem = q_smem + Q_STAGES * kQBytes;
  const u32 v_smem = k_smem + STAGES * kKBytes;
  Control& control = *reinterpret_cast<Control*>(dynamic_smem + (v_smem + STAGES * kVBytes - start));

  if (threadIdx.x == 0) {
    tma_prefetch(p.q);
    tma_prefetch(p.k);
    tma_prefetch(p.v);
    tma_prefetch(p.o);
    mbarrier_init(smem_address(&control.next_full), 1);
    mbarrier_init(smem_address(&control.next_empty), 1);
    for (int i = 0; i < Q_STAGES; ++i) {
      mbarrier_init(smem_address(&control.q_full[i]), 1);
      mbarrier_init(smem_address(&control.q_empty[i]), WARPGROUPS);
    }
    constexpr int kReaders = 4 * WARPGROUPS * kWarpArrivals;
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(smem_address(&control.k_full[i]), 1);
      mbarrier_init(smem_address(&control.v_full[i]), 1);
      mbarrier_init(smem_address(&control.k_empty[i]), kReaders);
      mbarrier_init(smem_address(&control.v_empty[i]), kReaders);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  // Shuffled, so that the compiler knows it to be alike across the warp.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    registers_shrink<kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 1) schedule(p, control);
    if (threadIdx.x == 0) produce(p, control, q_smem, k_smem, v_smem);
  } else {
    registers_grow<kConsumerRegisters>();
#if DIAGONAL_HALVES
    if (warpgroup == 1) {
      consume<Yes>(p, control, 0, q_smem, k_smem, v_smem);
    } else {
      consume<No>(p, control, 1, q_smem, k_smem, v_smem);
    }
#else
    consume<No>(p, control, warpgroup - 1, q_smem, k_smem, v_smem);
#endif
  }
}
