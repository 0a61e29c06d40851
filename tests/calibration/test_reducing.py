"""Statistics of a logical weight are the same however it is cut, along whichever axes of a mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from virtual import VirtualAxis, on_mesh

import lpq
from lpq.calibration import CalibrationError
from lpq.calibration.reducing import reduce
from lpq.calibration.statistics import Statistics
from lpq.formats import Quantizer
from lpq.operations.measuring import measure
from lpq.operations.quantizing import quantize

ROWS, COLS, EXPERTS = 64, 64, 4
LAYOUTS = [
    {"tp": 1}, {"tp": 2}, {"tp": 4}, {"fsdp": 2}, {"fsdp": 4}, {"ep": 2}, {"ep": 4}, {"tp": 2, "ep": 2},
    {"fsdp": 2, "tp": 2}, {"fsdp": 2, "ep": 2, "tp": 2},
]  # fmt: skip


def weight(expert: int) -> Tensor:
    made = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(expert))
    made[expert * 7, (expert * 13) % COLS] = 9.0 + expert  # the amax is in another shard of each
    return made


def inputs(rank: int) -> Tensor:
    return torch.randn(8, COLS, generator=torch.Generator().manual_seed(100 + rank))


def parts(mesh: dict[str, int], axes: dict[str, Any]) -> dict[int, tuple[slice, slice]]:
    """The experts of a rank, and its part of their weights: rows are cut by FSDP, columns by TP."""
    ep, fsdp, tp = (axes[n].rank if n in axes else 0 for n in ("ep", "fsdp", "tp"))
    sizes = [mesh.get(name, 1) for name in ("ep", "fsdp", "tp")]
    mine = range(ep * EXPERTS // sizes[0], (ep + 1) * EXPERTS // sizes[0])
    rows = slice(fsdp * ROWS // sizes[1], (fsdp + 1) * ROWS // sizes[1])
    return {expert: (rows, slice(tp * COLS // sizes[2], (tp + 1) * COLS // sizes[2])) for expert in mine}


def calibrated(mesh: dict[str, int], q: Quantizer) -> dict[str, Tensor]:
    """The codes, block scales and global scales of all experts, put together from all ranks."""
    side, other = q.side("row"), q.side("col")

    def rank(axes: dict[str, Any]) -> dict[tuple[int, int, int], list[Tensor]]:
        over = tuple(name for name in axes if name != "ep")
        own = Statistics()
        pieces = parts(mesh, axes)
        for expert, (rows, cols) in pieces.items():
            for stat, value in zip(side.stats, measure(weight(expert)[rows, cols], side, None), strict=True):
                if stat.of_all:
                    own.take(f"experts.{expert}.w_{stat.name}", value, "max", over)
        number = sum(axes[name].rank * 2**i for i, name in enumerate(axes))
        own.take("x_amax", inputs(number).abs().amax(), "max")
        own.take("x_rows", torch.tensor(8), "sum")
        found = reduce(own, axes)
        made = {}
        for expert, (rows, cols) in pieces.items():
            part = weight(expert)[rows, cols]
            stats = [found[f"experts.{expert}.w_{s.name}"] if s.of_all else None for s in side.stats]
            operand = quantize(part, stats, side, None)[0]
            assert operand is not None
            made[expert, rows.start, cols.start] = [*operand.row_major().tensors()]
        assert int(found["x_rows"]) == 8 * torch.tensor([*mesh.values()]).prod()
        return made

    assert other is not None
    found = on_mesh(mesh, rank)
    assert not [error for error in found.values() if isinstance(error, Exception)], found
    pieces = {key: value for of_rank in found.values() for key, value in of_rank.items()}
    made = {}
    for expert in range(EXPERTS):
        rows = sorted({r for e, r, _ in pieces if e == expert})
        cols = sorted({c for e, _, c in pieces if e == expert})
        for i, buffer in enumerate(side.layout):
            raw = {k: v[i].view(torch.uint8) if v[i].itemsize == 1 else v[i] for k, v in pieces.items()}
            if buffer.of_all:
                assert len({raw[expert, r, c].item() for r in rows for c in cols}) == 1, "shards differ in one scale"
                made[f"{expert}.{buffer.name}"] = raw[expert, rows[0], cols[0]]
            else:
                lines = [torch.cat([raw[expert, r, c] for c in cols], 1) for r in rows]
                made[f"{expert}.{buffer.name}"] = torch.cat(lines)
    return made


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("text", ["fp8", "nvfp4", "nvfp4(block=16x16)", "nvfp4(search=four_over_six)"])
def test_no_layout_changes_a_byte(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the reduction all layouts that cut weights differ."""
    q = lpq.quantizer(text)
    expected = calibrated({"tp": 1}, q)
    for mesh in LAYOUTS:
        assert same(calibrated(mesh, q), expected), mesh
    monkeypatch.setattr(VirtualAxis, "combine", lambda self, packed, how: packed)
    for mesh in ({"tp": 2}, {"fsdp": 4}, {"fsdp": 2, "tp": 2}):
        with pytest.raises(AssertionError):
            assert same(calibrated(mesh, q), expected)


def test_the_search_over_all_scales_does_not_depend_on_a_layout() -> None:
    q = lpq.quantizer("nvfp4(search=mse)")
    assert same(calibrated({"fsdp": 2, "tp": 2}, q), calibrated({"tp": 1}, q))


@settings(max_examples=25, deadline=None)
@given(
    mesh=st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), min_size=1, max_size=3),
    data=st.data(),
)
def test_each_statistic_is_reduced_over_its_own_axes(mesh: dict[str, int], data: st.DataObject) -> None:
    """Against a direct maximum and sum over the ranks that differ along these axes only. NaN is not lost."""
    over = tuple(name for name in mesh if data.draw(st.booleans(), label=name))
    special = data.draw(st.sampled_from([None, float("nan"), float("inf")]))

    def own(place: tuple[int, ...]) -> float:
        number = sum(rank * 5**i for i, rank in enumerate(place))
        return special if special is not None and not any(place) else 0.25 + number * 7 % 11

    def rank(axes: dict[str, Any]) -> tuple[Tensor, Tensor]:
        place = tuple(axis.rank for axis in axes.values())
        found = Statistics()
        found.take("m", torch.full((2, 3), own(place)), "max", over)
        found.take("s", torch.tensor([1, sum(place)]), "sum", over)
        reduced = reduce(found, axes)
        return reduced["m"], reduced["s"]

    results = on_mesh(mesh, rank)
    for place, (most, count) in results.items():
        beside = [
            other
            for other in results
            if all(a == b for name, a, b in zip(mesh, place, other, strict=True) if name not in over)
        ]
        bits = torch.tensor([own(other) for other in beside]).view(torch.int32).amax().view(torch.float32)
        assert torch.equal(most.view(torch.int32), bits.expand(2, 3).contiguous().view(torch.int32))
        assert count.tolist() == [len(beside), sum(map(sum, beside))]


def test_one_packed_reduction_serves_all_statistics_of_the_same_axes_and_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[int, str, int]] = []
    combine = VirtualAxis.combine

    def counted(self: VirtualAxis, packed: Tensor, how: str) -> Tensor:
        calls.append((self.rank, how, packed.numel()))
        return combine(self, packed, how)

    monkeypatch.setattr(VirtualAxis, "combine", counted)

    def rank(axes: dict[str, Any]) -> None:
        own = Statistics()
        for i in range(5):
            own.take(f"{i}.w_amax", torch.ones(()), "max", ("tp",))
            own.take(f"{i}.x_amax", torch.ones(()), "max")
            own.take(f"{i}.x_rows", torch.tensor([1, 2]), "sum")
        reduce(own, axes)

    on_mesh({"dp": 2, "tp": 2}, rank)
    # over dp and tp those of inputs, over tp alone those of weights
    expected = 2 * [("max", 5), ("sum", 10)] + [("max", 5)]
    assert sorted(calls) == sorted((rank, *call) for _ in range(2) for rank in range(2) for call in expected)


def test_ranks_with_other_statistics_all_raise_and_say_which() -> None:
    def rank(axes: dict[str, Any]) -> None:
        own = Statistics()
        own.take("both.x_amax", torch.ones(()), "max")
        if (axes["dp"].rank, axes["tp"].rank) != (1, 1):
            own.take("down.x_amax", torch.ones(()), "max")
        reduce(own, axes)

    found = on_mesh({"dp": 2, "tp": 2}, rank)
    assert len(found) == 4
    for error in found.values():
        assert isinstance(error, CalibrationError)
        assert "rank dp 0, tp 0 has down.x_amax, which rank dp 1, tp 1 lacks" in str(error)


def test_ranks_of_other_experts_may_have_other_statistics() -> None:
    """Where they are not reduced over the axis of experts; a rank that lacks one of its own is an error on all."""

    def rank(axes: dict[str, Any], forget: bool) -> list[str]:
        own, over = Statistics(), ("dp",)
        if not (forget and (axes["dp"].rank, axes["ep"].rank) == (0, 1)):
            own.take(f"experts.{axes['ep'].rank}.w1.w_amax", torch.ones(()), "max", over)
        own.take("q_proj.w_amax", torch.ones(()), "max")
        return [name for name, _ in reduce(own, axes).items()]

    found = on_mesh({"dp": 2, "ep": 2}, lambda axes: rank(axes, False))
    assert found[1, 1] == ["experts.1.w1.w_amax", "q_proj.w_amax"]
    errors = on_mesh({"dp": 2, "ep": 2}, lambda axes: rank(axes, True))
    assert all("rank dp 1, ep 1 has experts.1.w1.w_amax" in str(error) for error in errors.values()), errors


def test_a_statistic_is_a_maximum_or_an_exact_count() -> None:
    own = Statistics()
    with pytest.raises(TypeError, match=r"a sum is of torch\.int64"):
        own.take("mean", torch.ones(()), "sum")
    own.take("m", torch.ones(()), "max", ("tp",))
    with pytest.raises(CalibrationError, match="reduced over 'tp'"):
        reduce(own, {})
