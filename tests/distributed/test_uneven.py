"""Three ranks and odd sizes: weights that cannot be cut stay in high precision, on every rank alike; nothing hangs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from operands import watched
from ranks import fully_shard, of_all, on_ranks
from sharded import W8, local, same_weights, whole
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import lpq
from lpq.core import QuantizedTensor
from lpq.distributed.shard import WeightShard
from lpq.optim import MasterWeights

RANKS = 3
COLS = 90
"""The last of whose blocks is ragged, in every format."""
ROWS, FEW = [90, 100, 384, 96], [2, 1]
"""Over three ranks: 96 in whole blocks of 16 and 32, 90 in cut ones, 384 in those of 128, 100 unevenly. Two and one are
fewer than ranks; one format has these, too."""
FORMATS = {
    "fp8()": {90, 384, 96},
    "mxfp8()": {384, 96},
    "nvfp4(block=16x16)": {384, 96},
    "fp8(scaling=block, block=128x128)": {384},
    "hybrid(row=nvfp4, col=fp8(scaling=block))": {384},
    "fp8(scaling=delayed)": {90, 384, 96},
}
"""How many rows can be cut for three ranks."""
ROW_ALONE = {"mxfp8()": {90}, "hybrid(row=nvfp4, col=fp8(scaling=block))": {90, 96}}
"""How many rows can be cut of row operands, and not of column operands."""
STOCHASTIC = "nvfp4(stochastic=true)"


class Net(nn.Module):
    """Layers for each format, all side by side: each sees the same input."""

    def __init__(self, formats: Sequence[str]) -> None:
        super().__init__()
        every = (nn.ModuleList(nn.Linear(COLS, n) for n in (ROWS if i else ROWS + FEW)) for i in range(len(formats)))
        self.formats = nn.ModuleList(every)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).square().sum(1) for layers in self.formats for layer in layers])


def _model(formats: Sequence[str], weights: Any, ranks: int | None = None) -> Net:
    torch.manual_seed(0)
    rules = [{"match": f"formats.{i}.*", "recipe": W8.format(text)} for i, text in enumerate(formats)]
    net = lpq.convert(Net(formats), {"rules": rules}, weights=weights, ranks=ranks, include="all")
    assert isinstance(net, Net)
    return net


def _layers(formats: Sequence[str]) -> dict[str, tuple[str, int]]:
    """The format and the rows of each layer, by its name."""
    places = {f"formats.{i}.{j}": (i, rows) for i in range(len(formats)) for j, rows in enumerate(ROWS + FEW)}
    return {name: (formats[i], rows) for name, (i, rows) in places.items() if not i or rows in ROWS}


def _fit(formats: Sequence[str]) -> set[str]:
    """The layers whose weights can be cut."""
    return {name for name, (text, rows) in _layers(formats).items() if rows in FORMATS[text]}


def _half(formats: Sequence[str]) -> set[str]:
    """The layers of whose weights the row operand alone can be cut."""
    return {name for name, (text, rows) in _layers(formats).items() if rows in ROW_ALONE.get(text, ())}


def _shard(net: Net) -> Net:
    """The layers of the first format one by one, then those of each other one together."""
    for layer in net.formats[0]:  # type: ignore[union-attr]
        fully_shard(layer)
    for layers in [*net.formats][1:]:
        fully_shard([*layers])  # type: ignore[misc]
    return fully_shard(net)  # type: ignore[no-any-return]


def _run(net: nn.Module, optimizer: torch.optim.Optimizer, share: float = 1.0) -> list[float]:
    """The losses of three steps. ``share``: of this rank in the gradient."""
    losses = []
    for step in range(3):
        x = torch.randn(32, COLS, generator=torch.Generator().manual_seed(step))
        loss = net(x).mean()
        (loss * share).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(torch.tensor(losses).isfinite())
    assert losses[0] != losses[-1]
    return losses


def _adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def _on_every_rank(said: str) -> str:
    assert len(set(of_all(said))) == 1
    return said


def _notes(net: Net) -> dict[str, str]:
    report = lpq.report(net)
    _on_every_rank(str(report))
    return {entry.name: entry.note for entry in report.weights}


def _says(net: Net, formats: Sequence[str], kept: str) -> None:
    """Every weight is in the report, by name, with what becomes of it and why."""
    notes, layers, fit = _notes(net), _layers(formats), _fit(formats)
    assert notes.keys() == layers.keys()
    for name, (text, rows) in layers.items():
        if name in fit:
            assert notes[name].startswith(kept), (text, rows, notes[name])
        elif rows % RANKS:
            assert notes[name] == f"in high precision: its {rows} rows over 3 ranks are uneven"
        else:
            reason = f"in high precision{{}}: shards of {rows // RANKS} of its {rows} rows cut the blocks of "
            half = name in _half(formats)
            assert notes[name].startswith("gathered as " if half else reason.format("")), notes[name]
            assert not half or f" 2.00 in backward; {reason.format(' in backward')}" in notes[name], notes[name]


def _what_is_gathered(net: nn.Module) -> dict[str, set[str]]:
    seen: dict[str, set[str]] = {}

    def sees(name: str, when: str, weight: Tensor) -> None:
        seen.setdefault(type(weight).__name__, set()).add(name)

    with watched(net, sees):
        net(torch.randn(64, COLS).requires_grad_()).square().mean().backward()
    return seen


@on_ranks(RANKS)
def test_high_precision(rank: int) -> None:
    formats = [*FORMATS]
    _says(_model(formats, "high_precision", RANKS), formats, "gathered as ")
    net = _model(formats, "high_precision")
    assert all(isinstance(layer.weight.data, WeightShard) for part in net.formats for layer in part)  # type: ignore[union-attr]
    _says(_shard(net), formats, "gathered as ")
    ordinary = _shard(_model(formats, None))
    assert _run(net, _adam(net)) == _run(ordinary, _adam(ordinary))
    same_weights(ordinary, net)
    _says(net, formats, "gathered as ")
    assert _what_is_gathered(net)["QuantizedTensor"] == _fit(formats) | _half(formats)


@on_ranks(RANKS)
def test_stochastic(rank: int) -> None:
    net = _shard(_model([STOCHASTIC], "high_precision"))
    for note in _notes(net).values():
        assert note.startswith("in high precision: nvfp4(stochastic=true) rounds stochastically")
    _run(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    assert "QuantizedTensor" not in _what_is_gathered(net)


def _values(parameter: Tensor) -> Tensor:
    value = whole(parameter)
    return value.dequantize() if isinstance(value, QuantizedTensor) else value.detach()


@on_ranks(RANKS)
def test_quantized(rank: int) -> None:
    """As without sharding: rank 0 alone has a share in the gradients, since a third of three times x need not be x.

    It compares, too: what it gathers, all have, and all have its losses.
    """
    every = [*FORMATS]
    for masters, formats in ((False, every[::2]), (True, every[1::2])):
        net, twin = (_model(formats, "quantized", RANKS) for _ in range(2))
        _says(net, formats, "stored and gathered as ")
        _says(_shard(net), formats, "stored and gathered as ")
        for name in _layers(formats):
            held = local(net.get_submodule(name).weight)  # type: ignore[arg-type]
            assert isinstance(held, QuantizedTensor if name in _fit(formats) else WeightShard), name
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        losses = _run(net, MasterWeights(_adam(net), keep=masters), float(rank == 0))
        _on_every_rank(str(losses))
        values = {name: _values(p) for name, p in net.named_parameters()}
        if rank == 0:
            assert losses == _run(twin, MasterWeights(_adam(twin), keep=masters)), masters
            for (name, value), q in zip(values.items(), twin.parameters(), strict=True):
                assert torch.equal(value, _values(q)), (masters, name)


@on_ranks(RANKS)
def test_refused_where_it_is_sharded(rank: int) -> None:
    """Without ``ranks`` every weight is stored quantized, and FSDP2 cannot cut some."""
    for rows, recipe, words in (
        (90, "mxfp8", "stored as mxfp8 has no shard of 30 rows: shards of 30 rows cut the blocks of 32"),
        (96, "fp8-block", "cut the blocks of 128"),
        (100, "nvfp4", "a [100, 64] tensor that is stored as nvfp4(block=16x16) has no shard of 34 rows: "),
        (100, "fp8-current", "tensor that is stored as fp8 has no shard of 34 rows: it leaves a smaller one"),
        (4, "fp8-current", "shards of 2 rows of a tensor that is stored as fp8 leave nothing to some ranks"),
        (1, "mxfp8", "shards of 1 rows of a tensor that is stored as mxfp8 leave nothing to some ranks"),
    ):
        net = lpq.convert(nn.Sequential(nn.Linear(64, rows)), recipe, weights="quantized", include="all")
        with pytest.raises(ValueError, match="that is stored as") as caught:
            fully_shard(net)
        said = _on_every_rank(str(caught.value))
        assert said.startswith("0.weight: ")
        assert words in said, said
        assert "give lpq.convert(…, ranks=…) the number of ranks" in said
