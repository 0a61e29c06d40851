"""The rounding of second moments: which formats are taken, which are refused, and what is said of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from support.plugins import FormatPlugin
from torch import nn
from torch.optim import AdamW

from lpq import registry
from lpq.cli.new_plugin import rendered
from lpq.core import Quantizer
from lpq.optim import QuantizedStates
from lpq.registry.errors import OptionError


def _matrix() -> nn.Parameter:
    return nn.Parameter(torch.zeros(64, 128))


# ---------------------------------------------------------------------------------- a format of a plugin's author


@pytest.fixture
def int8(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Quantizer]]:
    """The format that ``lpq new-plugin`` writes."""
    written: Any = ModuleType("written_int8")
    monkeypatch.setitem(sys.modules, written.__name__, written)
    exec(rendered("int8")["lpq_int8/format.py"], vars(written))
    registry.register(FormatPlugin("int8", written.Int8Quantizer, written.Int8Storage), name="int8")
    yield written.Int8Quantizer
    registry.refresh()


def test_the_format_that_new_plugin_writes_stores_second_moments(int8: type[Quantizer]) -> None:
    p = _matrix()
    optimizer = QuantizedStates(AdamW([p]), exp_avg_sq=int8())
    p.grad = torch.full_like(p, 1e-3).index_fill(1, torch.tensor(0), 1.0)
    optimizer.step()
    root = optimizer.state[p]["exp_avg_sq_root"].dequantize()
    assert bool((root > 0).all()), "the least are raised, where INT8 would store zero"


def test_one_that_declares_no_amax_is_refused_with_the_remedy(
    int8: type[Quantizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "stats", tuple(replace(stat, largest=False) for stat in int8.stats))
    remedy = r"loses small elements .*declares no amax .* declare that statistic so, Stat\(…, largest=True\)"
    with pytest.raises(OptionError, match=remedy):
        QuantizedStates(AdamW([_matrix()]), exp_avg_sq=int8())
    QuantizedStates(AdamW([_matrix()]), exp_avg=int8())
