"""Shapes of published models by name: `model: llama3-8b` in a case stands for these figures. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ModelName = Literal[
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "mistral-7b",
    "gemma2-9b",
    "qwen3-0.6b",
    "qwen3-8b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "gpt-oss-120b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "kimi-k2",
    "kimi-linear-48b",
    "kimi-k3",
]


@dataclass(frozen=True)
class ModelShape:
    """One model's attention and, where it has block attention residuals, their shape at its last block.

    Models with latent attention (192/128) are given as their training and prefill see them: keys and values expanded,
    a head each. `blocks` counts what phase 1 attends to at the last block, the embedding included; `queries` are the
    block's sublayers, attention and feed-forward apart.
    """

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    source: str
    value_head_dim: int | None = None
    blocks: int | None = None
    queries: int | None = None

    def fields(self, op: str) -> dict[str, Any]:
        """What a case of `op` takes from the model; attention is causal."""
        if op == "attention":
            found = {
                "heads": self.heads,
                "kv_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "value_head_dim": self.value_head_dim,
                "causal": True,
            }
        elif op == "attnres_phase1":
            found = {"hidden": self.hidden, "blocks": self.blocks, "queries": self.queries}
        else:
            found = {"hidden": self.hidden}
        return {name: value for name, value in found.items() if value is not None}


_LLAMA3 = "The Llama 3 Herd of Models, arXiv:2407.21783, table 3"
_QWEN3 = "Qwen3 Technical Report, arXiv:2505.09388, tables 1 and 2; config.json of huggingface.co/Qwen/"

MODELS: dict[str, ModelShape] = {
    "llama3-8b": ModelShape(32, 8, 128, 4096, _LLAMA3),
    "llama3-70b": ModelShape(64, 8, 128, 8192, _LLAMA3),
    "llama3-405b": ModelShape(128, 8, 128, 16384, _LLAMA3),
    "mistral-7b": ModelShape(32, 8, 128, 4096, "Mistral 7B, arXiv:2310.06825, table 1"),
    "gemma2-9b": ModelShape(16, 8, 256, 3584, "Gemma 2, arXiv:2408.00118, table 1"),
    "qwen3-0.6b": ModelShape(16, 8, 128, 1024, f"{_QWEN3}Qwen3-0.6B"),
    "qwen3-8b": ModelShape(32, 8, 128, 4096, f"{_QWEN3}Qwen3-8B"),
    "qwen3-32b": ModelShape(64, 8, 128, 5120, f"{_QWEN3}Qwen3-32B"),
    "qwen3-30b-a3b": ModelShape(32, 4, 128, 2048, f"{_QWEN3}Qwen3-30B-A3B"),
    "qwen3-235b-a22b": ModelShape(64, 4, 128, 4096, f"{_QWEN3}Qwen3-235B-A22B"),
    "gpt-oss-120b": ModelShape(
        64, 8, 64, 2880, "gpt-oss model card, arXiv:2508.10925; config.json of huggingface.co/openai/gpt-oss-120b"
    ),
    "deepseek-v2-lite": ModelShape(
        16,
        16,
        192,
        2048,
        "DeepSeek-V2, arXiv:2405.04434, appendix B; config.json of huggingface.co/deepseek-ai/DeepSeek-V2-Lite",
        value_head_dim=128,
    ),
    "deepseek-v3": ModelShape(
        128, 128, 192, 7168, "DeepSeek-V3 Technical Report, arXiv:2412.19437, section 4.2", value_head_dim=128
    ),
    "kimi-k2": ModelShape(
        64,
        64,
        192,
        7168,
        "Kimi K2, arXiv:2507.20534; config.json of huggingface.co/moonshotai/Kimi-K2-Instruct",
        value_head_dim=128,
    ),
    "kimi-linear-48b": ModelShape(
        32,
        32,
        192,
        2304,
        "config.json of huggingface.co/moonshotai/Kimi-Linear-48B-A3B-Instruct; blocks: Attention Residuals, "
        "arXiv:2603.15031 (6 sublayers a block, 9 blocks and the embedding)",
        value_head_dim=128,
        blocks=9,
        queries=6,
    ),
    "kimi-k3": ModelShape(
        96,
        96,
        192,
        7168,
        "config.json of huggingface.co/moonshotai/Kimi-K3; blocks of 12 layers: github.com/lablup/mlxcel/pull/1741",
        value_head_dim=128,
        blocks=8,
        queries=24,
    ),
}
