"""flash-attn-res, where it is installed: both phases of block attention residuals, for bf16 and widths of 2^n."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.backends.attention_call import first_reason
from attnbench.backends.attnres_call import common, eps_of, int32_offsets
from attnbench.backends.base import Prepared
from attnbench.backends.peer import load, missing
from attnbench.ops.base import Inputs
from attnbench.scenario.case import AttnresCase, Case

if TYPE_CHECKING:
    import torch


class FlashAttnRes:
    """The package's operators, called with one batch of all rows. Its phase 2 gives no lse."""

    name = "flash_attn_res"

    def supports(self, case: Case, device: str) -> str | None:
        if not isinstance(case, AttnresCase):
            return "computes attention residuals only"
        wide = max(case.blocks, case.queries, 1)
        return first_reason(
            missing("flash_attn_res", "flash-attn-res"),
            common(case, device),
            f"{case.dtype}: rounds its results to bf16" if case.dtype != "bf16" else None,
            f"width {case.hidden}: wants a power of two" if case.hidden & (case.hidden - 1) else None,
            int32_offsets(wide * case.rows * case.hidden),
        )

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        assert isinstance(case, AttnresCase)
        phase1 = case.phase == 1
        name = "phase_1_batched_attention_triton_op" if phase1 else "phase_2_online_softmax_merge_triton_op"
        function = load("flash_attn_res", name, "flash-attn-res")
        eps = eps_of(case)

        def run(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            if phase1:
                out, lse = function(tensors["values"].unsqueeze(1).contiguous(), tensors["queries"].contiguous(), eps)
                return {"out": out.squeeze(1), "lse": lse.squeeze(1)}
            partial_sum, inter_out, inter_lse = (
                tensors[part].unsqueeze(0).contiguous() for part in ("partial_sum", "inter_out", "inter_lse")
            )
            return {"out": function(partial_sum, tensors["query"].contiguous(), inter_out, inter_lse, eps).squeeze(0)}

        detached = {name: tensor.detach() for name, tensor in inputs.tensors.items()}
        return Prepared(forward=lambda: run(inputs.tensors), kernel_forward=lambda: run(detached), lse_grad=phase1)


FLASH_ATTN_RES = FlashAttnRes()
