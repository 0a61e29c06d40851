"""Models that accelerate offloads compute as others, unless their weights are prepared or stored quantized."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from support.small_models import linears

import lpq

CPU = torch.device("cpu")


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed"])
@pytest.mark.parametrize("to_disk", [False, True])
def test_a_model_without_weights_is_offloaded_and_others_end_in_errors(
    recipe: str, to_disk: bool, tmp_path: Path
) -> None:
    offload: Callable[..., Any] = partial(disk_offload, offload_dir=tmp_path) if to_disk else cpu_offload
    model, x = lpq.convert(linears(64, 64, 64), recipe), torch.randn(8, 64)
    with torch.no_grad():
        expected = model(x)
        offload(model, execution_device=CPU)
        assert all(p.is_meta for p in model.parameters())
        assert torch.equal(model(x), expected)
    for weights in ("high_precision", "quantized"):
        with pytest.raises((TypeError, RuntimeError), match=r"unexpected keyword|required positional|numpy\(\)"):
            offload(lpq.convert(linears(64, 64, 64), recipe, weights=weights), execution_device=CPU)
