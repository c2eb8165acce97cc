"""A small stack of layers with block attention residuals, trained a few steps: two phases against the direct formula.

Every layer reads a softmax-weighted sum of what came before it: the completed blocks (the embedding is the first) and
the partial sum of its own block. The direct formula attends to all of them anew for each layer. In two phases, one
batched call per block serves all of its layers' pseudo-queries, and each layer only merges its share with the partial
sum.

    python examples/attnres_stack/train.py                    # on a GPU: our Triton kernels; on a CPU: eager PyTorch
    python examples/attnres_stack/train.py --backend triton   # on a CPU: the same kernels under Triton's interpreter
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnbench


class Layer(nn.Module):
    """A feed-forward layer on normalised input, with the pseudo-query that mixes its input."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.query = nn.Parameter(torch.zeros(hidden))  # zeros: training starts from a plain mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.up(self.norm(x))))


def two_phase_block(layers: nn.ModuleList, sources: torch.Tensor, backend: str) -> torch.Tensor:
    """The sum of a block's layer outputs `[rows, D]`, from the completed blocks `[N, rows, D]`."""
    queries = torch.stack([layer.query for layer in layers])
    out, lse = attnbench.attnres_phase1(sources, queries, backend=backend)
    partial_sum = layers[0](out[0])
    for i, layer in enumerate(list(layers)[1:], start=1):
        mixed, _ = attnbench.attnres_phase2(partial_sum, layer.query, out[i], lse[i], backend=backend)
        partial_sum = partial_sum + layer(mixed)
    return partial_sum


def direct_block(layers: nn.ModuleList, sources: torch.Tensor, backend: str) -> torch.Tensor:
    """The same by the definition: each layer attends to all sources, its block's partial sum the last."""
    partial_sum = None
    for layer in layers:
        seen = sources if partial_sum is None else torch.cat([sources, partial_sum[None]])
        keys = nn.functional.rms_norm(seen, seen.shape[-1:], eps=torch.finfo(torch.float32).eps)
        weights = (keys @ layer.query).softmax(0)
        added = layer((weights[..., None] * seen).sum(0))
        partial_sum = added if partial_sum is None else partial_sum + added
    assert partial_sum is not None
    return partial_sum


class Stack(nn.Module):
    """Blocks of layers over an embedding; each block is recomputed in the backward."""

    def __init__(self, vocabulary: int, hidden: int, blocks: int, layers: int, block: Callable, backend: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(nn.ModuleList(Layer(hidden) for _ in range(layers)) for _ in range(blocks))
        self.head = nn.Linear(hidden, vocabulary)
        self.block, self.backend = block, backend

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs = [self.embedding(tokens)]
        for layers in self.blocks:
            outputs.append(checkpoint(self.block, layers, torch.stack(outputs), self.backend, use_reentrant=False))
        return self.head(sum(outputs))


def train(block: Callable, backend: str, device: str, steps: int, rows: int, hidden: int) -> list[float]:
    """Losses of a few steps on a fixed next-token task; equal seeds, so that two formulas can be compared."""
    torch.manual_seed(0)
    model = Stack(17, hidden, blocks=3, layers=4, block=block, backend=backend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(17, (rows,), generator=torch.Generator().manual_seed(1)).to(device)
    targets = (5 * tokens + 3) % 17
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(arguments: list[str] | None = None) -> float:
    """Train both, print their losses, and return the largest relative difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", default="auto", help="of attnbench.attnres_phase1 and _phase2 (default: auto)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=96)
    given = parser.parse_args(arguments)
    if given.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is first loaded
    sizes = (given.device, given.steps, given.rows, given.hidden)
    two_phase = train(two_phase_block, given.backend, *sizes)
    direct = train(direct_block, given.backend, *sizes)
    print(f"{'step':>4}  {'two-phase':>10}  {'direct':>10}")
    for step, (a, b) in enumerate(zip(two_phase, direct, strict=True)):
        print(f"{step:>4}  {a:>10.6f}  {b:>10.6f}")
    apart = max(abs(a - b) / abs(b) for a, b in zip(two_phase, direct, strict=True))
    print(f"largest relative difference {apart:.1e}")
    return apart


if __name__ == "__main__":
    raise SystemExit(0 if main() < 1e-3 else 1)
