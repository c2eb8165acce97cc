"""CPU tests: Triton kernels run under its interpreter, which must be chosen before triton is imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.pop("COLUMNS", None)  # xdist sets it; tables would fit into it as into a terminal
