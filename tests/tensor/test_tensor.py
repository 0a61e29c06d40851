"""QuantizedTensor under PyTorch's operators: each does to the buffers what it would do to the tensor they stand for."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from imitated_gpu import calls_of
from quantizers import KINDS, SIDES
from support.comparing import equal_quantized
from torch import Tensor, nn

import lpq
from lpq.core import PrecisionWarning, QuantizedTensor

every = pytest.mark.parametrize("text", KINDS)
nearest = pytest.mark.parametrize("text", [q for q in KINDS if "stochastic" not in q])
sides = pytest.mark.parametrize(("row", "col"), SIDES, ids=["row", "col", "both"])
ROWS, COLS = 256, 384


def make(text: str, row: bool, col: bool, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (ROWS, COLS)):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return lpq.quantizer(text).quantize(x, row=row, col=col, seed=1)


def buffers(t: QuantizedTensor) -> set[int]:
    return {b.untyped_storage()._cdata for _, s in t.operands for b in s.tensors()}


def test_a_tensor_without_an_operand_is_refused() -> None:
    with pytest.raises(ValueError, match="a QuantizedTensor has at least one operand: give row, col or both"):
        QuantizedTensor(None, None, lpq.quantizer("mxfp8"), (32, 32), torch.float32)


@pytest.mark.parametrize(("one", "other", "dim"), [((2, 32, 64), (2, 64, 64), 0), ((4, 32, 64), (2, 64, 64), -1)])
def test_what_has_other_sizes_beside_is_not_joined(one: tuple[int, ...], other: tuple[int, ...], dim: int) -> None:
    pieces = [lpq.quantizer("mxfp8").quantize(torch.randn(shape)) for shape in (one, other)]
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat(pieces, dim)


@pytest.mark.filterwarnings("ignore::lpq.core.PrecisionWarning")
@pytest.mark.parametrize("size", [0, -1])
def test_pieces_of_no_size_are_refused_as_torch_does(size: int) -> None:
    t = make("mxfp8", True, True)
    with pytest.raises(RuntimeError) as expected:
        t.dequantize().split(size)
    with pytest.raises(RuntimeError) as found:
        t.split(size)
    assert str(found.value) == str(expected.value)
    (empty,) = t[:0].split(0)
    assert isinstance(empty, QuantizedTensor)
    assert empty.shape == (0, COLS)


@every
def test_a_compiler_compares_two_tensors_of_one_layout_at_a_glance(text: str) -> None:
    """It keeps a copy of what tells layouts apart, and compares it with that of each weight in each step."""
    kept, other = (make(text, True, True).__tensor_flatten__()[1] for _ in range(2))
    found: list[bool] = []
    copied = copy.deepcopy(kept)
    assert copied[0] is kept[0], "a quantizer"
    assert calls_of(lambda: found.append(other == copied)) == 0
    assert found == [True]


def test_messages_name_the_parameter_and_views_and_copies_keep_its_name() -> None:
    t = make("mxfp8", True, True)
    saved, told = pickle.dumps(t), t.__tensor_flatten__()[1]
    t.title = "0.up.weight"
    assert pickle.dumps(t) == saved
    assert t.__tensor_flatten__()[1] == told  # else a compiler would tell layers apart by their names
    derived = [
        t.detach(), t[:32], t.t(), t.view(-1), t.clone(), t.to(torch.bfloat16), torch.empty_like(t), copy.deepcopy(t),
        t.new_zeros(ROWS // 2, COLS), torch.cat([t[:32], t[32:]]), nn.Parameter(t),
    ]  # fmt: skip
    assert [d.title for d in derived] == ["0.up.weight"] * len(derived)
    with pytest.raises(ValueError, match=r"^0\.up\.weight: a \[256, 384\] tensor .* has no shard of 20 rows"):
        t.new_zeros(20, COLS)
    with pytest.raises(ValueError, match=r"^0\.up\.weight: this tensor, stored as mxfp8, is \[256, 384\]"):
        t.data = torch.zeros(2)
    with pytest.raises(ValueError, match=r"^a \[256, 384\] tensor .* has no shard of 20 rows"):
        make("mxfp8", True, True).new_zeros(20, COLS)


def test_a_group_is_not_saved() -> None:
    t = make("mxfp8", True, True)
    assert pickle.loads(pickle.dumps(t)).amax_group is None
    t.amax_group = object()
    assert pickle.loads(pickle.dumps(t)).amax_group == "unattached"


def test_a_shard_without_its_group_is_not_written_to() -> None:
    shard = make("fp8", True, True).new_zeros(ROWS // 2, COLS)
    assert shard.amax_group == "unattached"
    with pytest.raises(RuntimeError, match="is a shard, and the group"):
        shard.fill_(1)
    shard.copy_(make("fp8", True, True)[: ROWS // 2])  # the same layout: its bytes are taken
    blocks = make("mxfp8", True, False).new_zeros(ROWS // 2, COLS)
    blocks.fill_(1)  # its blocks lie in the shard
    assert blocks.dequantize().eq(1).all()


@pytest.mark.parametrize("text", ["nvfp4(stochastic=true)", "hybrid(row=mxfp8, col=nvfp4)"])
def test_it_can_be_made_and_read_inside_a_compiled_function(text: str) -> None:
    quantizer = lpq.quantizer(text)
    x = torch.randn(32, 48)

    def function(x: Tensor) -> tuple[Tensor, QuantizedTensor]:
        t = quantizer.quantize(x, seed=torch.tensor(7))
        return t.dequantize() * 2, t

    torch._dynamo.reset()
    value, t = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    expected, u = function(x)
    assert torch.equal(value, expected)
    assert equal_quantized(t, u)


def test_an_absent_operand_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"col operand of this \[256, 384\] tensor is absent.*quantize with col=True"):
        make("mxfp8", True, False).operand("col")
    derived = make("fp8", True, False).operand("col")
    assert torch.equal(derived.data.view(torch.uint8), make("fp8", True, True).col.data.view(torch.uint8))
    with pytest.raises(ValueError, match="row, col or both"):
        make("mxfp8", False, False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a CUDA device")
def test_pinning() -> None:
    t = make("mxfp8", True, True).pin_memory()
    assert t.is_pinned()


# A part of a tensor, written to as a view and as the decoded tensor would be.
PARTS: dict[str, Callable[[Tensor], object]] = {
    "rows": lambda t: t[:128].copy_(torch.full((128, COLS), 300.0)), "zeroed rows": lambda t: t[128:].zero_(),
    "columns": lambda t: t[:, 128:256].fill_(300.0), "rows of columns": lambda t: t[:, 128:256][:128].fill_(100.0),
    "rows of a flattened tensor": lambda t: t.view(-1)[: 128 * COLS].fill_(-2.0),
    "a piece of a split": lambda t: t.split(128)[1].fill_(50.0), "one row": lambda t: t.__setitem__(3, 0.0),
    "cut columns": lambda t: t.__setitem__((slice(None), slice(3, 5)), 0.0),
    "every second row": lambda t: t.__setitem__(slice(None, None, 2), 7.0),
    "a mask": lambda t: t.__setitem__(torch.eye(ROWS, COLS).bool(), 9.0),
}  # fmt: skip


@pytest.mark.parametrize("text", [*(q for q in KINDS if "stochastic" not in q and "col_source" not in q), "nvfp4"])
@sides
def test_writing_a_part_encodes_what_shares_a_value_with_it(text: str, row: bool, col: bool) -> None:
    start = make(text, row, col)
    for name, write in PARTS.items():
        t, expected = start.clone(), start.dequantize()
        held = buffers(t)
        write(t)
        write(expected)
        fresh = lpq.quantizer(text).quantize(expected, row=row, col=col)
        assert buffers(t) == held, name
        # Encoding a decoded tensor again moves it a little, and by no more than encoding what was written moves that.
        moved, allowed = (t.dequantize() - expected).norm(), (fresh.dequantize() - expected).norm()
        slack = 1e-3 * expected.norm()
        assert moved <= 1.5 * allowed + slack, name
        if row and col:
            other, anew = t.col.decode().t(), fresh.col.decode().t()
            assert (other - expected).norm() <= 1.5 * (anew - expected).norm() + slack, name


def test_a_part_of_a_transposed_view_is_written_through() -> None:
    t = make("fp8", True, True)
    assert not t.is_shared()
    assert t.share_memory_().is_shared()
    t[:128].t().fill_(300.0)
    assert (t.dequantize()[:128] == 300).all()
    assert (t.dequantize()[128:].abs() < 10).all()
    assert torch.equal(t.dequantize(), t.col.decode().t())


def test_a_copy_that_stands_for_a_view_says_that_writing_to_it_is_lost() -> None:
    t = make("mxfp8", True, False)
    with pytest.warns(PrecisionWarning, match="writing to the result does not change the tensor"):
        t[::2].zero_()
    assert t.dequantize()[0].any()


@every
def test_distributed_checkpoints_hold_it(text: str, tmp_path) -> None:
    import torch.distributed.checkpoint as dcp

    t = make(text, True, True)
    dcp.save({"w": t}, checkpoint_id=str(tmp_path), no_dist=True)
    target = {"w": torch.empty_like(t)}
    dcp.load(target, checkpoint_id=str(tmp_path), no_dist=True)
    assert equal_quantized(target["w"], t)


def test_the_warning_of_a_decoded_operator_says_that_its_remedy_has_no_gradient() -> None:
    """A penalty on a stored weight would be taken out of training in silence."""
    weight = nn.Parameter(lpq.quantizer("mxfp8").quantize(torch.ones(32, 32)))
    with pytest.warns(PrecisionWarning, match=r"call it on dequantize\(\), through which no gradient flows"):
        weight.square().sum().backward()
    assert weight.grad is not None
    assert not weight.dequantize().requires_grad


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda t: t.to(torch.bfloat16), "cpu": lambda t: t.cpu(), "T": lambda t: t.T,
    "flatten": lambda t: t.flatten(), "narrow": lambda t: t.narrow(0, 0, 32), "chunk": lambda t: t.chunk(2)[0],
    "vstack": lambda t: torch.vstack([t, t]), "a part": lambda t: t[3:5, 1:7],
    "select": lambda t: t[3], "expand": lambda t: t.expand(2, 64, 96), "product": lambda t: t @ torch.ones(96, 2),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::lpq.tensor.quantized_tensor.PrecisionWarning")
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_under_inference_mode_is_the_one_outside(name: str) -> None:
    """There torch does not take apart operators that are made of others: ``to`` decoded, and ``narrow`` raised."""
    t, run = lpq.quantizer("mxfp8").quantize(torch.randn(64, 96)), OPERATORS[name]
    expected = run(t)
    with torch.inference_mode():
        found = run(t)
        assert (type(found), found.dtype, found.shape) == (type(expected), expected.dtype, expected.shape)
        values = [o.dequantize() if isinstance(o, QuantizedTensor) else o for o in (found, expected)]
        assert torch.equal(*values)
    assert values[0].any()


def test_an_operator_that_writes_is_refused_under_inference_mode_and_not_taken_apart() -> None:
    """It is made of a view, to which it writes: of what was decoded, as the diagonal, which would be lost."""
    t = lpq.quantizer("mxfp8").quantize(torch.randn(64, 96))
    with torch.inference_mode(), pytest.raises(Exception, match="fill_diagonal_"):
        t.fill_diagonal_(8.0)


@pytest.mark.parametrize("weights", ["high_precision", "quantized"])
def test_a_prepared_weight_that_is_cast_under_inference_mode_stays_prepared(
    weights: Literal["high_precision", "quantized"],
) -> None:
    """A stored one was refused, as if it could be in no other dtype."""
    model = lpq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8", weights=weights)
    kind = type(model[0].weight)
    with torch.inference_mode():
        model.bfloat16()
        assert model(torch.ones(4, 64, dtype=torch.bfloat16)).any()
    assert type(model[0].weight) is kind
    assert model[0].weight.dtype == torch.bfloat16
