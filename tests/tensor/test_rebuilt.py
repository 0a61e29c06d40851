"""A pickled tensor whose parts are not what its format declares is refused in words, before a kernel reads it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lpq
from lpq.distributed.shard import prepared_parameter
from lpq.tensor.quantized_tensor import rebuild
from lpq.tensor.rebuilt import DamagedTensor

Change = Callable[[list[Any], dict[str, Any], dict[str, Any]], None]


def parts() -> list[Any]:
    """The pickled form of an nvfp4 tensor ``[2, 16, 64]`` with both operands."""
    torch.manual_seed(0)
    tensor = lpq.quantizer("nvfp4").quantize(torch.randn(2, 16, 64))
    _, state = tensor.__reduce_ex__(2)
    return list(state)


def operand(sides: dict[str, Any], direction: str, **changed: Any) -> None:
    names = ("text", "buffers", "matrix", "stored")
    sides[direction] = tuple({**dict(zip(names, sides[direction], strict=True)), **changed}[name] for name in names)


def set_(place: int, value: object) -> Change:
    def change(state: list[Any], sides: dict[str, Any], row: dict[str, Any]) -> None:
        state[place] = value

    return change


def side(**changed: Any) -> Change:
    return lambda state, sides, row: operand(sides, "row", **changed)


def buffer(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda state, sides, row: row.__setitem__(name, change(row[name]))


DAMAGES: dict[str, tuple[Change, str]] = {
    "its data is short": (buffer("data", lambda t: t[:-1]), r"buffer data of its row operand is .* \[31, 32\], and"),
    "its data is flat": (buffer("data", lambda t: t.flatten()), r"shape \[1024\]"),
    "its scale is of another dtype": (buffer("scale", lambda t: t.float()), r"buffer scale .* is torch\.float32"),
    "its scale is no tensor": (buffer("scale", lambda t: [1, 2]), r"buffer scale .* is \[1, 2\]"),
    "its data is sparse": (buffer("data", lambda t: t.to_sparse()), r"torch\.sparse_coo"),
    "its global scale is long": (buffer("amax", lambda t: t.expand(4)), r"shape \[4\]"),
    "its data is on another device": (buffer("data", lambda t: t.to("meta")), "on several devices"),
    "a buffer is missing": (lambda state, sides, row: row.__delitem__("data"), "has not the buffers data, scale"),
    "a buffer has another name": (lambda state, sides, row: row.update(date=row.pop("data")), "has not the buffers"),
    "its matrix is larger": (side(matrix=(64, 64)), r"is of shape \(64, 64\) .*and \[32, 64\] is wanted"),
    "its matrix is no matrix": (side(matrix=32), "of shape 32"),
    "its operand's dtype is a string": (side(stored="float32"), "dtype 'float32'"),
    "its operand is of another format": (side(text="mxfp8"), "stored as mxfp8, and the tensor as nvfp4"),
    "its operand has no text": (side(text=None), "its quantizer is None"),
    "its operand is a list": (lambda state, sides, row: sides.update(row=[]), r"row operand is \[\]"),
    "its operand has a third direction": (lambda state, sides, row: sides.update(up=sides["row"]), "its operands are"),
    "it has no operand": (set_(1, {}), "its operands are"),
    "its operands are a string": (set_(1, "row"), "its operands are 'row'"),
    "its quantizer is a number": (set_(0, 3), "its quantizer is 3"),
    "its shape is a list": (set_(2, [2, 16, 64]), "its shape is"),
    "its shape is negative": (set_(2, (-2, -16, 64)), "its shape is"),
    "its shape is another": (set_(2, (3, 16, 64)), r"\[48, 64\] is wanted"),
    "its dtype counts": (set_(3, torch.int32), "its dtype is"),
    "it needs a gradient or not": (set_(4, "no"), "its requires_grad is 'no'"),
    "it is a parameter or not": (set_(5, [0]), r"its is_param is \[0\]"),
    "it is a shard or not": (set_(6, 1), "its is_shard is 1"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_not_as_declared_is_refused(name: str) -> None:
    change, words = DAMAGES[name]
    state = parts()
    change(state, state[1], state[1]["row"][1])
    with pytest.raises(DamagedTensor, match=f"what was saved is no whole quantized tensor: .*{words}.*Do not trust"):
        rebuild(*state)


@pytest.mark.parametrize(
    "text", ["mxfp8", "nvfp4(rht=true)", "fp8(block=128x128)", "hybrid(row=mxfp8, col=nvfp4)", "identity"]
)
def test_what_was_saved_is_rebuilt(text: str) -> None:
    tensor = lpq.quantizer(text).quantize(torch.randn(2, 16, 64))
    for t in (
        tensor,
        tensor[:1],
        lpq.quantizer(text).quantize(torch.randn(5)),
        lpq.quantizer(text).quantize(torch.randn(0, 3)),
    ):
        file = io.BytesIO()
        torch.save(t, file)
        file.seek(0)
        again = torch.load(file, weights_only=True)
        assert torch.equal(again.dequantize(), t.dequantize())


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_parameters_that_lpq_prepared_are_loaded_as_weights_only(weights: Any) -> None:
    model = lpq.convert(torch.nn.Sequential(torch.nn.Linear(32, 64)), "mxfp8", weights=weights)
    file = io.BytesIO()
    torch.save([*model.parameters()], file)
    file.seek(0)
    for loaded, own in zip(torch.load(file, weights_only=True), model.parameters(), strict=True):
        assert type(loaded) is type(own)
        assert isinstance(loaded, torch.nn.Parameter)
        plain = [t.dequantize() if isinstance(t, lpq.QuantizedTensor) else t.detach() for t in (loaded, own)]
        assert torch.equal(*plain)
    with pytest.raises(TypeError, match="a weight was saved as a str, which is no tensor"):
        prepared_parameter("weight", True)  # type: ignore[arg-type]
