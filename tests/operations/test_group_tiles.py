"""All groups at once, as a GPU does it, on a CPU: values of a group at a time, and its products in bf16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.comparing import equal
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lpq
from lpq.formats.sections import bounds, matrices, stacked, starts, unit
from lpq.nn import GroupedLinear
from lpq.operations import group_tiles, groups
from lpq.operations.decoding import decode
from lpq.operations.encoder import EncoderSpec
from lpq.testing.options import family

WAITS = pytest.mark.filterwarnings("ignore:a group at a time, for which the host waits")
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


@pytest.mark.parametrize("quantizer", EVERY, ids=str)
def test_rows_are_decoded_as_a_group_at_a_time(quantizer: lpq.Quantizer) -> None:
    """Also where a value is of all rows of a group, and in the basis in which row operands are stored."""
    counts = [5, 0, 33, 16]
    x, offs = rows(counts)
    state = {n: 2.0 * 3.0 ** torch.arange(len(counts)) for n in quantizer.new_state()} or None
    both = groups.encode_groups(quantizer, x, offs, row=True, col=True, seeds=torch.arange(len(counts)), state=state)
    for operand in both:
        assert operand is not None
        begins, dim = starts(offs.tolist(), unit(operand.quantizer, operand.dim)), operand.dim
        for rotated in (False, True)[: 1 + (dim == 0 and not operand.quantizer.plain)]:
            found = group_tiles.dense(operand, offs, torch.float32, rotated=rotated)
            for i, (start, stop) in enumerate(bounds(offs.tolist())):
                one = operand.group(i, start, stop, begins[i])
                values = one.decode_rotated() if rotated else one.decode()
                wanted = values if dim == 0 else values.t()
                assert torch.equal(found[start:stop], wanted.contiguous()), (quantizer, dim, rotated, i)


@pytest.mark.parametrize("cols", [256, COLS])
@pytest.mark.parametrize("text", ["nvfp4(stochastic=eden)", "nvfp4(rht=true)", "mxfp4(rht=true)"])
def test_rotated_matrices_of_a_stack_are_decoded_as_one_at_a_time(
    text: str, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole groups of columns that are rotated together, or not; all at once, or few after another."""
    quantizer = lpq.quantizer(text)
    each = [quantizer.quantize(7.0**i * torch.randn(cols, 32), row=False, seed=i * (2**32 + 1)).col for i in range(5)]
    operand = stacked([one for one in each if one is not None])
    wanted = torch.stack([one.decode_rotated().bfloat16() for one in matrices(operand)])
    assert torch.equal(group_tiles._stack_in_bf16(operand, True), wanted)
    chunks, vmap = [], torch.vmap

    def noted(function: Callable[..., Tensor], *, chunk_size: int) -> Callable[..., Tensor]:
        chunks.append(chunk_size)
        return vmap(function, chunk_size=chunk_size)

    monkeypatch.setattr(torch, "vmap", noted)
    for count in (1, 2):
        monkeypatch.setattr(group_tiles, "AT_ONCE", sum(buffer[0].nbytes for buffer in operand.tensors()) * count)
        assert torch.equal(group_tiles._stack_in_bf16(operand, True), wanted)
    assert chunks == [1, 2]
    assert not torch.equal(decode(operand, torch.bfloat16), wanted[..., :cols]), "it is rotated"


@WAITS
@pytest.mark.parametrize("quantizer", [q for q in EVERY if q.col_source == "row"], ids=str)
def test_columns_are_made_of_rows_that_are_decoded_at_once(
    quantizer: lpq.Quantizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, offs = rows([5, 0, 33, 16], behind=0)
    seeds = torch.arange(4)
    wanted = EncoderSpec(quantizer, (len(x), COLS), x.dtype, x.device)
    reference = groups.encode_groups_reference(x, offs, wanted, seeds)
    monkeypatch.setattr(groups, "at_once", lambda *_: True)
    made = groups.encode_groups(quantizer, x, offs, row=True, col=True, seeds=seeds)
    assert equal([t for operand in made if operand is not None for t in operand.tensors], reference)
    other = groups.encode_groups(quantizer.side("row"), x, offs, row=True, col=True, seeds=seeds)
    assert made[1] is not None
    assert other[1] is not None
    if quantizer.side("row") == quantizer.side("col"):
        assert not equal(made[1].tensors, other[1].tensors), "they are made of the rows"


@WAITS
@pytest.mark.parametrize(
    "recipe",
    [
        "bf16",
        "fp8-current",
        "fp8-row",
        "fp8-block",
        "mxfp8",
        "nvfp4",
        "nvfp4-eden",
        "nvfp4-fwd-mxfp8-bwd",
        "nvfp4-fwd-bf16-bwd",
        "nvfp4-row-fwd-decoded-bwd",
    ],
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


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_sum_of_what_is_not_finite_is_that_of_its_group_alone(bad: float) -> None:
    """A product with ones has all rows in each sum: 0 times NaN is NaN."""
    counts = [5, 0, 33, 16]
    x, offs = rows(counts)
    wanted = torch.stack([part.sum(0) for part in x.split([*counts, 3])[:-1]])
    torch.testing.assert_close(group_tiles.sum_rows(x, offs), wanted, rtol=1e-5, atol=1e-3)
    x[7, 2] = bad
    found = group_tiles.sum_rows(x, offs)
    assert found[2, 2].isnan()
    found[2, 2] = wanted[2, 2]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-3)


@WAITS
def test_what_cannot_be_done_at_once_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "at_once", lambda *_: True)
    module = GroupedLinear(2, COLS, 20, recipe="mxfp8")
    x, offs = rows([5, 9], behind=0)
    with pytest.warns(UserWarning, match="the host waits for the device: sizes 20 and 48 are no multiples of 8"):
        y = module(x, offs)
    monkeypatch.undo()
    assert torch.equal(y, module(x, offs))


@WAITS
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


def test_a_format_that_no_kernel_encodes_in_groups_is_encoded_a_group_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, offs = rows([5, 9], behind=0)
    usual, _ = groups.encode_groups(lpq.quantizer("fp8"), x, offs, row=True, col=False)
    monkeypatch.setattr(groups, "at_once", lambda *_: True)
    with pytest.warns(UserWarning, match="the host waits for the device: no kernel encodes groups as fp8"):
        found, _ = groups.encode_groups(lpq.quantizer("fp8"), x, offs, row=True, col=False)
    assert usual is not None
    assert found is not None
    assert equal(usual.tensors, found.tensors)
