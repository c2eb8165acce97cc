"""The example stack: two phases and the direct formula train alike."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

TRAIN = Path(__file__).parents[2] / "examples" / "attnres_stack" / "train.py"


@pytest.mark.parametrize("sizes", [["--backend", "auto"], ["--backend", "triton", "--rows", "4", "--hidden", "16"]])
def test_losses_agree(sizes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(TRAIN))["main"]
    assert main([*sizes, "--steps", "3", "--device", "cpu"]) < 1e-4
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()[1:4]]
    assert losses[0] > losses[1] > losses[2]
