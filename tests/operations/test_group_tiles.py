"""All groups at once, as a GPU does it, on a CPU: the bytes of a group at a time, and its products in bf16."""

from __future__ import annotations

import counted_format
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.comparing import equal
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lpq
from lpq import registry
from lpq.formats.layout import row_major
from lpq.formats.sections import Grouped, bounds, starts, unit
from lpq.nn import GroupedLinear
from lpq.operations import group_tiles, groups
from lpq.testing.options import family

EVERY = [q for name in ("fp8", "mxfp8", "nvfp4", "hybrid") for q in family(name).quantizers if not q.new_state()]
STATIC = ("fp8(static=true)", "nvfp4(rht=true, static=true)", "hybrid(row=fp8(static=true), col=mxfp8)")
EVERY += [lpq.quantizer(text) for text in STATIC]
COLS = 48


def rows(counts: list[int], behind: int = 3) -> tuple[Tensor, Tensor]:
    """Rows, of which each group's are ten times as large as those before it, and where groups end. NaN is behind."""
    torch.manual_seed(0)
    x = torch.cat(
        [10.0**i * torch.randn(n, COLS) for i, n in enumerate(counts)] + [torch.full((behind, COLS), torch.nan)]
    )
    return x, torch.tensor(counts).cumsum(0, dtype=torch.int32)


def pieces(side: lpq.Quantizer, tensors: list[Tensor], x: Tensor, offs: Tensor, dim: int) -> list[Tensor]:
    """The bytes that each group has."""
    shape = (x.shape[0], COLS) if dim == 0 else (COLS, x.shape[0])
    grouped, ends = Grouped(side, tensors, shape, x.dtype, dim), offs.tolist()
    at = starts(ends, unit(side, dim))
    found = [t for i, (a, b) in enumerate(bounds(ends)) for t in grouped.matrix(i, a, b, at[i]).tensors()]
    return [row_major(t).view(-1).view(torch.uint8) for t in found]


def check(quantizer: lpq.Quantizer, counts: list[int]) -> None:
    x, offs = rows(counts)
    state = {n: 2.0 * 3.0 ** torch.arange(len(counts)) for n in quantizer.new_state()} or None
    row, col = (not quantizer.side(d).plain or quantizer.col_source == "row" for d in ("row", "col"))
    seeds = torch.arange(len(counts)) - 1
    made = [
        encode(x, offs, quantizer, row, col, seeds, state)
        for encode in (groups.encode_groups_reference, group_tiles.encode)
    ]
    if state is not None:
        dynamic = group_tiles.encode(x, offs, quantizer.frozen(static=False), row, col, seeds)
        assert not all(torch.equal(row_major(a), row_major(b)) for a, b in zip(made[1], dynamic, strict=True))
    assert [t.shape for t in made[0]] == [t.shape for t in made[1]]
    at = 0
    for wanted, direction, dim in ((row, "row", 0), (col, "col", 1)):
        if wanted:
            side = quantizer.side(direction)
            end = at + len(side.layout)
            first, second = (pieces(side, tensors[at:end], x, offs, dim) for tensors in made)
            assert equal(first, second), (quantizer, direction)
            at = end


@pytest.mark.parametrize("quantizer", EVERY, ids=str)
def test_tiles_have_the_bytes_of_the_reference(quantizer: lpq.Quantizer) -> None:
    assert groups._why_not(quantizer, row=True, col=True) is None
    check(quantizer, [5, 0, 33, 16])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0, 0, 1, 15, 16, 17, 128, 130]), min_size=1, max_size=4))
@pytest.mark.parametrize("text", ["fp8", "fp8(scaling=block)", "nvfp4(rht=true, stochastic=true)"])
def test_any_counts(text: str, counts: list[int]) -> None:
    check(lpq.quantizer(text), counts)


@pytest.mark.parametrize(
    "recipe",
    ["bf16", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4", "nvfp4-fwd-mxfp8-bwd", "nvfp4-fwd-bf16-bwd"],
)
def test_a_layer_computes_the_same_up_to_sums(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [0, 5, 40, 0, 16]
    module = GroupedLinear(len(counts), COLS, 32, recipe=recipe, dtype=torch.bfloat16)
    x, offs = rows(counts)
    dy = torch.cat([torch.randn(sum(counts), 32), torch.full((3, 32), torch.nan)]).bfloat16()
    found = []
    for forced in (False, True):
        monkeypatch.setattr(groups, "at_once", lambda *_, forced=forced: forced)
        torch.manual_seed(1)
        given_x = x.bfloat16().requires_grad_()
        module.zero_grad()
        y = module(given_x, offs)
        y.backward(dy)
        found.append([y.detach(), given_x.grad, module.weight.grad, module.bias.grad])
    usual, at_once = found
    for name, a, b in zip(("y", "dx", "dw", "db"), usual, at_once, strict=True):
        for part, wanted in zip(
            *((t.split([*counts, 3]) if name in ("y", "dx") else t.unbind()) for t in (b, a)), strict=True
        ):
            error = (part - wanted).float().norm() / wanted.float().norm().clamp(min=1e-30)
            assert error < 1e-2, (name, error)
    for rest in (at_once[0][61:], at_once[1][61:], at_once[2][0], at_once[2][3], at_once[3][0]):
        assert not rest.any(), "what no group has is zero, whatever lay there"
    if recipe != "bf16":
        assert any(not torch.equal(a, b) for a, b in zip(usual, at_once, strict=True)), "the other way was taken"


def test_what_cannot_be_done_at_once_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "at_once", lambda *_: True)
    module = GroupedLinear(2, COLS, 20, recipe="mxfp8")
    x, offs = rows([5, 9], behind=0)
    with pytest.warns(UserWarning, match="the host waits for the device: sizes 20 and 48 are no multiples of 8"):
        y = module(x, offs)
    monkeypatch.undo()
    assert torch.equal(y, module(x, offs))


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
def test_where_a_mode_watches_groups_are_encoded_at_once(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under selective activation checkpointing, and where operations are counted."""
    monkeypatch.setattr(groups, "at_once", lambda *_: True)
    module = GroupedLinear(2, COLS, 32, recipe=recipe)
    x, offs = rows([5, 9], behind=0)
    torch.manual_seed(1)
    expected = module(x, offs)
    torch.manual_seed(1)
    with FlopCounterMode(display=False):
        y = module(x, offs)
    assert torch.equal(y, expected)


def test_a_recipe_of_none_multiplies_in_its_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "at_once", lambda *_: True)
    module = GroupedLinear(2, COLS, 32, recipe=None)
    x, offs = rows([5, 9], behind=0)
    linear = [
        nn.functional.linear(part, w, b) for part, w, b in zip(x.split([5, 9]), module.weight, module.bias, strict=True)
    ]
    torch.testing.assert_close(module(x, offs), torch.cat(linear))


def test_a_format_that_counts_is_encoded_a_group_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    counted_format.register()
    try:
        quantizer = lpq.quantizer("counted")
        x, offs = rows([5, 9], behind=0)
        usual, _ = groups.encode_groups(quantizer, x, offs, row=True, col=True)
        monkeypatch.setattr(groups, "at_once", lambda *_: True)
        with pytest.warns(UserWarning, match="the host waits for the device: counted counts"):
            found, _ = groups.encode_groups(quantizer, x, offs, row=True, col=True)
        assert usual is not None
        assert found is not None
        assert equal(usual.tensors, found.tensors)
    finally:
        registry.refresh()
