"""Cutting and joining: pieces on whole blocks are views of the buffers and the whole again when joined."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lpq.formats import Quantizer, Storage
from lpq.formats.layout import DIMENSIONS
from lpq.formats.sections import cat
from lpq.tensor import PrecisionWarning, QuantizedTensor
from lpq.testing.expect import equal, same_operand, same_quantized, same_values, there
from lpq.testing.operands import SEED, cut, encode, few, no_parts, normal, rotated, unit


@pytest.mark.parametrize("dim", [0, 1], ids=DIMENSIONS)
def test_pieces_of_an_operand(side: Quantizer, dim: int) -> None:
    """``narrow`` on whole blocks gives views that decode to the piece; ``cat`` joins these into the operand."""
    step = unit(side, dim)
    size = [24, 24]
    size[dim] = 2 * step + max(1, step // 2)
    operand = encode(side, normal(size[0], size[1]))
    if no_parts(side, dim, ["row"]):
        what = f"{side}: {DIMENSIONS[dim]} of what has no parts (leave narrow and cat as Storage has them)"
        equal(operand.narrow(dim, 0, step), None, f"{what}, cut")
        equal(cat([operand, operand], dim), None, f"{what}, joined")
        return
    decoded, memory = operand.decode(), [t.untyped_storage().data_ptr() for t in operand.tensors()]
    pieces: list[Storage] = []
    for start in range(0, size[dim], step):
        stop = min(start + step, size[dim])
        what = f"{side}: {DIMENSIONS[dim]} [{start}, {stop}) of {size}"
        piece = there(operand.narrow(dim, start, stop), f"{what}, which lie on whole blocks")
        assert memory == [t.untyped_storage().data_ptr() for t in piece.tensors()], f"{what} were copied"
        same_values(piece.decode(), decoded.narrow(dim, start, stop - start), what, exact=side.rotation is None)
        pieces.append(piece)
    joined = there(cat(pieces, dim), f"{side}: the whole of pieces on whole blocks")
    same_operand(joined, operand, f"{side}: the pieces joined again")


@few
@given(begin=st.integers(0, 39), length=st.integers(0, 40), dim=st.integers(0, 1))
@example(begin=3, length=5, dim=0)
@example(begin=1, length=17, dim=1)
def test_any_slice_has_the_right_values(quantizer: Quantizer, begin: int, length: int, dim: int) -> None:
    """A slice that cuts blocks is decoded, and correct; one that does not stays quantized, and is correct."""
    tensor = quantizer.quantize(normal(40, 40), seed=SEED)
    end = min(begin + length, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        piece = tensor[begin:end] if dim == 0 else tensor[:, begin:end]
    expected = tensor.dequantize().narrow(dim, begin, end - begin)
    same_values(piece, expected, f"{quantizer}: [{begin}:{end}] of dimension {dim}", exact=not rotated(quantizer))


@pytest.mark.parametrize("dim", [0, 1], ids=DIMENSIONS)
def test_split_and_cat_are_the_whole(quantizer: Quantizer, dim: int) -> None:
    """``torch.cat(torch.split(t, …))`` is ``t``, buffer for buffer, with row only, column only and both."""
    size, step = [48, 48], cut(quantizer)[dim]
    size[dim], name = 3 * step, DIMENSIONS[dim]
    if no_parts(quantizer, dim):
        pytest.skip(f"an operand of this format has no {name} that are parts: its pieces are decoded")
    x = normal(size[0], size[1])
    for row, col in ((True, False), (False, True), (True, True)):
        tensor = quantizer.quantize(x, row=row, col=col, seed=SEED)
        pieces = torch.split(tensor, step, dim)
        assert all(isinstance(piece, QuantizedTensor) for piece in pieces), (
            f"{quantizer}: pieces of {step} {name} lie on whole blocks and were decoded; they must stay quantized"
        )
        same_quantized(torch.cat(pieces, dim), tensor, f"{quantizer}: split into {name} and joined")
