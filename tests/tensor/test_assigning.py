"""Values assigned to a quantized tensor are cast as torch casts them; a change of its shape in place is refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import lpq
from lpq.tensor import PrecisionWarning
from lpq.testing.operands import normal

TEXTS = ("mxfp8", "nvfp4", "fp8", "fp8(scaling=row)", "identity")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "value",
    [0, 3, True, torch.tensor(2), torch.tensor(1.5, dtype=torch.float64), torch.ones(64, dtype=torch.int32)],
    ids=str,
)
def test_numbers_of_any_dtype_can_be_assigned(text: str, value: int | bool | Tensor) -> None:
    """The parts are whole blocks, of which a part, or all, is a view."""
    for index in (slice(0, 32), slice(None), ..., slice(3, 5)):
        stored, plain = lpq.quantizer(text).quantize(normal(64, 64)), torch.zeros(64, 64)
        stored[index], plain[index] = value, value
        assert torch.allclose(stored.dequantize()[index], plain[index], rtol=0.2)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool], ids=str)
def test_tensors_of_any_dtype_can_be_copied(text: str, dtype: torch.dtype) -> None:
    source = (normal(64, 64) * 4).to(dtype)
    stored = lpq.quantizer(text).quantize(normal(64, 64))
    stored.copy_(source)
    assert torch.equal(stored.dequantize(), lpq.quantizer(text).quantize(source.float()).dequantize())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_tensors_of_any_dtype_take_stored_values(dtype: torch.dtype) -> None:
    stored = lpq.quantizer("mxfp8").quantize(normal(64, 64) * 4)
    taken, part = torch.full((64, 64), 7).to(dtype), torch.full((96, 64), 7).to(dtype)
    taken.copy_(stored)
    part[32:] = stored
    assert torch.equal(taken, stored.dequantize().to(dtype))
    assert torch.equal(part[32:], taken)


def test_a_checkpoint_in_fp64_loads_into_stored_weights() -> None:
    saved = torch.nn.Linear(64, 32).double()
    layer = lpq.convert(torch.nn.Linear(64, 32), "mxfp8", weights="quantized")
    layer.load_state_dict(saved.state_dict())
    weight = layer.weight.detach()
    assert isinstance(weight, lpq.QuantizedTensor)
    assert torch.equal(weight.dequantize(), lpq.quantizer("mxfp8").quantize(saved.weight.detach().float()).dequantize())


@pytest.mark.parametrize(
    ("device", "remedy"),
    [("cpu", "load without assign=True, or with"), ("meta", r"call model\.to_empty\(device=…\) first")],
)
def test_an_ordinary_tensor_takes_no_stored_weights_place(device: str, remedy: str) -> None:
    """PyTorch's set_model_state_dict assigns by itself to a model on the meta device."""
    saved = dict(torch.nn.Linear(64, 32, bias=False).state_dict())
    with torch.device(device):
        model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    lpq.convert(model, "mxfp8", weights="quantized")
    with pytest.raises(ValueError, match=rf"^0\.weight: a \[32, 64\] weight is stored as mxfp8, .*: {remedy}"):
        model[0].load_state_dict(saved, assign=True)
    model.to_empty(device="cpu")
    model[0].load_state_dict(saved)
    weight = model[0].weight.detach()
    assert torch.equal(weight.dequantize(), lpq.quantizer("mxfp8").quantize(saved["weight"]).dequantize())


@pytest.mark.parametrize(
    "change", [
        lambda t: t.unsqueeze_(0), lambda t: t.squeeze_(), lambda t: t.t_(), lambda t: t.transpose_(0, 1),
        lambda t: t.resize_(3, 3), lambda t: t.as_strided_((3,), (1,)),
    ]
)  # fmt: skip
def test_its_shape_does_not_change_in_place(change: Callable[[Tensor], Tensor]) -> None:
    t = lpq.quantizer("mxfp8").quantize(normal(64, 64))
    with pytest.raises(TypeError, match="would change the shape of a QuantizedTensor in place"):
        change(t)


@pytest.mark.parametrize(
    "write", [Tensor.zero_, lambda t: t.fill_(3), Tensor.uniform_, Tensor.normal_, lambda t: t.new_zeros(t.shape)]
)
def test_what_is_overwritten_is_not_decoded(write: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was never written to may hold codes that a format does not know."""
    stored = lpq.quantizer("mxfp8").quantize(normal(64, 64))
    with monkeypatch.context() as patch:
        patch.setattr(lpq.QuantizedTensor, "dequantize", None)
        made = write(stored)
    assert torch.isfinite(made.dequantize()).all()
    assert not torch.equal(made.dequantize(), lpq.quantizer("mxfp8").quantize(normal(64, 64)).dequantize())


def test_other_libraries_get_no_memory_of_it() -> None:
    """It has none of the values that it stands for."""
    t = lpq.quantizer("mxfp8").quantize(normal(64, 64))
    for taken in (torch.from_dlpack, np.from_dlpack):
        with pytest.raises(BufferError, match=r"stored as mxfp8: pass on the result of dequantize\(\)"):
            taken(t)  # type: ignore[operator]
    assert torch.equal(torch.from_dlpack(t.dequantize()), t.dequantize())


def test_an_average_of_stored_weights_is_refused_in_place_and_rounded_where_it_is_assigned() -> None:
    model = lpq.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8", weights="quantized")
    in_place = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    in_place.update_parameters(model)  # the first update copies
    with pytest.raises(RuntimeError, match=r"0\.weight: _foreach_lerp_ would compute in place.* average the masters"):
        in_place.update_parameters(model)
    assigned = AveragedModel(model, avg_fn=lambda average, _weight, _count: average + 1)
    assigned.update_parameters(model)
    with pytest.warns(PrecisionWarning, match=r"aten\.add\.Tensor .* runs on the decoded tensor"):
        assigned.update_parameters(model)
    exact = model[0].weight.dequantize() + 1
    rounded = lpq.quantizer("mxfp8").quantize(exact).dequantize()
    assert torch.equal(assigned.module[0].weight.dequantize(), rounded)
    assert not torch.equal(rounded, exact)


@pytest.mark.filterwarnings("always::lpq.core.PrecisionWarning")
@pytest.mark.parametrize("avg_fn", [None, get_ema_avg_fn(0.9)], ids=["average", "moving"])
def test_an_average_that_is_assigned_leads_to_the_masters(avg_fn: Any) -> None:
    model = lpq.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8", weights="quantized")
    average = AveragedModel(model, avg_fn=avg_fn)
    average.update_parameters(model)
    with pytest.warns(PrecisionWarning, match=r"average the masters, see lpq\.optim\.MasterWeights\.masters"):
        average.update_parameters(model)
    with pytest.warns(PrecisionWarning, match=r"no gradient flows$"):
        lpq.quantizer("mxfp8").quantize(normal(64, 64)) * 2  # which is no weight


def test_stored_values_that_are_put_together_of_parts_are_warned_of() -> None:
    """As ``dcp.load`` does it on another number of ranks. Values of other blocks alone are copied, without a word."""
    small, words = torch.randn(64, 64), r"a part \[32, 64\] of this \[64, 64\] tensor is written, with which the rest "
    for text in ("nvfp4", "fp8", "fp8(scaling=row)"):
        saved, loaded = lpq.quantizer(text).quantize(small), lpq.quantizer(text).quantize(torch.full((64, 64), 1e9))
        for part in (slice(0, 32), slice(32, 64)):
            with pytest.warns(PrecisionWarning, match=words + rf"shares scales of {re.escape(text)}: all of it is"):
                loaded[part].copy_(saved[part])
        assert (text == "fp8(scaling=row)") == bool(loaded.dequantize()[:32].any())  # why it warns
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in ("mxfp8", "mxfp4", "nvfp4"):
            saved, loaded = lpq.quantizer(text).quantize(small), lpq.quantizer(text).quantize(torch.full((64, 64), 1e9))
            for part in (slice(0, 64),) if text == "nvfp4" else (slice(0, 32), slice(32, 64)):
                loaded[part].copy_(saved[part])
            assert torch.equal(loaded.dequantize(), saved.dequantize())
