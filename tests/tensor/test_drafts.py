"""The drafts of stored tensors as users meet them: hooks, groups that change, gradient scalers, threads, ``data``."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, AdamW

import lpq
from lpq.core import QuantizedTensor
from lpq.testing.expect import same

FORMATS = ["fp8", "mxfp8", "nvfp4", "nvfp4(block=16x16)", "hybrid(row=fp8, col=mxfp8)"]


def stored(text: str = "fp8", seed: int = 0) -> nn.Parameter:
    value = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed))
    weight = nn.Parameter(lpq.quantizer(text).quantize(value))
    weight.grad = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed + 1))
    return weight


def buffers(weight: Any) -> list[Tensor]:
    assert isinstance(weight, QuantizedTensor)
    return [t.clone() for _, operand in weight.operands for t in operand.tensors()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(_bytes(x), _bytes(y)) for x, y in zip(a, b, strict=True))


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("text", FORMATS)
def test_hooks_after_a_step_see_what_is_stored(text: str) -> None:
    weight = stored(text)
    optimizer = SGD([weight], lr=0.3)
    seen: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: seen.append((weight.dequantize(), buffers(weight))))
    optimizer.step()
    optimizer.step()  # the hook that ends a step was registered after theirs
    values, held = seen[-1]
    same(values, weight.dequantize(), text)
    assert equal(held, buffers(weight))


@pytest.mark.parametrize("hook", ["pops", "freezes"])
def test_what_was_written_is_kept_whatever_becomes_of_the_groups(hook: str) -> None:
    weight, twin = stored(), stored()
    SGD([twin], lr=0.3).step()
    optimizer = SGD([weight, nn.Parameter(torch.ones(2))], lr=0.3)

    def change(*_: Any) -> None:
        if hook == "pops":
            optimizer.param_groups.pop(0)
        else:
            weight.requires_grad_(False)
            optimizer.param_groups[0]["params"] = []

    optimizer.register_step_post_hook(change)
    step = SGD.step

    class Popping(SGD):
        def step(self, closure: Any = None) -> Any:
            out = step.__wrapped__(self, closure)  # type: ignore[attr-defined]
            change()
            return out

    if hook == "pops":
        optimizer = Popping([weight], lr=0.3)
    optimizer.step()
    assert equal(buffers(weight), buffers(twin))


@pytest.mark.parametrize("text", FORMATS)
def test_a_step_that_a_scaler_skips_changes_no_byte(text: str) -> None:
    weight = stored(text)
    optimizer = AdamW([weight], lr=0.1, fused=True)
    before = buffers(weight)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())  # as GradScaler sets them
    for _ in range(3):
        optimizer.step()
    assert equal(buffers(weight), before)
    optimizer.found_inf = torch.zeros(())
    twin = stored(text)
    other = AdamW([twin], lr=0.1, fused=True)
    optimizer.step()
    other.step()
    assert not equal(buffers(weight), before)
    assert equal(buffers(weight), buffers(twin))


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns more often than they do by themselves."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_a_thread_that_looks_takes_nothing_away(hurried: None) -> None:
    """Here it looks while steps begin, write and end."""
    weight = nn.Parameter(lpq.quantizer("identity(dtype=float32)").quantize(torch.zeros(8, 8)))
    weight.grad = torch.full((8, 8), -1.0)
    optimizer = SGD([weight], lr=1.0)
    ended = threading.Event()
    errors: list[BaseException] = []

    def look() -> None:
        try:
            while not ended.is_set():
                weight.draft.written  # noqa: B018
                weight.dequantize()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    steps = 1500
    try:
        for _ in range(steps):
            optimizer.step()
    finally:
        ended.set()
        thread.join()
    assert not errors
    assert torch.equal(weight.dequantize(), torch.full((8, 8), float(steps)))


@pytest.mark.parametrize("text", FORMATS)
def test_what_is_assigned_to_data_is_encoded(text: str) -> None:
    weight, value = stored(text), torch.randn(64, 96)
    weight.data = value
    assert equal(buffers(weight), buffers(lpq.quantizer(text).quantize(value)))
    with pytest.raises(TypeError, match="a flattened weight that is stored as"):
        parameters_to_vector([weight])  # torch.cat cannot tell this from wrappers that would lose the weight
    vector_to_parameters(torch.zeros(64 * 96), [weight])
    assert not weight.dequantize().any()
    weight.data = lpq.quantizer(text).quantize(value)
    assert equal(buffers(weight), buffers(lpq.quantizer(text).quantize(value)))
    with pytest.raises(ValueError, match=r"is \[64, 96\], and what is assigned to its data \[2\]"):
        weight.data = torch.zeros(2)


def test_an_optimizer_that_assigns_to_data_trains() -> None:
    class Assigns(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.data = p.data - 0.3 * p.grad

    weight, twin = stored("mxfp8"), stored("mxfp8")
    Assigns([weight], lr=0.3).step()
    SGD([twin], lr=0.3).step()
    assert equal(buffers(weight), buffers(twin))


class Failing(SGD):
    """Its step writes to all its weights, and raises."""

    drafts: list[weakref.ref[Tensor]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        weights = self.param_groups[0]["params"]
        for weight in weights:
            weight.mul_(3)
        self.drafts = [weakref.ref(weight.draft.matrix) for weight in weights]
        raise RuntimeError("a mishap")


@pytest.mark.parametrize(
    "look",
    [
        lambda weight: weight.dequantize(),
        lambda weight: weight.row,
        lambda weight: weight.detach() + 0,
        lambda weight: weight.data.add_(0),
        lambda weight: SGD([weight], lr=0.3).step(),
    ],
    ids=["values", "operands", "reading", "writing", "stepping"],
)
@pytest.mark.filterwarnings("ignore::lpq.core.PrecisionWarning")
def test_drafts_of_a_step_that_raised_are_freed_when_one_of_them_is_looked_at(look: Callable[[Any], Any]) -> None:
    weights = [stored(seed=seed) for seed in range(3)]
    before = [buffers(weight) for weight in weights]
    optimizer = Failing(weights, lr=0.3)
    with pytest.raises(RuntimeError, match="a mishap"):
        optimizer.step()
    look(weights[0])
    assert [draft() for draft in optimizer.drafts] == [None] * 3
    assert all(equal(buffers(weight), was) for weight, was in zip(weights[1:], before[1:], strict=True))


def test_drafts_of_a_step_that_raised_are_freed_when_its_error_is_not_forgotten() -> None:
    weight = stored()
    optimizer = Failing([weight], lr=0.3)
    with pytest.raises(RuntimeError, match="a mishap") as raised:
        optimizer.step()
    assert not weight.draft.written
    assert optimizer.drafts[0]() is None
    assert raised.tb is not None  # its frames have all that they held


def test_a_layer_that_runs_after_a_step_that_raised_frees_its_drafts() -> None:
    model = lpq.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "mxfp8", weights="quantized")
    optimizer = Failing([layer.weight for layer in model], lr=0.3)
    with pytest.raises(RuntimeError, match="a mishap"):
        optimizer.step()
    model[0](torch.randn(32, 64))  # type: ignore[operator]
    assert [draft() for draft in optimizer.drafts] == [None] * 2


def test_the_step_after_one_that_raised_starts_from_what_is_stored() -> None:
    weight, twin = stored(), stored()
    with pytest.raises(RuntimeError, match="a mishap"):
        Failing([weight], lr=0.3).step()
    for p in (weight, twin):
        SGD([p], lr=0.3).step()
    assert equal(buffers(weight), buffers(twin))


def test_what_called_a_step_that_raised_is_not_kept() -> None:
    """Nor are its variables, once one of the weights is looked at: what to try again takes may have no room else."""
    model = lpq.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8", weights="quantized")
    optimizer = Failing([model[0].weight], lr=0.3)
    kept: list[weakref.ref[Tensor]] = []

    def train() -> None:
        y = model(torch.randn(32, 64))  # type: ignore[operator]
        y.sum().backward()
        kept.append(weakref.ref(y))
        optimizer.step()

    try:
        train()
    except RuntimeError:
        pass
    else:
        pytest.fail("it has not raised")
    model(torch.randn(32, 64))  # type: ignore[operator]
    assert kept[0]() is None
