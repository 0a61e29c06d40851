"""A checkpoint with a format of somebody's plugin, where that plugin is not installed, is hidden, or is back again."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch
from forking import python
from support.plugins import Install
from torch import nn

import lpq
from lpq import checkpoint, registry
from lpq.checkpoint import CheckpointError, MissingPlugin

PLUGIN = """
    from dataclasses import dataclass

    import torch
    from lpq.core import Buffer, Quantizer, Stat, Storage
    from lpq.registry import FormatSpec, hookimpl


    @hookimpl
    def lpq_register_formats():
        return FormatSpec(name="acme", summary="INT8 with one scale per row", effective_bits=8,
                          quantizer="lpq_acme_plugin:AcmeQuantizer", storage="lpq_acme_plugin:AcmeStorage")


    class AcmeStorage(Storage):
        layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(1, None)))

        def decode(self):
            return self.data.float() * self.scale


    @dataclass(frozen=True)
    class AcmeQuantizer(Quantizer):
        stats = (Stat("amax", block=(1, None)),)

        def measure(self, x):
            return {"amax": x.abs().amax(dim=1, keepdim=True).float()}

        def encode(self, x, stats):
            scale = stats["amax"].clamp(min=1e-30) / 127
            return AcmeStorage(data=(x / scale).round().to(torch.int8), scale=scale)
"""


class Acme:
    """The distribution of the plugin, which can be removed, and put back."""

    def __init__(self, path: Path, install: Install) -> None:
        self.path = str(path)
        install("acme", "1.2", PLUGIN)

    def put_back(self) -> None:
        sys.path.insert(0, self.path)
        registry.refresh()

    def remove(self) -> None:
        sys.path.remove(self.path)
        sys.modules.pop("lpq_acme_plugin", None)
        registry.refresh()


@pytest.fixture
def acme(tmp_path: Path, install: Install) -> Acme:
    return Acme(tmp_path, install)


def stored() -> nn.Module:
    net = nn.Sequential(nn.Linear(32, 64))
    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    text = "hybrid(row=mxfp8, col=acme)"
    net[0].weight = nn.Parameter(lpq.quantizer(text).quantize(values), requires_grad=False)
    return net


WORDS = (
    r"it uses the format acme, which came with plugin acme \(lpq-acme 1\.2\) and is not installed here: "
    r"pip install lpq-acme"
)


def test_it_says_which_plugin_to_install(acme: Acme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(stored(), tmp_path / "stored")
    lpq.export(stored(), tmp_path / "stored.pt", layout="lpq")
    converted = lpq.convert(nn.Sequential(nn.Linear(32, 64)), "fprop=acme, dgrad=mxfp8, wgrad=bf16")
    checkpoint.save(converted, tmp_path / "converted")
    acme.remove()
    ordinary = nn.Sequential(nn.Linear(32, 64))
    for name in ("stored", "converted"):
        with pytest.raises(MissingPlugin, match=WORDS):
            checkpoint.load(ordinary, tmp_path / name)
    with pytest.raises(MissingPlugin, match=WORDS):
        checkpoint.import_file(ordinary, tmp_path / "stored.pt")
    with pytest.raises(MissingPlugin, match=WORDS):
        _ = checkpoint.info(tmp_path / "converted").policy
    checkpoint.load(ordinary, tmp_path / "converted", any_policy=True)  # its weights are in high precision
    assert torch.equal(ordinary[0].weight, converted[0].weight)

    acme.put_back()
    monkeypatch.setenv("LPQ_LOAD_PLUGINS", "")
    registry.refresh()
    with pytest.raises(CheckpointError, match=r"acme, which cannot be used here: .*LPQ_LOAD_PLUGINS= leaves it out"):
        checkpoint.load(ordinary, tmp_path / "stored")
    monkeypatch.delenv("LPQ_LOAD_PLUGINS")
    registry.refresh()
    net = stored()
    checkpoint.load(net, tmp_path / "stored")
    assert torch.equal(net[0].weight.col.data, stored()[0].weight.col.data)


def test_in_a_process_that_never_had_it(acme: Acme, tmp_path: Path) -> None:
    """And any reader of DCP gets the bytes without it."""
    checkpoint.save(net := stored(), tmp_path / "stored")
    torch.save(net[0].weight.col.data, tmp_path / "data.pt")
    acme.remove()
    ended = python(
        textwrap.dedent(f"""
        import torch
        import torch.distributed.checkpoint as dcp
        from torch import nn
        from lpq import checkpoint

        data = torch.empty(32, 64, dtype=torch.int8)
        dcp.load({{"model.0.weight.col.data": data}}, checkpoint_id={str(tmp_path / "stored")!r})
        assert torch.equal(data, torch.load({str(tmp_path / "data.pt")!r}))
        try:
            checkpoint.load(nn.Sequential(nn.Linear(32, 64)), {str(tmp_path / "stored")!r})
        except checkpoint.MissingPlugin as error:
            print(error)
    """)
    )
    assert ended.status == 0, ended.err
    assert "came with plugin acme (lpq-acme 1.2) and is not installed here: pip install lpq-acme" in ended.out
