"""The share of a model that a conversion reaches: of its matrices, and of the products of its linear layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from lpq.nn.fused_experts import holds_experts
from lpq.nn.grouped_linear import GroupedLayer
from lpq.nn.linear import Layer
from lpq.nn.names import first_few, grouped, plain_name
from lpq.nn.transposed import holds_transposed
from lpq.registry.showing import Readable

LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
"""Modules whose matrix is read by rows and multiplied by nothing."""


@dataclass(frozen=True)
class Part:
    """A matrix, or a stack of them, that one module holds."""

    module: str
    """The module's name."""
    name: str
    """The name in reports: the module's, or the parameter's if the module has several."""
    kind: str
    """The class of the module."""
    elements: int
    multiplied: bool
    """Whether it is multiplied by something: the matrix of an embedding is not."""


@dataclass(frozen=True)
class Coverage(Readable):
    """How much of a model is converted. A parameter with two or more dimensions larger than 1 counts as matrices; so
    does the weight of a convolution."""

    converted: int = 0
    """Elements of the matrices of converted modules; a parameter that several modules share counts once."""
    total: int = 0
    """Elements of all matrices."""
    work: float | None = None
    """The converted part of the work in linear layers, each counted by the weights that a token is multiplied by; None
    if there are no linear layers."""
    unknown: int = 0
    """Elements of unconverted matrices that no linear layer and no embedding holds, as convolutions and stacks of
    experts."""
    left: tuple[Part, ...] = ()
    """Matrices that are not converted, the largest first."""

    @property
    def share(self) -> float:
        """The converted part of the matrices; 1 if there are none."""
        return self.converted / self.total if self.total else 1.0

    def __str__(self) -> str:
        if not self.total:
            return "the model has no matrices"
        text = f"{percent(self.share)} of the matrix parameters are converted ({self.converted:,} of {self.total:,})"
        if self.work is not None:
            where = f"linear layers (the work of {self.unknown:,} others is not known)" if self.unknown else "products"
            text += f", {percent(self.work)} of the work in {where}"
        return f"{text}; not converted: {largest(self.left, self.total)}" if self.left else text

    def of(self, modules: Collection[str]) -> tuple[Part, ...]:
        """The matrices among ``left`` that modules of these names hold."""
        return tuple(part for part in self.left if part.module in modules)

    @property
    def multiplied(self) -> int:
        """Elements of all matrices but embeddings."""
        return self.total - sum(part.elements for part in self.left if not part.multiplied)


def coverage(model: nn.Module, converted: Collection[str]) -> Coverage:
    """Count the matrices of a model in which the modules of these names are converted, with all modules inside."""
    owners: dict[int, list[tuple[Part, bool]]] = {}
    work = [0, 0]
    inside: str | None = None
    reached = {plain_name(name) for name in converted}
    for own_name, module in model.named_modules():
        name = plain_name(own_name)
        if inside is not None and not (name.startswith(f"{inside}.") or inside == ""):
            inside = None
        if inside is None and name in reached:
            inside = name
        own = [(n, p) for n, p in matrices(module) if not is_lazy(p)]
        for key, parameter in own:
            called = name if key == "weight" or len(own) == 1 else f"{name}.{key}".strip(".")
            part = Part(name, called, type(module).__name__, parameter.numel(), not isinstance(module, LOOKUPS))
            owners.setdefault(id(parameter), []).append((part, inside is not None))
            if is_linear(module):  # a computed weight has a parameter of another name
                each = parameter.numel() // (len(parameter) if _is_grouped(module) else 1)  # a row meets one matrix
                work[0] += each if inside is not None else 0
                work[1] += each
    rest = [next((p for p, _ in of if p.multiplied), of[0][0]) for of in owners.values() if not any(c for _, c in of)]
    usual = {plain_name(n) for n, module in model.named_modules() if is_linear(module) or isinstance(module, LOOKUPS)}
    total = sum(of[0][0].elements for of in owners.values())
    return Coverage(
        converted=total - sum(part.elements for part in rest),
        total=total,
        work=work[0] / work[1] if work[1] else None,
        unknown=sum(part.elements for part in rest if part.module not in usual),
        left=tuple(sorted(rest, key=lambda part: -part.elements)),
    )


def matrices(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of the module itself that count as matrices, or will once they are there."""
    named = module._parameters.items()
    own = [(name, p) for name, p in named if p is not None and not name.endswith("bias")]  # [groups, N]
    return [(name, p) for name, p in own if is_lazy(p) or sum(size != 1 for size in p.shape) > 1]


def is_linear(module: nn.Module) -> bool:
    """Whether the module multiplies each of its weights by each row of its input, once."""
    return isinstance(module, nn.Linear | Layer) or holds_transposed(module) or _is_grouped(module)


def _is_grouped(module: nn.Module) -> bool:
    """Whether a row meets one matrix of each stack in the module."""
    return isinstance(module, GroupedLayer) or holds_experts(module)


def largest(parts: Iterable[Part], total: int) -> str:
    """Name the largest of these parts, with their sizes; parts of one kind and size share an entry."""
    kinds: dict[tuple[str, int], list[str]] = {}
    for part in parts:
        kinds.setdefault((part.kind, part.elements), []).append(part.name)
    groups = [
        (size * len(members), called or "the model", kind)
        for (kind, size), names in kinds.items()
        for called, members in grouped(names)
    ]
    groups.sort(key=lambda group: -group[0])
    return first_few([f"{called} ({kind}) {size:,} ({percent(size / total)})" for size, called, kind in groups])


def percent(share: float) -> str:
    """A share in whole percent; ``under 1 %`` and ``over 99 %`` where it would round to 0 % or 100 %."""
    if 0 < share <= 0.005 or 0.995 <= share < 1:
        return "under 1 %" if share < 0.5 else "over 99 %"
    return f"{share:.0%}".replace("%", " %")
