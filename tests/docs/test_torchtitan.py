"""The adapter of the page about torchtitan converts its linear layers, and a model before it is sharded."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from snippets import ROOT, blocks
from torch import nn

import lpq
from lpq import registry

HOME = "torchtitan.models.common.linear"


def stand_in() -> types.ModuleType:
    """Make a module with a class of the shape of torchtitan 0.3's: two bases, and a configuration for its sizes."""

    class Module(nn.Module):
        _sharding_config = None

        def init_states(self) -> None:
            self.reset_parameters()

    class Linear(nn.Linear, Module):
        @dataclass(kw_only=True)
        class Config:
            in_features: int
            out_features: int
            bias: bool = False

        def __init__(self, config: Config) -> None:
            super().__init__(config.in_features, config.out_features, bias=config.bias)

    module = types.ModuleType(HOME)
    module.Linear = Linear  # type: ignore[attr-defined]
    return module


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the file of the page beside a stand-in of torchtitan, whose own import takes longer than this test."""
    for end in (10, 17, 24, None):
        name = HOME[:end]
        monkeypatch.setitem(sys.modules, name, stand_in() if end is None else types.ModuleType(name))
    (file,) = [block for block in blocks(ROOT / "docs" / "torchtitan.md") if block.title == "lpq_torchtitan.py"]
    (tmp_path / str(file.title)).write_text(file.code)
    monkeypatch.syspath_prepend(tmp_path)
    import lpq_torchtitan  # type: ignore[import-not-found]

    yield lpq_torchtitan
    del sys.modules["lpq_torchtitan"]
    registry.refresh()


def test_layers_become_layers_of_both_and_multiply_as_lpqs(adapter: Any) -> None:
    linear = adapter.Linear
    config = linear.Config(in_features=64, out_features=32)
    router = type("RouterGateLinear", (linear,), {})
    model = nn.ModuleDict({"up": linear(config), "odd": router(config), "lm_head": linear(config)})
    shards: list[list[str]] = []

    def shard(model: nn.Module, **how: Any) -> nn.Module:
        shards.append([type(m).__name__ for m in model.children()])
        assert how == {"dims": 2}
        return model

    spec = adapter.low_precision(types.SimpleNamespace(parallelize_fn=shard), "mxfp8")
    assert spec.parallelize_fn(model, dims=2) is model
    assert shards == [["TitanLinear", "RouterGateLinear", "Linear"]]
    assert isinstance(model["up"], linear)
    assert [entry.name for entry in lpq.report(model).converted] == ["up"]

    plain = nn.Linear(64, 32, bias=False)
    plain.load_state_dict(model["up"].state_dict())
    lpq.convert(plain, "mxfp8")
    x = torch.randn(32, 64)
    assert torch.equal(model["up"](x), plain(x))
    model["up"].init_states()
    assert not torch.equal(model["up"].weight, plain.weight)
