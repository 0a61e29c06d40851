"""Calls and inputs that are refused in words, before anything is multiplied or changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.small_models import converted, linears
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import lpq
from lpq import calibration, observe, optim, registry
from lpq.calibration import CalibrationError
from lpq.checkpoint import CheckpointError
from lpq.integrations import peft, transformers
from lpq.train.config import TrainConfig
from lpq.train.errors import TrainOptionError

NET = converted("mxfp8", 32, 32)
PLAIN = linears(32, 32)
BATCHES = [torch.ones(4, 32)]
T = lpq.quantizer("mxfp8").quantize(torch.randn(4, 32))
NO_MODEL = r"model must be a torch\.nn\.Module, got (str|int|list|OrderedDict): pass .* as the first argument"
MODELS: dict[str, Callable[[], Any]] = {
    "convert": lambda: lpq.convert("mxfp8", NET), "report": lambda: lpq.report("net"),
    "set_step": lambda: lpq.set_step(3, NET), "replan": lambda: lpq.replan("net", steps=3),
    "hold_weights": lambda: lpq.hold_weights("net").__enter__(), "calibrate": lambda: lpq.calibrate(BATCHES, NET),
    "layer_noise": lambda: calibration.layer_noise(BATCHES, NET), "stream": lambda: lpq.export.stream("modelopt", NET),
    "memory": lambda: observe.memory(4, NET),
    "load_high_precision": lambda: optim.load_high_precision(NET.state_dict(), NET),
    "resume": lambda: transformers.resume("checkpoint", NET), "attach": lambda: transformers.attach("net"),
    "merge_aware": lambda: peft.merge_aware("net"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_first_argument_that_is_no_model(name: str) -> None:
    """In the same words wherever it is."""
    with pytest.raises((TypeError, CheckpointError, CalibrationError), match=NO_MODEL):
        MODELS[name]()


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "observing": (
        lambda: observe.observing(3, NET).__enter__(),
        TypeError,
        "layers must be a converted model or .* int",
    ),
    "resume": (
        lambda: transformers.resume(NET, NET),
        CheckpointError,
        "checkpoint must be str or Path, got Sequential: ",
    ),
    "export": (
        lambda: lpq.export(NET.state_dict(), "a"),
        CheckpointError,
        r"model must be .* or the directory .*, got O",
    ),
    "hold_weights": (
        lambda: lpq.hold_weights(PLAIN).__enter__(),
        ValueError,
        "hold_weights: the model has no layer of lpq",
    ),
    "report": (lambda: lpq.report(PLAIN), ValueError, r"not converted: call lpq\.convert"),
    "report of a part": (lambda: lpq.report(NET[0]), ValueError, "or pass the whole that it is part of"),
    "fuse": (lambda: lpq.convert(PLAIN, "mxfp8", fuse="yes"), TypeError, "fuse='yes': it is True or False"),  # type: ignore[arg-type]
    "set_step": (lambda: lpq.set_step(PLAIN, 3), ValueError, "not converted"),
    "replan": (lambda: lpq.replan(PLAIN, steps=3), ValueError, r"call lpq\.convert"),
    "convert": (
        lambda: lpq.convert(torch.jit.script(linears(32, 32)), "mxfp8"),
        TypeError,
        "which is compiled: convert the",
    ),
    "memory in a dtype": (
        lambda: observe.memory(NET, param_dtype="bf16"),
        TypeError,
        "param_dtype='bf16': it is a dtyp",
    ),  # type: ignore[arg-type]
    "memory of moments in a format": (
        lambda: observe.memory(NET, moments="mxfp8"),  # type: ignore[arg-type]
        TypeError,
        "memory: moments='mxfp8': it has a format for 'exp_avg', for 'exp_avg_sq', or for both",
    ),
    "memory of one block": (
        lambda: observe.memory(NET, blocks=NET[0]),  # type: ignore[arg-type]
        TypeError,
        "memory: blocks is a Linear: it lists modules of the model",
    ),
    "memory of blocks by name": (
        lambda: observe.memory(NET, blocks=["0"]),  # type: ignore[list-item]
        TypeError,
        "memory: blocks has a str that is not in the model",
    ),
    "memory of other blocks": (
        lambda: observe.memory(NET, blocks=[PLAIN[0]]),
        TypeError,
        "memory: blocks has a Linear that is not in the model: list its modules",
    ),
    "a norm of a width": (
        lambda: lpq.nn.rms_norm(BATCHES[0], 32, layers=NET),  # type: ignore[arg-type]
        TypeError,
        r"normalized_shape is a int: pass \(32,\)",
    ),
    "a norm of a list": (
        lambda: lpq.nn.rms_norm([1.0], (1,), layers=NET),  # type: ignore[arg-type]
        TypeError,
        "input is a list: pass a tensor",
    ),
    "a norm for none": (
        lambda: lpq.nn.layer_norm(BATCHES[0], (32,), layers=None),  # type: ignore[arg-type]
        TypeError,
        "layers is a NoneType: it is a sequence of the modules",
    ),
    "load_high_precision": (
        lambda: optim.load_high_precision(NET, "x.pt"),
        TypeError,
        "got a str: pass whole tensors by",
    ),  # type: ignore[arg-type]
    "load_high_precision of arrays": (
        lambda: optim.load_high_precision(NET, {"0.weight": torch.ones(32, 32).numpy()}),  # type: ignore[dict-item]
        RuntimeError,
        "0.weight.*expected torch.Tensor .* received <class 'numpy.ndarray'>",
    ),
    "dequantize": (lambda: T.dequantize(torch.int8), TypeError, r"dequantize\(torch\.int8\): it is a floating dtype"),
    "dequantize to a name": (lambda: T.dequantize("float32"), TypeError, r"dequantize\('float32'\): it is a floating"),  # type: ignore[arg-type]
    "a model in float64": (
        lambda: converted("mxfp8", 32, 32).double()(BATCHES[0].double()),
        TypeError,
        r"layer 0, .* the weight is torch\.float64",
    ),
    "gemm": (lambda: lpq.gemm(T, T), TypeError, r"t\.row and t\.col, and not a QuantizedTensor"),
    "quantize": (lambda: lpq.quantizer("mxfp8").quantize([1.0]), TypeError, "and not a list"),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_arguments(name: str) -> None:
    call, error, words = CALLS[name]
    with pytest.raises(error, match=words):
        call()


STORED = converted("mxfp8", 64, 64, weights="quantized")
FLAGS: dict[str, Callable[[Any], Any]] = {
    "fuse": lambda value: lpq.convert(linears(32, 32), "mxfp8", fuse=value),
    "keep": lambda value: optim.MasterWeights(torch.optim.AdamW(STORED.parameters()), keep=value),
    "decode": lambda value: lpq.export(NET, "file.pt", layout="lpq", decode=value),
    "any_policy": lambda value: transformers.resume(NET, "checkpoint", any_policy=value),
    "full": lambda value: lpq.report(NET, full=value),
    "thorough": lambda value: lpq.checkpoint.info("checkpoint", thorough=value),
    "progress": lambda value: lpq.calibrate(NET, [], progress=value),
    "compile": lambda value: TrainConfig(compile=value),
}


@pytest.mark.parametrize("value", ["no", None, 0, 1.0])
@pytest.mark.parametrize("name", FLAGS)
def test_an_option_that_is_neither_true_nor_false(name: str, value: Any) -> None:
    """Text, as ``"no"``, counted as true: masters were kept, and any policy was let in."""
    errors = TypeError, CheckpointError, CalibrationError, TrainOptionError
    with pytest.raises(errors, match=f"{name} ?= ?{value!r}: it is True or False"):
        FLAGS[name](value)


@pytest.mark.parametrize("number", [0, -3, "a", 2.0, None, "later"])
def test_a_number_of_steps_that_is_none(number: Any) -> None:
    words = f": steps={number!r}: it is a whole number from 1 on"
    with pytest.raises(ValueError, match=words):
        lpq.replan(NET, steps=number)
    if number not in (None, "later"):
        with pytest.raises(ValueError, match=words):
            lpq.convert(linears(32, 32), "mxfp8", steps=number)
    with pytest.raises(ValueError, match=r"set_step: step=.*: it is a whole number from 0 on"):
        lpq.set_step(NET, -1 if number == 0 else 1.5 if number == 2.0 else number)


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_a_prepared_weight_that_cannot_be_moved_is_named(weights: Any) -> None:
    """Other code refers to it, so that torch cannot exchange it."""
    model = converted("mxfp8", 64, 64, weights=weights)
    held = weakref.ref(model[0].weight)
    words = r"layer 0, .* cannot be moved or cast, .* move the model before that, .* before it were moved .*weakref"
    with pytest.raises(RuntimeError, match=words) as raised:
        model.to(torch.bfloat16)
    assert "DeepSpeed" not in str(raised.value), "it is not there"
    del held
    model.to(torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16


def test_a_stored_weight_that_cannot_be_exchanged_by_a_loaded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that it "has weakref associated with it"."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model = converted("mxfp8", 64, 64, 64, weights="quantized")
    loss = model(torch.ones(4, 64)).sum()
    state = {name: value + 1 for name, value in linears(64, 64, 64).state_dict().items()}
    words = (
        r"layer 1, .*: delete losses .* graph of autograd holds it: While swapping the parameter named \"1\.weight\""
    )
    with pytest.raises(RuntimeError, match=words):
        model.load_state_dict(state)
    del loss
    model.load_state_dict(state)
    assert model[1].weight.dequantize().gt(0.5).all()


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_another_cause_of_torch_is_not_called_a_held_graph(
    weights: Any, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordinary tensors for sharded weights: whatever failed while torch exchanged tensors was said to be a graph."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model, state = converted("mxfp8", 64, 64, weights=weights), linears(64, 64).state_dict()
    fully_shard(model, mesh=mesh)
    with pytest.raises(RuntimeError, match=r'While swapping the parameter named "0\.weight"') as raised:
        model.load_state_dict(state)
    assert "delete losses" not in str(raised.value)


@pytest.mark.parametrize("swaps", [False, True])
def test_an_ordinary_tensor_is_not_assigned_to_a_sharded_weight(
    swaps: bool, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 ended in an AttributeError, as "'WeightShard' object has no attribute '_local_tensor'"."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", swaps)
    model, state = converted("mxfp8", 64, 64, weights="high_precision"), linears(64, 64).state_dict()
    own = {name: value + 1 for name, value in fully_shard(model, mesh=mesh).state_dict().items()}
    before = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"a \[64, 64\] weight is sharded, and an ordinary tensor is not: load by set_"
    ):
        model.load_state_dict(state, assign=True)
    assert all(torch.equal(value.to_local(), before[name]) for name, value in model.state_dict().items())
    model.load_state_dict(own, assign=True)
    assert all(torch.equal(value.to_local(), before[name] + 1) for name, value in model.state_dict().items())


# ------------------------------------------------------------------------------------------ inputs of a layer

NESTED = [torch.randn(2, 32), torch.randn(3, 32)]
INPUTS: dict[str, tuple[Any, type[Exception], str]] = {
    "a wrong width": (torch.randn(3, 31), ValueError, r"the input is \[3, 31\], its last dimension must be 32"),
    "a number": (torch.tensor(1.0), ValueError, r"the input is \[\], its last dimension must be 32"),
    "a list": ([1.0] * 32, TypeError, "the input is a list, it must be a tensor"),
    "none": (None, TypeError, "the input is a NoneType, it must be a tensor"),
    "sparse": (torch.randn(2, 32).to_sparse(), TypeError, r"the input is torch\.sparse_coo: pass x\.to_dense\(\)"),
    **{str(d): (torch.ones(2, 32).to(d), TypeError, f"the input is {d}")
       for d in (torch.int64, torch.bool, torch.complex64, torch.float64)},
}  # fmt: skip


@pytest.mark.parametrize("case", INPUTS)
def test_what_a_layer_does_not_multiply(case: str) -> None:
    x, error, words = INPUTS[case]
    for recipe in registry.recipes():
        with pytest.raises(error, match=rf"^lpq\.nn\.Linear\(32, 32\): {words}"):
            lpq.nn.Linear(32, 32, recipe=recipe)(x)
    with pytest.raises(error, match=rf"^layer 0, lpq\.nn\.Linear\(32, 32\): {words}"):
        NET(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_inputs(layout: torch.layout) -> None:
    x = torch.nested.nested_tensor(NESTED, layout=layout)
    with pytest.raises(TypeError, match=r"Linear\(32, 32\): the input is nested: pass x\.values\(\)"):
        NET(x)
    assert layout is torch.strided or NET(x.values()).shape == (5, 32)


@pytest.mark.parametrize("recipe", registry.recipes())
def test_another_device_and_a_weight_of_another_dtype(recipe: str) -> None:
    """A kernel would write to the one what it reads of the other, and find it where nothing is."""
    layer = lpq.nn.Linear(64, 32, recipe=recipe)
    for weight, input in (("meta", "cpu"), ("cpu", "meta")):
        with pytest.raises(RuntimeError, match=rf"32\): the input is on {input} and the weight on {weight}: move one"):
            layer.to_empty(device=weight)(torch.randn(8, 64, device=input))
    with pytest.raises(TypeError, match=r"the weight is torch\.float64"):
        layer.double()(torch.ones(2, 64))


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4", "fp8-current"])
@pytest.mark.parametrize("wide", [False, True])
def test_a_weight_of_another_width(recipe: str, wide: bool) -> None:
    """Where blocks filled it up to the width of the input, it was multiplied without a word."""
    layer, weight = converted(recipe, 48, 32)[0], torch.randn(32, 64 if wide else 40)
    layer(torch.ones(4, 48))
    words = rf"lpq\.nn\.Linear\(48, 32\): the weight is \[32, {weight.shape[1]}\], and must be \[outputs, 48\]"
    with pytest.raises(ValueError, match=words):
        torch.func.functional_call(layer, {"weight": weight}, (torch.ones(4, 48),))


def test_operands_on_two_devices_are_not_multiplied() -> None:
    here, there = (lpq.quantizer("mxfp8").quantize(torch.randn(64, 64, device=d)).row for d in ("cpu", "meta"))
    with pytest.raises(ValueError, match="a is on cpu and b on meta"):
        lpq.gemm(here, there)


@pytest.mark.parametrize("text", ["mxfp8", "nvfp4", "identity"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_bias_that_does_not_fit(text: str, device: str) -> None:
    """A kernel would read behind the end of a short one, and the reference adds whatever can be broadcast."""
    a, b = (lpq.quantizer(text).quantize(torch.randn(rows, 64, device=device)).row for rows in (48, 32))
    for shape in ((1,), (), (31,), (48,), (48, 32), (1, 32)):
        with pytest.raises(ValueError, match=r"gemm: the bias is \[.*\], and b has 32 rows: .* shape \[32\]"):
            lpq.gemm(a, b, bias=torch.zeros(shape, device=device))
    elsewhere = "meta" if device == "cpu" else "cpu"
    with pytest.raises(ValueError, match=rf"the bias is on {elsewhere} and the operands are on {device}: move one"):
        lpq.gemm(a, b, bias=torch.zeros(32, device=elsewhere))
    for dtype in (torch.int64, torch.complex64):  # the imaginary part was dropped
        with pytest.raises(TypeError, match=rf"gemm: the bias is {dtype}: cast it to a floating dtype"):
            lpq.gemm(a, b, bias=torch.zeros(32, dtype=dtype, device=device))
    with pytest.raises(TypeError, match="the bias is a list: it must be a tensor, or None"):
        lpq.gemm(a, b, bias=[0.0] * 32)
    assert lpq.gemm(a, b, bias=torch.zeros(32, device=device)).shape == (48, 32)


@pytest.mark.parametrize("groups", [None, 2])
def test_a_bias_that_is_not_floating(groups: int | None) -> None:
    """The imaginary part was dropped."""
    layer: Any = lpq.nn.Linear(32, 32, recipe="mxfp8")
    rest: tuple[Any, ...] = ()
    if groups is not None:
        layer, rest = lpq.nn.GroupedLinear(groups, 32, 32, recipe="mxfp8"), ([2, 2],)
    layer.bias = nn.Parameter(layer.bias.detach().to(torch.complex64))
    with pytest.raises((TypeError, ValueError), match=r"the bias is torch\.complex64"):
        layer(torch.ones(4, 32), *rest)
    if groups is None:
        layer.bias = nn.Parameter(torch.zeros(3))
        with pytest.raises(ValueError, match=r"^lpq\.nn\.Linear\(32, 32\): the bias is \[3\], .* of shape \[32\]"):
            layer(torch.ones(4, 32))
        layer.bias = nn.Parameter(torch.zeros(32, dtype=torch.complex64))
    layer.bias = nn.Parameter(layer.bias.detach().real.double())
    assert layer(torch.ones(4, 32), *rest).dtype == torch.float32  # control


def test_a_second_derivative() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    y = NET(x).sum()  # of which dx does not depend on x: nobody would notice
    with pytest.raises(RuntimeError, match="create_graph=True: a layer with a recipe has no second derivative"):
        torch.autograd.grad(y, x, create_graph=True)


WRITES: list[Callable[[Tensor], object]] = [
    lambda w: w.copy_(2 * w.detach()), lambda w: w[:32].zero_(), lambda w: w.data.fill_(2),
]  # fmt: skip


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-current", "bf16"])
@pytest.mark.parametrize("write", WRITES)
def test_a_stored_weight_that_is_written_to_before_backward(recipe: str, write: Callable[[Tensor], object]) -> None:
    model: nn.Sequential = converted(recipe, 64, 64, weights="quantized")
    y = model(torch.randn(4, 64, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    with torch.no_grad():
        write(model[0].weight)
    words = r"0\.weight: a weight of \[64, 64\] that is stored quantized was written to after forward"
    with pytest.raises(RuntimeError, match=words):
        y.backward()
