"""The layers that take the output of a norm, and nothing else does: found by a run of the block that has the norm.

The block runs once on a few rows, as a copy in which each linear layer and each norm has a stand-in. A stand-in of a
layer notes that it was given the output of a norm, and a mode notes every other function of torch that gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from lpq.nn.adopted_norms import Found, lost_by
from lpq.nn.extended import class_before
from lpq.nn.grouped_linear import GroupedLayer
from lpq.nn.linear import Layer
from lpq.nn.norm_groups import Place, places_in
from lpq.nn.shared_states import why_states_differ
from lpq.nn.stand_ins import ReplacedForward, ScriptedModule, Trial, aside
from lpq.nn.unwrapping import children_inside
from lpq.registry.showing import listed
from lpq.torch_private.pytree import tree_leaves
from lpq.torch_private.tensors import local_part, version_of

ROWS = 4
ELSE = "something other than layers of lpq takes its output"
UNCALLED = "its block computes without calling it, as by a kernel that is given its weight"
MORE = "its block calls it with more than its input, as with a gate, and only a norm of its input alone is encoded"
AGAIN = "it runs twice in its block, or a layer that takes its output does"
WRITTEN = "its output is written to, or its input is afterwards"
REPLACED = "the forward of its block was replaced on the object: call lpq.fuse again without that"
REPLACED_INSIDE = "the forward of a module in its block was replaced on the object: call lpq.fuse again without that"
SCRIPTED = "a module in its block is compiled by torch.jit, which hides what takes its output: leave that one in Python"
LOST = "its {} would be lost, since a norm that encodes has attributes of such names: rename yours"
DESCRIBE = ("__get__", "size", "dim", "numel")
"""The names of functions that read no element: attributes of a tensor, and methods."""
MOVE = "; if it has kernels for a GPU alone, call lpq.fuse again once the model is there"
UNKNOWN = "its block does not run on a few rows by itself, which would show what takes its output"
NEEDS = "its block is called with {} beside its rows, so that a run on rows alone does not show what takes its output"


class Followers(NamedTuple):
    """The layers of lpq that take the output of a norm."""

    places: tuple[Place, ...]
    others: bool
    """Whether something else takes it, too."""


def norms_in(block: nn.Module, known: Callable[[nn.Module], Found | None]) -> dict[str, nn.Module]:
    """The norms of a block itself, by name, whose output its layers could take. A block that holds others, or embeds
    tokens, has none.

    Args:
        known: ``norm_of``, which keeps what it finds: each norm is asked about several times
    """
    inside = [m for m in block.modules() if m is not block]
    if any(isinstance(m, nn.Embedding | nn.ModuleList) and not isinstance(m, ParametrizationList) for m in inside):
        return {}
    widths = {m.in_features for m in inside if isinstance(m, Layer) and not isinstance(m, GroupedLayer)}
    inner = {name: m for name, m in children_inside(block).items() if not isinstance(m, torch.jit.ScriptModule | None)}
    children = [(name, m, m._parameters.get("weight")) for name, m in inner.items()]
    norms = {
        name: m for name, m, w in children if not (w is None or is_lazy(w)) and w.shape[-1:] and w.shape[-1] in widths
    }
    return {name: m for name, m in norms.items() if known(m) is not None}


def followers(
    block: nn.Module, norms: Mapping[str, nn.Module], known: Callable[[nn.Module], Found | None]
) -> dict[str, Followers | str]:
    """For each of these norms of a block, by name, the layers that take its output; or why its output is not to be
    encoded."""
    if not norms or "forward" in vars(block):
        return dict.fromkeys(norms, REPLACED)
    with aside():
        inputs = _inputs(block, next(iter(norms.values())))
    needs = _needs(block)
    for x, beside in inputs:
        uses = _Uses(block, known, device=x.device)
        try:
            like = uses.copy(block, uses.stand_for)
            with uses:
                out = class_before(block).forward(like, x, **beside, **dict.fromkeys(needs))
        except ReplacedForward:
            return dict.fromkeys(norms, REPLACED_INSIDE)
        except ScriptedModule:
            return dict.fromkeys(norms, SCRIPTED)
        except Exception as error:  # other code's, which may raise anything on such an input
            why = f"{UNKNOWN}: on {x.device.type} it raises {type(error).__name__}{MOVE * (x.device.type == 'cpu')}"
        else:
            break
    else:
        return dict.fromkeys(norms, NEEDS.format(listed(needs)) if needs else why)
    uses.note(out)
    by_norm: dict[str, Followers | str] = {}
    for name in norms:
        norm, lost = like._modules[name], lost_by(norms[name])
        outputs = norm.outputs
        takers = [place for place, x in uses.takes if any(x is y for y in outputs)]
        places = tuple(place for place in takers if isinstance(place[-1][2], Layer))
        others = len(places) < len(takers) or any(id(y) in uses.others for y in outputs)
        once = all(sum(place == other for other, _ in uses.takes) == 1 for place in places)
        written = any(version_of(t) != version for t, version in norm.unwritten)
        if lost:
            by_norm[name] = LOST.format(listed(lost))
        elif norm.more or not outputs:
            by_norm[name] = MORE if norm.more else UNCALLED
        elif places:
            layers = [place[-1][2] for place in places]
            differ = why_states_differ([m for m in layers if isinstance(m, Layer) and m.passes.plan is not None])
            twice = AGAIN if not once or len(outputs) > 1 else None
            by_norm[name] = (WRITTEN if written else twice) or differ or Followers(places, others)
        else:
            by_norm[name] = ELSE
    return {name: NEEDS.format(listed(needs)) if needs and why != ELSE else why for name, why in by_norm.items()}


def _needs(block: nn.Module) -> list[str]:
    """The parameters of its forward, behind the rows, that have no default and that nothing here could fill."""
    behind = [*signature(class_before(block).forward).parameters.values()][2:]
    named = [p for p in behind if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    return [p.name for p in named if p.default is Parameter.empty and p.name != "position_embeddings"]


def _inputs(block: nn.Module, norm: nn.Module) -> list[tuple[Tensor, dict[str, Any]]]:
    """A few rows, and the rotations of positions that attention in transformers is given beside them: as wide as the
    heads, which kernels of others ask for, or of one column, which heads of any width take."""
    weight: Any = norm._parameters["weight"]
    own = local_part(weight)
    device = torch.device("cpu") if own.is_meta else own.device
    x = torch.zeros(1, ROWS, weight.shape[0], dtype=own.dtype, device=device)
    parameters = signature(class_before(block).forward).parameters.values()
    if not any(p.name == "position_embeddings" or p.kind is Parameter.VAR_KEYWORD for p in parameters):
        return [(x, {})]
    widths = {width: None for m in block.modules() if isinstance(width := getattr(m, "head_dim", None), int)}
    rotations = [(x.new_ones(1, ROWS, width), x.new_zeros(1, ROWS, width)) for width in [*widths, 1]]
    return [(x, {"position_embeddings": rotation}) for rotation in rotations]


class _Uses(Trial):
    """The tensors that layers were given, and those that anything else was given."""

    def __init__(self, block: nn.Module, known: Callable[[nn.Module], Found | None], device: torch.device) -> None:
        super().__init__(device=device)
        self.known = known
        self.places = {place[-1][:2]: place for place in places_in(block)}
        self.takes: list[tuple[Place, Tensor]] = []
        self.others: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in DESCRIBE:
            self.note((args, kwargs))
        return func(*args, **(kwargs or {}))

    def stand_for(self, parent: nn.Module, name: str, child: nn.Module) -> nn.Module | None:
        if isinstance(child, GroupedLayer):
            return _Experts(self)
        if isinstance(child, nn.Linear | Layer):
            return _Linear(self.places[parent, name], child, self)
        return None if self.known(child) is None else _Norm(child)

    def note(self, values: Any) -> None:
        self.others.update({id(value): value for value in tree_leaves(values) if isinstance(value, Tensor)})


class _Norm(nn.Module):
    """Takes the place of a norm, with its parameters and its own attributes, which others may read, and keeps what it
    returns."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        vars(self).update({name: value for name, value in vars(norm).items() if not name.startswith("_")})
        self._parameters, self.outputs, self.more = norm._parameters, list[Tensor](), False
        self.unwritten: list[tuple[Tensor, int]] = []
        """Inputs and outputs, with the versions that they had."""

    def forward(
        self, x: Tensor, *args: Any, residual: Tensor | None = None, with_sum: bool = False, **more: Any
    ) -> Any:
        """Take what ``EncodingNorm`` takes."""
        self.outputs.append(torch.zeros(x.shape, dtype=x.dtype, device=x.device))
        self.unwritten += [(t, version_of(t)) for t in (x, self.outputs[-1])]
        self.more |= bool(args or more)
        if residual is not None:
            return self.outputs[-1], residual.clone()
        return (self.outputs[-1], x) if with_sum else self.outputs[-1]


class _Linear(nn.Module):
    """Takes the place of a linear layer, with its parameters, whose dtype others may ask for."""

    def __init__(self, place: Place, layer: Any, uses: _Uses) -> None:
        super().__init__()
        self.place, self.outputs, self.uses = place, layer.out_features, uses
        self._parameters = layer._parameters

    def forward(self, x: Tensor) -> Tensor:
        self.uses.takes.append((self.place, x))
        return torch.zeros(*x.shape[:-1], self.outputs, dtype=x.dtype, device=x.device)  # no function of x


class _Experts(nn.Module):
    """Takes the place of converted experts, which would note a pass and may send rows to other ranks."""

    def __init__(self, uses: _Uses) -> None:
        super().__init__()
        self.uses = uses

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.uses.note((args, kwargs))
        return torch.zeros_like(next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)))
