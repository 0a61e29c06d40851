"""QuantizedStates: states that are stored in a format between steps, of any optimizer that steps parameters alone."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from formats.quantizers import QUANTIZERS
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import StepLR

import lpq
from lpq.core import QuantizedTensor
from lpq.observe import held_bytes
from lpq.optim import MasterWeights, QuantizedStates, rounding, states
from lpq.registry.errors import OptionError

FIRST, SECOND = "mxfp8", "fp8(scaling=block, pow2=false)"
ADAM = {"exp_avg": FIRST, "exp_avg_sq": SECOND}
Make = Callable[[Any], Optimizer]
CASES: dict[str, tuple[Make, dict[str, str]]] = {
    "adamw": (partial(AdamW, lr=1e-2), ADAM),
    "fused": (partial(AdamW, lr=1e-2, fused=True), {**ADAM, "exp_avg": "nvfp4"}),
    "adam": (partial(Adam, lr=1e-2), ADAM),
    "amsgrad": (partial(AdamW, lr=1e-2, amsgrad=True, maximize=True), {**ADAM, "max_exp_avg_sq": SECOND}),
    "coupled": (lambda params: AdamW([{"params": params, "decoupled_weight_decay": False}], weight_decay=0.5), ADAM),
    "adafactor": (partial(Adafactor, lr=1e-2), {"row_var": SECOND, "col_var": SECOND}),
    "muon": (partial(Muon, lr=1e-2), {"momentum_buffer": FIRST}),
    "sgd": (partial(SGD, lr=1e-2, momentum=0.9), {"momentum_buffer": "fp8"}),
}


def _params(optimizer: str = "", dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    shapes = [(64, 128), (2, 4096), (16, 16), (32, 16, 16), (4096,)]
    if optimizer == "muon":
        shapes = shapes[:3]
    random = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in shapes]


def _give_gradients(params: list[nn.Parameter], step: int) -> None:
    random = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=random).mul_(torch.rand(p.shape, generator=random) ** 8).to(p.dtype)


def _train(params: list[nn.Parameter], optimizer: Optimizer, first: int = 0, last: int = 3) -> list[nn.Parameter]:
    for step in range(first, last):
        _give_gradients(params, step)
        optimizer.step()
        optimizer.zero_grad()
    return params


def _same(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _stored(optimizer: Optimizer) -> list[dict[str, QuantizedTensor]]:
    found = [
        {key: value for key, value in state.items() if isinstance(value, QuantizedTensor)}
        for state in optimizer.state.values()
    ]
    return [state for state in found if state]


def _decoded(state: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A state as the wrapped optimizer takes it, decoded by hand."""
    found = {}
    for key, value in state.items():
        name, held = key.removesuffix("_root"), isinstance(value, QuantizedTensor)
        value = value.dequantize(torch.float32) if held else value.clone()
        value = value**2 if name != key else value
        found[name] = value if key == "step" else value.to(dtype)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_wrapped_optimizer_s_on_what_the_states_decode_to(case: str, dtype: torch.dtype) -> None:
    """Bit for bit, but for AdamW, which is computed in fp32."""
    make, formats = CASES[case]
    ours, close = _params(case, dtype), case in ("adamw", "fused")
    own = torch.float32 if close else dtype
    optimizer = QuantizedStates(make(ours), **formats)
    for step in range(3):
        theirs = [nn.Parameter(p.detach().to(own, copy=True)) for p in ours]
        plain = make(theirs)
        for p, q in zip(ours, theirs, strict=True):
            plain.state[q] = _decoded(optimizer.state[p], own)
        _give_gradients(ours, step)
        for p, q in zip(ours, theirs, strict=True):
            assert p.grad is not None
            q.grad = p.grad.to(own)
        for one in (optimizer, plain):
            one.step()
        if close:
            for a, b in zip(ours, theirs, strict=True):
                if "exp_avg_sq_root" in optimizer.state[a]:  # others are stepped by torch, in bf16 if they are
                    rtol = 2**-7 if dtype == torch.bfloat16 else 1e-6
                    torch.testing.assert_close(a, b.to(dtype), rtol=rtol, atol=1e-6)
        else:
            assert _same(ours, theirs), step
    assert {key for state in _stored(optimizer) for key in state} == {
        form.key for name, form in optimizer.forms.items() if name not in ("row_var",)
    }


def test_a_format_with_one_range_for_a_tensor_warns_as_that_of_second_moments() -> None:
    for text in ("fp8", "nvfp4"):
        with pytest.warns(UserWarning, match=rf"exp_avg_sq of AdamW as {text}, .*blocks with scales in fp32"):
            QuantizedStates(AdamW(_params()), exp_avg_sq=text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in (SECOND, "fp8(scaling=row)"):
            QuantizedStates(AdamW(_params()), exp_avg=FIRST, exp_avg_sq=text)


def test_masters_report_what_is_stored_and_what_states_take() -> None:
    model = lpq.convert(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)), "mxfp8", weights="quantized")
    told = [MasterWeights(SGD(model.parameters(), lr=0.1), keep=keep).report() for keep in (True, False)]
    held = sum(held_bytes(layer.weight) for layer in model)
    stored = f"mxfp8: 2 weights, 16384 elements in {held} bytes on this rank; "
    others = "\nnot quantized: 2 parameters, 192 elements in 768 bytes on this rank"
    assert told == [
        f"{stored}fp32 masters in 65536 bytes{others}",
        f"{stored}no masters, fp32 copies while a step runs{others}",
    ]
    inner = QuantizedStates(AdamW(model.parameters()), **ADAM)
    optimizer = MasterWeights(inner)
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    assert optimizer.report().endswith(f"{others}\n{inner.report()}")


def test_what_is_small_or_a_vector_or_would_not_shrink_stays_and_a_report_tells() -> None:
    params = _params()
    optimizer = QuantizedStates(Adafactor(params), row_var=SECOND, col_var=SECOND, variance=SECOND)
    assert "known after a step" in optimizer.report()
    _train(params, optimizer, last=1)
    assert [[*state] for state in _stored(optimizer)] == [["col_var_root"]]  # of [2, 4096] alone
    told = optimizer.report()
    assert "row_var: fp8(scaling=block, pow2=false), of its root, of 0 tensors" in told
    assert "col_var: fp8(scaling=block, pow2=false), of its root, of 1 tensors, 4096 elements in 4224 bytes" in told
    assert "because it is a vector, or has fewer than 4096 elements: [4096]" in told
    tall = [nn.Parameter(torch.randn(5000, 2))]
    column = QuantizedStates(Adafactor(tall), row_var="fp8(scaling=row)")
    _train(tall, column, last=1)
    assert "it would not be smaller: [5000, 1]" in column.report()
    few = QuantizedStates(AdamW(params), least=8, **ADAM)
    _train(params, few, last=1)
    assert len(_stored(few)) == 4
    assert "because None" not in few.report()  # what is stored is not listed among what stays


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_states_that_lpq_does_not_encode_stay_and_the_steps_are_the_wrapped_optimizer_s(dtype: torch.dtype) -> None:
    ours, theirs = _params(dtype=dtype), _params(dtype=dtype)
    optimizer = QuantizedStates(AdamW(ours, lr=1e-2), **ADAM)
    _train(theirs, AdamW(theirs, lr=1e-2))
    assert _same(_train(ours, optimizer), theirs)
    assert _stored(optimizer) == []
    assert f"as it was, because it is of {dtype}, which lpq does not encode: [64, 128]" in optimizer.report()


def test_the_wrapped_optimizer_begins_with_states_of_its_own_where_it_takes_the_step() -> None:
    """Fused, AdamW counts steps on the device; AdamW would not find a count there that lpq began on the host."""
    narrow = nn.Parameter(torch.randn(5000, 2, dtype=torch.bfloat16))
    inner, begun = AdamW([narrow], fused=True), []
    optimizer, step = QuantizedStates(inner, **ADAM), inner.step
    inner.step = lambda: begun.append(len(inner.state[narrow])) or step()
    narrow.grad = torch.randn_like(narrow)
    optimizer.step()
    assert set(begun) == {0}
    assert [[*state] for state in _stored(optimizer)] == [["exp_avg"]]  # a stored ``exp_avg_sq`` would not be smaller


def test_a_nan_in_a_gradient_reaches_the_weights_of_its_block_alone() -> None:
    params = _params()
    optimizer = QuantizedStates(AdamW(params, lr=1e-2), **ADAM)
    _train(params, optimizer)
    _give_gradients(params, 3)
    gradient = params[1].grad
    assert gradient is not None
    gradient[1, 300] = torch.nan
    optimizer.step()
    _train(params, optimizer, 4, 6)
    assert [bool(p.isnan().any()) for p in params] == [False, True, False, False, False]
    rows, cols = params[1].isnan().nonzero(as_tuple=True)
    assert {*rows.tolist()} == {1}
    assert {*cols.tolist()} == {*range(256, 384)}, "128 elements share the scale of the second moment"


def test_states_of_sparse_gradients_stay() -> None:
    layers = [nn.Embedding.from_pretrained(torch.ones(128, 64), freeze=False, sparse=True) for _ in range(2)]
    plain, wrapped = (SGD(layer.parameters(), lr=1e-2, momentum=0.9) for layer in layers)
    states_of_sparse = QuantizedStates(wrapped, momentum_buffer=FIRST)
    for step in range(3):
        for layer, optimizer in zip(layers, (plain, states_of_sparse), strict=True):
            layer(torch.tensor([1, 2 + step])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(layers[0].weight, layers[1].weight)
    assert "because its layout is torch.sparse_coo" in states_of_sparse.report()


# ---------------------------------------------------------------------------------- second moments


def _update(state: dict[str, Any], formats: dict[str, str], gradient: Tensor | None = None) -> Tensor:
    """The update of a step from this state, without a gradient or with one."""
    p = nn.Parameter(torch.zeros(state["exp_avg"].shape))
    plain = AdamW([p], lr=1.0, weight_decay=0.0)
    optimizer = QuantizedStates(plain, least=1, **formats) if formats else plain
    groups = plain.state_dict()["param_groups"]
    optimizer.load_state_dict(copy.deepcopy({"state": {0: state}, "param_groups": groups}))
    p.grad = torch.zeros_like(p) if gradient is None else gradient
    optimizer.step()
    return p.detach().abs()


@st.composite
def _moments(draw: st.DrawFn) -> dict[str, Any]:
    """Moments of all sizes beside each other, some of which are zero."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = draw(st.sampled_from([(1, 32), (3, 128), (16, 48), (130, 256)]))
    deep, across = draw(st.floats(0, 40)), draw(st.floats(0, 20))
    sizes = torch.rand(shape, generator=random) * deep + torch.rand(shape[0], 1, generator=random) * across
    root = (-sizes).exp2() * draw(st.sampled_from([1.0, 1e-4, 3e4]))
    root *= torch.rand(shape, generator=random) > draw(st.sampled_from([0.0, 0.3, 0.99]))
    m = root * (torch.rand(shape, generator=random) * 6 - 3)
    return {"step": torch.tensor(draw(st.sampled_from([1.0, 1000.0]))), "exp_avg": m, "exp_avg_sq": root.square()}


@given(_moments(), st.sampled_from([*QUANTIZERS, SECOND, "fp8(scaling=block, pow2=false, dtype=e5m2)"]))
def test_no_update_is_more_than_four_times_the_exact_one(state: dict[str, Any], text: str) -> None:
    """Whatever the format: twice by the first moment, and twice by the root of the second. Momentum and gradient may
    cancel in the exact update, so it is compared with the one where both have the same sign."""
    moved = torch.randn(state["exp_avg"].shape, generator=torch.Generator().manual_seed(0)) * state["exp_avg"]
    for gradient in (torch.zeros_like(moved), moved):
        exact = _update({**state, "exp_avg": state["exp_avg"].abs()}, {}, gradient.abs())
        for formats in ({"exp_avg": text, "exp_avg_sq": text}, {"exp_avg": text, "exp_avg_sq": SECOND}):
            try:
                found = _update(state, formats, gradient)
            except OptionError:
                continue  # formats that round otherwise are refused
            assert bool((found <= exact * 4 * (1 + 1e-5)).all()), formats


def test_an_update_would_be_more_if_lost_elements_were_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    root = torch.logspace(0, -9, 128).view(1, -1)
    state = {"step": torch.tensor(100.0), "exp_avg": root * 0.1, "exp_avg_sq": root.square()}
    exact, formats = _update(state, {}), {"exp_avg": "fp8(dtype=e5m2)", "exp_avg_sq": SECOND}
    assert bool((_update(state, formats) <= exact * 4).all())
    monkeypatch.setattr(states, "raised", lambda root, *_: root)
    assert bool((_update(state, formats) > exact * 20).any())


def test_a_second_moment_falls_without_a_gradient() -> None:
    params = [nn.Parameter(torch.zeros(32, 128))]
    optimizer = QuantizedStates(AdamW(params, lr=0.0), **ADAM)
    _train(params, optimizer, last=1)
    root = optimizer.state[params[0]]["exp_avg_sq_root"].dequantize()
    for _ in range(50):
        params[0].grad = torch.zeros(32, 128)
        optimizer.step()
    torch.testing.assert_close(optimizer.state[params[0]]["exp_avg_sq_root"].dequantize(), root * 0.999**25)


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("formats", "says"),
    [
        ({}, "got no format, and AdamW keeps exp_avg, exp_avg_sq: give one for each"),
        ({"momentum_buffer": "mxfp8"}, "got a format for 'momentum_buffer', and AdamW keeps exp_avg, exp_avg_sq"),
        ({"exp_avgs": "mxfp8"}, "did you mean 'exp_avg' or 'exp_avg_sq'"),
        ({"exp_avg_sq": "mxfp8"}, "cannot store exp_avg_sq of AdamW as mxfp8: what falls by a factor of 0.9995"),
        ({"exp_avg": "nvfp4(stochastic=true)"}, "cannot store exp_avg of AdamW .*: it rounds at random"),
        ({"exp_avg": "mxfp9"}, "mxfp9"),
        ({"exp_avg": "mxfp8", "exp_avg_sq": None}, "got exp_avg_sq=None: give a format.*or leave exp_avg_sq out"),
    ],
)
def test_formats_that_do_not_fit_are_refused_in_words(formats: dict[str, Any], says: str) -> None:
    with pytest.raises((OptionError, LookupError), match=says):
        QuantizedStates(AdamW(_params()), **formats)


@pytest.mark.parametrize("least", [-1, True, "x", 1.5])
def test_a_least_size_that_is_none_is_refused(least: Any) -> None:
    with pytest.raises(OptionError, match=r"least=.*: it is a whole number of elements from 0 on"):
        QuantizedStates(AdamW(_params()), least=least, exp_avg="mxfp8")


class Counting(SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize(
    ("wrapped", "says"),
    [
        (lambda p: p, "got a list: make one first"),
        (lambda p: torch.optim.LBFGS(p), r"QuantizedStates cannot wrap LBFGS: it needs a closure in each step"),
        (lambda p: torch.optim.SparseAdam(p), "SparseAdam.* does not support dense.*: use the optimizer alone, or one"),
        (lambda p: Counting(p, momentum=0.9), "Counting keeps 'k' in its groups"),
        (lambda p: QuantizedStates(AdamW(p), exp_avg="mxfp8"), "got a QuantizedStates: name all states at once"),
        (lambda p: MasterWeights(AdamW(p)), r"put it inside, MasterWeights\(QuantizedStates"),
    ],
)
@pytest.mark.filterwarnings("ignore:MasterWeights has nothing to do")
def test_optimizers_that_cannot_be_wrapped_are_refused_in_words(wrapped: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        QuantizedStates(wrapped(_params()), exp_avg="mxfp8")


def test_an_optimizer_without_states_is_refused() -> None:
    with pytest.raises(OptionError, match="SGD keeps no state of a parameter"):
        QuantizedStates(SGD(_params()), momentum_buffer="mxfp8")


# ---------------------------------------------------------------------------------- as users of torch expect


def test_a_state_dict_loads_into_another_one_and_a_copy_and_a_pickle_go_on_alike() -> None:
    make = partial(AdamW, lr=1e-2)
    params = _params()
    optimizer = QuantizedStates(make(params), **ADAM)
    _train(params, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = copy.deepcopy(params)
    other = QuantizedStates(make(loaded), **ADAM)
    other.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy((params, optimizer))
    unpickled = pickle.loads(pickle.dumps((params, optimizer)))
    held = optimizer.state[params[0]]["exp_avg"].buffers[0].data_ptr()
    _train(params, optimizer, 3, 5)
    assert optimizer.state[params[0]]["exp_avg"].buffers[0].data_ptr() == held  # it is written in place
    for again, one in ((loaded, other), copied, unpickled):
        assert _same(_train(again, one, 3, 5), params)
        assert one.param_groups is one.optimizer.param_groups
        assert one.state is one.optimizer.state


def test_states_of_an_optimizer_that_was_not_wrapped_are_encoded_when_it_is_or_when_they_are_loaded() -> None:
    params = _params()
    plain = AdamW(params, lr=1e-2)
    _train(params, plain)
    before, loaded = copy.deepcopy((params, plain)), copy.deepcopy(params)
    other = QuantizedStates(AdamW(loaded, lr=1e-2), **ADAM)
    other.load_state_dict(copy.deepcopy(plain.state_dict()))
    wrapped = QuantizedStates(before[1], **ADAM)
    assert len(_stored(wrapped)) == len(_stored(other)) == 3
    assert _same(_train(before[0], wrapped, 3, 5), _train(loaded, other, 3, 5))
    rows = QuantizedStates(AdamW(_params(), lr=1e-2), exp_avg="fp8(scaling=row)", exp_avg_sq=SECOND)
    rows.load_state_dict(other.state_dict())
    assert {str(state["exp_avg"].quantizer) for state in _stored(rows)} == {"fp8(scaling=row)"}


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_a_format_is_tried_out_by_the_reference_on_a_cpu(default: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever kernels are allowed, and wherever tensors are made by default."""
    for name in ("why_not", "least_kept"):
        monkeypatch.setattr(states, name, getattr(rounding, name).__wrapped__)  # not what was found before
    monkeypatch.setenv("LPQ_KERNELS", "cuda")
    params = _params()
    with torch.device(default):
        optimizer = QuantizedStates(AdamW(params), **ADAM)
    monkeypatch.delenv("LPQ_KERNELS")
    _train(params, optimizer, last=1)
    assert len(_stored(optimizer)) == 3


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_a_format_is_tried_out_in_fp32_whatever_the_default_is(
    default: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 a second moment falls by 0.999 to 1, and a format in which it would never fall was taken."""
    for name in ("why_not", "least_kept"):
        monkeypatch.setattr(states, name, getattr(rounding, name).__wrapped__)
    monkeypatch.setattr(rounding, "_numbers", rounding._numbers.__wrapped__)
    torch.set_default_dtype(default)
    try:
        optimizer = QuantizedStates(AdamW(_params()), **ADAM)
        with pytest.raises(OptionError, match=r"what falls by a factor of 0\.9995 in a step would never fall in it"):
            QuantizedStates(AdamW(_params()), exp_avg_sq="mxfp8")
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.forms == QuantizedStates(AdamW(_params()), **ADAM).forms


def test_groups_and_schedules_are_one_with_the_wrapped_optimizer() -> None:
    params = _params()
    optimizer = QuantizedStates(AdamW(params[:2], lr=1.0), **ADAM)
    optimizer.add_param_group({"params": params[2:], "lr": 2.0})
    schedule = StepLR(optimizer, 1, gamma=0.5)
    _train(params, optimizer, last=1)
    schedule.step()
    assert [group["lr"] for group in optimizer.optimizer.param_groups] == [0.5, 1.0]
    assert len(_stored(optimizer)) == 3


class Failing(AdamW):
    """An optimizer that raises at one step of a large parameter, and looks at what is decoded."""

    large, fails = 0, False

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        decoded = [s for s in self.state.values() if "exp_avg" in s and not isinstance(s["exp_avg"], QuantizedTensor)]
        self.large = max(self.large, sum(s["exp_avg"].numel() >= 4096 and s["exp_avg"].dim() > 1 for s in decoded))
        if self.fails and self.large:
            raise RuntimeError("no")
        return result


def test_the_states_of_one_parameter_are_decoded_at_a_time_and_an_error_leaves_them_stored() -> None:
    params = _params()
    wrapped = Failing(params)
    optimizer = QuantizedStates(wrapped, **ADAM)
    _train(params, optimizer)
    assert wrapped.large == 1
    before = [{k: [b.clone() for b in t.buffers] for k, t in state.items()} for state in _stored(optimizer)]
    wrapped.fails = True
    _give_gradients(params, 9)
    with pytest.raises(RuntimeError, match="no"):
        optimizer.step()
    after = [{k: t.buffers for k, t in state.items()} for state in _stored(optimizer)]
    assert len(after) == 3
    assert all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for old, new in zip(before, after, strict=True)
        for key in old
        for x, y in zip(old[key], new[key], strict=True)
    )
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(params)]


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    params, calls = _params(), []
    optimizer = QuantizedStates(AdamW(params), **ADAM)

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        _give_gradients(params, 0)
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert calls == [True]
    optimizer.optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(TypeError, match="AdamW has hooks of whole steps: register them on the QuantizedStates"):
        optimizer.step(closure)
    assert calls == [True], "it is refused at once"


# ---------------------------------------------------------------------------------- inside MasterWeights


@pytest.mark.filterwarnings("ignore:masters begin with")
@pytest.mark.parametrize(("case", "keep"), [(c, True) for c in ("adamw", "muon", "adafactor")] + [("adamw", False)])
def test_inside_master_weights_states_are_the_masters(case: str, keep: bool) -> None:
    make, formats = CASES[case]
    quantizer, value = lpq.quantizer("fp8"), torch.randn(64, 128)
    weight = nn.Parameter(quantizer.quantize(value))
    twin = nn.Parameter(weight.dequantize())
    ours = MasterWeights(QuantizedStates(make([weight]), **formats), keep=keep)
    theirs = QuantizedStates(make([twin]), **formats)
    assert {*theirs.optimizer.defaults} == {*make([twin]).defaults}, "the trial has defaults of its own"
    for step in range(3):
        _give_gradients([weight], step)
        _give_gradients([twin], step)
        ours.step()
        theirs.step()
        assert torch.equal(weight.dequantize(), quantizer.quantize(twin.detach()).dequantize())
        if not keep:
            twin.data.copy_(weight.dequantize())
    state = ours.state_dict()
    assert {*state["state"][0]} == {*theirs.state[twin], *(["master"] if keep else [])}
    again = nn.Parameter(copy.deepcopy(weight.detach()))
    other = MasterWeights(QuantizedStates(make([again]), **formats), keep=keep)
    other.load_state_dict(copy.deepcopy(state))
    for one, p in ((ours, weight), (other, again)):
        _give_gradients([p], 7)
        one.step()
    assert torch.equal(weight.dequantize(), again.dequantize())
