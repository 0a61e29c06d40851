"""Norms and gated blocks as functions in a forward of one's own: to the bit what torch's functions and layers make."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.comparing import equal, equal_states
from support.passes import Run, compiled, nodes_of, plainly, recomputed, step
from torch import Tensor, nn

import lpq

WIDTH, HIDDEN = 64, 96
RULES = {
    "mxfp8": [{"match": "*", "recipe": "mxfp8"}],
    "delayed": [{"match": "*", "recipe": "fp8-delayed"}],
    "several": [{"match": "k", "recipe": "mxfp8"}, {"match": "*", "recipe": "fp8-delayed"}],
}


class Attention(nn.Module):
    """Layers behind a norm whose parameters are the module's own, and a reader in high precision."""

    def __init__(self, fused: bool, centers: bool, others: bool) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.router = nn.Linear(WIDTH, WIDTH)
        self.fused, self.centers, self.others = fused, centers, others

    def normed(self, x: Tensor) -> Tensor:
        arguments = (self.scale, self.shift, 1e-6) if self.centers else (0.5 + self.scale, 1e-6)
        if self.fused:
            function: Any = lpq.nn.layer_norm if self.centers else lpq.nn.rms_norm
            readers = (self.q, self.k, self.v, *([self.router] if self.others else []))
            return function(x, (WIDTH,), *arguments, layers=readers)  # type: ignore[no-any-return]
        plain: Any = F.layer_norm if self.centers else F.rms_norm
        return plain(x, (WIDTH,), *arguments)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = self.normed(x)
        y = self.q(x) + torch.sin(self.k(x)) * self.v(x)
        return y + self.router(x) if self.others else y


def pair(name: str, centers: bool = False, others: bool = False) -> tuple[Any, Any]:
    """The same model without and with the function."""
    torch.manual_seed(0)
    plain = Attention(False, centers, others).bfloat16()
    nn.init.uniform_(plain.scale)
    fused = copy.deepcopy(plain)
    fused.fused = True
    for model in (plain, fused):
        lpq.convert(model, {"rules": [{"match": "router", "recipe": "skip"}, *RULES[name]]}, include="all")
    return plain, fused


def given(scale: float = 1.0) -> Tensor:
    return torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(1)).mul(scale).bfloat16()


@pytest.mark.parametrize("centers", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("others", [False, True], ids=["layers alone", "others"])
@pytest.mark.parametrize("name", RULES)
def test_a_norm_is_torch_s_and_encodes(centers: bool, others: bool, name: str) -> None:
    plain, fused = pair(name, centers, others)
    for scale in (1.0, 3.0):
        y = fused.normed(given(scale))
        assert isinstance(y, lpq.core.QuantizedTensor)
        assert equal(step(fused, given(scale)), step(plain, given(scale)))
        assert equal_states(fused.state_dict(), plain.state_dict())


@pytest.mark.starts
@pytest.mark.parametrize("run", [recomputed, compiled])
def test_under(run: Run) -> None:
    plain, fused = pair("mxfp8")
    for way in (plainly, run, plainly):
        assert equal(step(fused, given(), way), step(plain, given()))


def test_it_keeps_no_parameter_and_no_norm_in_a_copy() -> None:
    _, fused = pair("mxfp8")
    fused(given())
    ((norm),) = fused.q.passes.norms.values()
    assert not [p for p in norm.parameters() if p is not None]
    assert not copy.deepcopy(fused).q.passes.norms
    fused(given())
    assert len(fused.q.passes.norms) == 1


def test_without_a_layer_of_lpq_or_a_weight_it_is_torch_s() -> None:
    layer, x, weight = nn.Linear(WIDTH, WIDTH), given(), torch.rand(WIDTH).bfloat16()
    made = lpq.nn.rms_norm(x, (WIDTH,), weight, layers=(layer,))
    assert type(made) is Tensor
    assert torch.equal(made, F.rms_norm(x, (WIDTH,), weight))
    _, fused = pair("mxfp8")
    for function, own in ((lpq.nn.rms_norm, F.rms_norm), (lpq.nn.layer_norm, F.layer_norm)):
        made = function(x, (WIDTH,), layers=(fused.q,))
        assert type(made) is Tensor
        assert torch.equal(made, own(x, (WIDTH,)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.function: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(x, self.gate, self.up, self.down)
        return y


FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "silu": (lpq.nn.swiglu, F.silu),
    "gelu": (lpq.nn.geglu, F.gelu),
    "gelu by tanh": (
        lambda *of: lpq.nn.geglu(*of, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gated_block(name: str) -> None:
    function, act = FUNCTIONS[name]
    torch.manual_seed(0)
    net = lpq.convert(Gated().bfloat16(), "mxfp8", include="all")
    net.function = function
    found = step(net, given())
    assert any("FusedMLP" in node for node in nodes_of(net(given())))
    net.function = lambda x, gate, up, down: down(act(gate(x)) * up(x))
    assert equal(found, step(net, given()))


def test_an_approximation_that_gelu_does_not_have() -> None:
    net = Gated()
    with pytest.raises(ValueError, match="geglu: approximate='erf': it is one of 'none', 'tanh'"):
        lpq.nn.geglu(given(), net.gate, net.up, net.down, approximate="erf")  # type: ignore[arg-type]


def test_a_shape_that_is_not_the_input_s_is_refused_as_torch_refuses_it() -> None:
    _, fused = pair("mxfp8")
    x = given()
    for shape in ((WIDTH + 1,), (WIDTH // 2,)):
        with pytest.raises(RuntimeError, match="normalized_shape"):
            lpq.nn.rms_norm(x, shape, fused.scale, layers=(fused.q,))
        with pytest.raises(RuntimeError, match="normalized_shape"):
            lpq.nn.layer_norm(x, shape, fused.scale, layers=(fused.q,))


def test_layers_are_a_sequence_of_modules() -> None:
    _, fused = pair("mxfp8")
    wrong: tuple[Any, ...] = (fused.q, "q", (fused.q, "k"), (given(),))
    for layers in wrong:
        with pytest.raises(
            TypeError, match=r"layers (is|has) a \w+: it is a sequence of the modules that read the result"
        ):
            lpq.nn.rms_norm(given(), (WIDTH,), fused.scale, layers=layers)
    assert equal(
        *(
            lpq.nn.rms_norm(given(), (WIDTH,), fused.scale, layers=of).dequantize()
            for of in (nn.ModuleList([fused.q]), [fused.q])
        )
    )


@pytest.mark.parametrize("function", [lpq.nn.swiglu, lpq.nn.geglu], ids=["swiglu", "geglu"])
@pytest.mark.parametrize("at", ["gate", "up", "down"])
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_a_tensor_in_place_of_a_layer_is_refused(function: Any, at: str, recipe: str | None) -> None:
    net = nn.ModuleDict({"gate": nn.Linear(64, 96), "up": nn.Linear(64, 96), "down": nn.Linear(96, 64)})
    layers: dict[str, Any] = dict(net.items() if recipe is None else lpq.convert(net, recipe, include="all").items())
    layers[at] = layers[at].weight
    with pytest.raises(TypeError, match=f"{at} is a Parameter: it is the layer itself, not its weight or its output"):
        function(torch.randn(4, 64), **layers)
