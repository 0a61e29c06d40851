"""A quantized tensor is a tensor that can be copied, pickled, saved and moved; its bytes stay as they are."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from lpq.formats import Quantizer
from lpq.tensor import QuantizedTensor, quantize
from lpq.testing.expect import equal, memory, quantized_still, same, same_quantized
from lpq.testing.operands import SEED, encode, normal, rotated, sides
from lpq.testing.options import Family

EACH_CHOICE = pytest.mark.parametrize("choice", ["row", "col", "both"])


def quantized(
    quantizer: Quantizer,
    choice: str,
    rows: int = 32,
    cols: int = 48,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> QuantizedTensor:
    """A tensor that holds the row operand, the column operand or both."""
    x = normal(rows, cols, dtype, seed)
    return quantize(quantizer, x, row=choice != "col", col=choice != "row", seed=SEED)


@EACH_CHOICE
def test_copies_and_pickles(quantizer: Quantizer, choice: str) -> None:
    """``deepcopy``, ``pickle`` and ``torch.save`` (``weights_only=True``) keep every byte and share none."""
    tensor = quantized(quantizer, choice, dtype=torch.bfloat16)
    saved = io.BytesIO()
    torch.save({"weight": tensor}, saved)
    saved.seek(0)
    for other, how in (
        (copy.deepcopy(tensor), "deepcopy"),
        (tensor.clone(), "clone"),
        (tensor.to(tensor.device, copy=True), "to with copy=True"),
        (pickle.loads(pickle.dumps(tensor)), "pickle"),
        (torch.load(saved, weights_only=True)["weight"], "torch.save and torch.load"),
    ):
        same_quantized(other, tensor, f"{quantizer}, {how}")
        shared = set(memory(other)) & set(memory(tensor))
        assert not shared, f"{quantizer}, {how}: {len(shared)} buffers are shared with the original"


@EACH_CHOICE
def test_parameters(quantizer: Quantizer, choice: str) -> None:
    """It can be an ``nn.Parameter``: trained, frozen, in a file, in a state dict, copied and loaded."""
    trained, file = torch.nn.Parameter(quantized(quantizer, choice)), io.BytesIO()
    torch.save(trained, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for parameter, how in ((loaded, "torch.save and torch.load"), (copy.deepcopy(loaded), "copied")):
        facts = isinstance(parameter, torch.nn.Parameter), parameter.requires_grad
        equal(facts, (True, True), f"{quantizer}, {how}: whether it is a parameter that is trained")
        same_quantized(parameter.detach(), trained.detach(), f"{quantizer}, a parameter, {how}")
    module = torch.nn.Module()
    module.weight = original = torch.nn.Parameter(quantized(quantizer, choice), requires_grad=False)
    other = copy.deepcopy(module)
    weight = other.weight
    assert isinstance(weight, torch.nn.Parameter), (
        f"{quantizer}: a parameter that was copied is a {type(weight).__name__}; it must still be a parameter"
    )
    weight.detach().zero_()
    other.load_state_dict(module.state_dict())
    same_quantized(weight.detach(), original.detach(), f"{quantizer}: loaded from a state dict")


@EACH_CHOICE
def test_moves(quantizer: Quantizer, choice: str) -> None:
    """``.to`` another dtype keeps the bytes and changes the dtype that they stand for; meta tensors keep the shapes."""
    tensor = quantized(quantizer, choice)
    half = tensor.to(torch.bfloat16)
    equal(quantized_still(half, f"{quantizer}: as bf16").dtype, torch.bfloat16, f"{quantizer}: as bf16")
    if not rotated(quantizer):
        same(half.dequantize(), tensor.dequantize().bfloat16(), f"{quantizer}: as bf16, decoded")
    same_quantized(tensor.to("cpu"), tensor, f"{quantizer}: moved to where it is")
    meta = tensor.to("meta")
    what = f"{quantizer}: moved to meta"
    quantized_still(meta, what)
    equal((meta.shape, meta.dtype, meta.device.type), (tensor.shape, tensor.dtype, "meta"), what)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here, so constants on the CPU go unnoticed")
def test_devices(family: Family) -> None:
    """Pinned memory, moves to a GPU and back, and streams keep every byte; the format's own code runs there, too."""
    tensor = quantized(family.default, "both")
    pinned = tensor.pin_memory()
    equal(pinned.is_pinned(), True, f"{family}: whether it is pinned")
    on_gpu = pinned.to("cuda", non_blocking=True)
    equal(on_gpu.device.type, "cuda", f"{family}: moved to a GPU")
    on_gpu.record_stream(torch.cuda.current_stream())
    same_quantized(on_gpu.cpu(), tensor, f"{family}: moved to a GPU and back")
    for side in sides(family.default):
        decoded = encode(side, normal(5, 40).cuda()).decode()
        equal(decoded.device.type, "cuda", f"{side}: encoded on a GPU and decoded")
