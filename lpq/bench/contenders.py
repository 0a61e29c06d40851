"""The ways to run the linear layers of a model that are timed beside each other: in bf16, and by recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

import lpq


def label(library: str, recipe: str, compiled: bool) -> str:
    """The name of a contender in tables."""
    return f"{'' if library == 'torch' else library + ' '}{recipe}{', compiled' if compiled else ''}"


BASELINE = label("torch", "bf16", False)


@dataclass(frozen=True)
class Contender:
    """One way to run linear layers."""

    library: str
    recipe: str
    compiled: bool
    convert: Callable[[nn.Module], nn.Module] = lambda model: model
    """Takes a model, in which are ``nn.Linear`` layers, and may change it in place. Compilation comes after it."""
    after_step: Callable[[nn.Module], object] | None = None
    """The function that its users call after each step of the optimizer."""
    mode: str | None = None
    """How a layer is compiled, if it is; None: as torch.compile does by default."""
    recorded: bool = False
    """Whether its whole step of training is recorded in a CUDA graph, as `benchmarks llama --recorded` does."""

    @property
    def name(self) -> str:
        return label(self.library, self.recipe, self.compiled)

    def record(self) -> dict[str, Any]:
        """The keys of a result that name the contender."""
        return {"library": self.library, "recipe": self.recipe, "compiled": self.compiled}


def plain(compiled: bool = False) -> Iterator[Contender]:
    """Yield bf16, and bf16 that is compiled."""
    for is_compiled in (False, True)[: 1 + compiled]:
        yield Contender("torch", "bf16", is_compiled)


def by_recipes(recipes: tuple[str, ...], compiled: bool = False, **options: Any) -> Iterator[Contender]:
    """Yield a contender for each recipe of lpq, and each that is compiled; ``options`` go to ``lpq.convert``. A policy
    that changes in a run is measured as the run begins."""
    options = {"steps": "later", **options}
    for is_compiled in (False, True)[: 1 + compiled]:
        for recipe in recipes:
            yield Contender("lpq", recipe, is_compiled, partial(lpq.convert, policy=recipe, include="all", **options))


def in_words(error: Exception) -> str:
    """Why a contender failed, in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
