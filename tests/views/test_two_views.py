"""The two views that decide every other question, as their people would write them: a user's and a format author's."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch
from support.small_models import Mlp
from torch import nn

import lpq
from lpq import registry

AUTHOR = {
    "lpq_int8/__init__.py": """
        from lpq.registry import FormatSpec, hookimpl

        @hookimpl
        def lpq_register_formats():
            return FormatSpec(name="int8", summary="symmetric INT8, one scale per row",
                              quantizer="lpq_int8.format:Int8Quantizer", storage="lpq_int8.format:Int8Storage",
                              effective_bits=8)
    """,
    "lpq_int8/format.py": """
        from dataclasses import dataclass

        import torch
        from lpq.core import Buffer, Quantizer, Stat, Storage

        class Int8Storage(Storage):
            layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(1, None)))

            def decode(self):
                return self.data.float() * self.scale

        @dataclass(frozen=True)
        class Int8Quantizer(Quantizer):
            stats = (Stat("amax", block=(1, None), largest=True),)

            def measure(self, x):
                return {"amax": x.abs().amax(dim=1, keepdim=True).float()}

            def encode(self, x, stats):
                scale = stats["amax"].clamp(min=1e-30) / 127
                return Int8Storage(data=(x / scale).round().to(torch.int8), scale=scale)
    """,
    "lpq_int8-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: lpq-int8\nVersion: 1.0\n",
    "lpq_int8-1.0.dist-info/entry_points.txt": "[lpq.plugins]\nint8 = lpq_int8\n",
}


@pytest.fixture
def int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, text in AUTHOR.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    registry.refresh()
    yield "int8"
    for name in [m for m in sys.modules if m.startswith("lpq_int8")]:
        del sys.modules[name]
    monkeypatch.undo()
    registry.refresh()


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Mlp(), Mlp())


def train(model: nn.Module, steps: int = 20) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 64, generator=generator)
    losses = []
    for _ in range(steps):
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", ["fprop=mxfp8, dgrad=nvfp4, wgrad=bf16", "nvfp4", "fp8-delayed", "bf16"])
def test_the_users_view(recipe: str) -> None:
    model = blocks()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    weights = [id(p) for p in model.parameters()]
    converted = lpq.convert(model, recipe)
    assert converted is model
    assert [id(p) for p in model.parameters()] == weights
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    assert isinstance(model[0].up, lpq.nn.Linear)
    losses = train(model)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    "recipe", ["int8", "fprop=int8, dgrad=nvfp4, wgrad=bf16", "fprop=mxfp8, dgrad=int8, wgrad=int8"]
)
def test_the_authors_view(int8: str, recipe: str) -> None:
    losses = train(lpq.convert(blocks(), recipe))
    assert losses[-1] < 0.8 * losses[0]


def test_the_authors_format_is_a_tensor(int8: str) -> None:
    x = torch.randn(16, 48)
    t = lpq.quantizer("int8").quantize(x)
    assert t.row.buffers()["data"].dtype == torch.int8
    assert t.col.shape == (48, 16)
    assert torch.equal(t[4:8].dequantize(), t.dequantize()[4:8])
    assert torch.equal(t.t().dequantize(), t.col.decode())
    assert (t.dequantize() - x).abs().max() <= x.abs().max() / 127
    assert str(lpq.quantizer("hybrid", row="int8", col="mxfp8").quantize(x).col.quantizer) == "mxfp8"
