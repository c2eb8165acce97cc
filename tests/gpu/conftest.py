"""Everything below tests/gpu needs a CUDA device; without one it is skipped, and a skipped test is not a passed one."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            item.add_marker(skip)
        return
    if torch.cuda.get_device_capability()[0] != 9:
        skip = pytest.mark.skip(reason="needs a Hopper GPU (compute capability 9.x)")
        for item in items:
            if "sm90" in item.keywords:
                item.add_marker(skip)
