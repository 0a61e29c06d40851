"""Norms of other libraries that encode their output: known by what they compute, and not by their class.

A module is tried on a few rows. If a norm that lpq knows has the same output and gradients, to the bit, that norm
may stand for it. Functions of torch are not counted, as modules compute a norm by various ones. So rows are of many
sizes, by which a clamp or another place of epsilon shows, and a module that decides by the shape of its input is left
alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lpq.nn.extended import Extension, clashes, class_before, extend, restore
from lpq.nn.linear import Layer
from lpq.nn.norm_groups import Place
from lpq.nn.norms import EncodingNorm
from lpq.nn.stand_ins import Read, Trial
from lpq.operations.norms import NormKind
from lpq.operations.operators import ORDINARY
from lpq.torch_private.pytree import tree_leaves
from lpq.torch_private.tensors import local_part

TRIED = ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.float16, False))
"""The dtypes of inputs and parameters, and whether autocast is on: a norm in fp32 is to compute the same with it."""
SIZES = (1.0, 1e-3, 1e-6, 0.0, 1e6)
"""The factors of rows: numbers beside which epsilon is small, and others."""
EXTREMES = (1e25, math.inf, math.nan)
"""The factors of rows beside which the gradient of a weight shows nothing. They come with large weights."""
OURS = {"residual", "with_sum"}
"""Arguments of ``EncodingNorm.forward``, by which layers of lpq call an adopted norm."""


class Found(NamedTuple):
    """How a module computes a norm, and the attributes by which it does."""

    norm: NormKind
    reads: tuple[Read, ...]


def norm_of(module: nn.Module) -> Found | None:
    """Return how a module computes; None if it is no norm that lpq knows."""
    if isinstance(module, EncodingNorm):
        return Found(module.norm, module.lpq_reads)
    if isinstance(module, torch.jit.ScriptModule):
        return None
    parameters = module._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    own = [p for p in parameters.values() if p is not None]
    if weight is None or len(own) != 1 + (bias is not None) or weight.dim() != 1:
        return None
    if not all(type(local_part(p)) in ORDINARY for p in own):  # FSDP2 makes its shards ordinary for a pass
        return None
    if "forward" in vars(module) or any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return None
    if _may_take_ours(module):
        return None
    return _tried(module, [*_kinds(module, bias is not None)])


def lost_by(norm: nn.Module) -> list[str]:
    """The attributes that a norm would lose if it was adopted."""
    return [] if isinstance(norm, EncodingNorm) else clashes(norm, AdoptedNorm)


def _may_take_ours(module: nn.Module) -> bool:
    """Whether a module's forward may be given an argument that has one of our names, and its own meaning."""
    try:
        parameters = signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a compiled function, whose arguments nobody knows
        return True
    return any(parameter.name in OURS or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def adopt(
    module: nn.Module,
    found: Found,
    consumers: tuple[Layer, ...],
    places: tuple[Place, ...] = (),
    serves_others: bool = False,
) -> None:
    """Have this very module encode its output for these layers: parameters, hooks and references to it stay."""
    if not isinstance(module, EncodingNorm):
        extend(module, AdoptedNorm)
        vars(module).update(lpq_norm=found.norm, lpq_reads=found.reads)
    assert isinstance(module, EncodingNorm)
    module.consumers, module.places, module.serves_others = consumers, places, serves_others


def release(module: EncodingNorm) -> None:
    """Make an adopted norm what it was, and have another one encode nothing."""
    if isinstance(module, AdoptedNorm):
        restore(module, "lpq_norm", "lpq_reads", "lpq_traced", "_calls", "consumers", "places", "serves_others")
    else:
        module.consumers, module.places, module.serves_others = (), (), False


class AdoptedNorm(Extension, EncodingNorm):
    """A norm of another class, which the subclass extends as well."""

    lpq_norm: NormKind

    @property
    def norm(self) -> NormKind:
        return self.lpq_norm


def _kinds(module: nn.Module, biased: bool) -> Iterator[NormKind]:
    """The norms that a module with these attributes may be."""
    values = {vars(module).get(name) for name in ("eps", "variance_epsilon", "epsilon")}
    epsilons: list[float | None] = [value for value in values if isinstance(value, float)]
    for eps in epsilons or [None]:
        if eps is not None:
            yield NormKind(eps, centers=True)
        if not biased:
            yield from (NormKind(eps), NormKind(eps, rounds=True), NormKind(eps, offset=True))


def _tried(module: nn.Module, kinds: Sequence[NormKind]) -> Found | None:
    """The first of these norms that a module computes, and its gradients; None if it computes something else."""
    names = [name for name, p in module._parameters.items() if p is not None]
    weight: Any = module._parameters["weight"]
    cols, trial = weight.shape[0], _Asking(grads=True)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device="cpu", dtype=torch.float32)

    def run(x: Tensor, **parameters: Tensor) -> Tensor:
        like._parameters = {**module._parameters, **parameters}
        trial.parameters = [*parameters.values()]
        y: Tensor = class_before(module).forward(like, x)
        trial.parameters = None
        return y

    try:
        with trial:
            like = trial.copy(module, lambda *_: None)
            own = like._parameters
            generator = torch.Generator("cpu").manual_seed(0)
            for dtype, casts in TRIED:
                sizes = torch.tensor((*SIZES, *EXTREMES) if casts else SIZES, device="cpu", dtype=torch.float32)
                x, dy = drawn(len(sizes), cols).mul(sizes[:, None]).to(dtype), drawn(len(sizes), cols).to(dtype)
                values = {name: drawn(cols).mul(SIZES[-1] if casts else 1).to(dtype) for name in names}
                with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                    computed = [*_computed(run, x, dy, values)]
                kinds = [k for k in kinds if all(map(_same, computed, _computed(k.compute, x, dy, values)))]
                if trial.asks or not kinds:
                    return None
    except Exception:  # other code's, which may raise anything on such an input
        return None
    like._parameters = own
    if trial.drew or trial.wrote():
        return None
    return Found(kinds[0], tuple(attribute for attribute in trial.of() if attribute.name not in names))


class _Asking(Trial):
    """A trial of a norm, whose functions are not compared. Its forward may ask for the last size of a tensor, which is
    the norm's own."""

    parameters: Sequence[Tensor] | None = None
    """The parameters of the norm, while its forward runs."""
    asks = False
    """Whether the forward got something else of another tensor by which it may decide, as a number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if self.parameters is None or any(args[:1] and args[0] is p for p in self.parameters):
            return result
        if isinstance(result, torch.Size):
            return _LastOf(result)
        harmless = all(isinstance(value, Tensor | torch.dtype | torch.device | None) for value in tree_leaves(result))
        self.asks |= not (harmless or (func is Tensor.size and [*args[1:], *(kwargs or {}).values()] == [-1]))
        return result


class _LastOf(tuple[int, ...]):
    """A shape of which only the last size may be asked for. Functions of torch take it, as ``view`` does."""

    def __getitem__(self, at: Any) -> Any:
        if at not in (-1, slice(-1, None)):
            raise TypeError("a norm asks for another size than its own")
        return super().__getitem__(at)

    __iter__ = __len__ = __contains__ = __add__ = __mul__ = __rmul__ = index = count = None  # type: ignore[assignment]
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = None  # type: ignore[assignment]


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _computed(
    function: Callable[..., Tensor], x: Tensor, dy: Tensor, parameters: Mapping[str, Tensor]
) -> Iterator[Tensor]:
    """The output, and then the gradients of the input and of the parameters, which nobody needs of another output."""
    x, *others = leaves = [t.detach().requires_grad_() for t in (x, *parameters.values())]
    y = function(x, **dict(zip(parameters, others, strict=True)))
    yield y
    yield from torch.autograd.grad(y, leaves, dy)
