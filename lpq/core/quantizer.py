"""Quantizer: how one operand is encoded, in three steps. ``measure`` → reduce → ``encode``.

A format subclasses it as a frozen dataclass whose fields are its options, and writes ``measure`` and ``encode`` for one
matrix with the contraction along its columns. Both directions of a tensor, reductions over ranks, state across steps,
random bits and kernels are the core's business. A quantizer holds no tensor, no group and no flag: it is a constant.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from lpq import registry
from lpq.core.layout import DIMENSIONS, Buffer, Stat, StateBuffer
from lpq.core.storage import Storage
from lpq.registry.errors import OptionError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lpq.core.philox import RandomBits
    from lpq.core.tensor import QuantizedTensor

Direction = Literal["row", "col"]


class Quantizer:
    """The options of a format. Subclasses are frozen dataclasses."""

    # ------------------------------------------------------------------------------ what a format writes

    @property
    def stats(self) -> tuple[Stat, ...]:
        """The statistics that ``encode`` needs. This and the properties below may be plain class attributes, and
        cached ones: a layer asks for them at every step."""
        return ()

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        """The statistics of a matrix, by name. Pure, and local: the core reduces them over the ranks."""
        return {}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        """The encoded matrix. Pure: whatever depends on a statistic is computed here, after the reduction."""
        raise NotImplementedError(f"{type(self).__name__} must define encode(self, x, stats)")

    # ------------------------------------------------------------------------------ what a format may say

    @property
    def transposable(self) -> bool:
        """``Storage.transposed`` gives the bytes that encoding the transposed matrix would give."""
        return False

    @property
    def rotation(self) -> str | None:
        """The name of the rotated basis in which the matrix is stored; columns that it mixes are in one block."""
        return None

    @property
    def state(self) -> tuple[StateBuffer, ...]:
        """What is remembered across steps; empty for most formats."""
        return ()

    stochastic: bool = False
    """``encode_stochastic`` is called in place of ``encode``."""
    plain: ClassVar[bool] = False
    """The operand is an ordinary matrix, its buffer ``data`` a view or a cast: there is nothing to launch."""
    col_source: Literal["original", "row"] = "original"
    """What the column operand encodes: the tensor itself, or the decoded row operand."""

    @property
    def uncut(self) -> tuple[int, ...]:
        """Dimensions along which an operand has no parts: 0 for the rows, 1 for the columns. Then it is neither sliced
        nor sharded along them.

        A dimension that a buffer spans (``None`` in its block) and no statistic does is taken for one of these, since
        the parts would have other values in that buffer than the whole: it need not be named here.
        """
        return ()

    def side(self, direction: Direction) -> Quantizer:
        """The quantizer of the operand in this direction: this one, unless the directions differ. It is the same object
        at each call: a compiler cannot make one."""
        return self

    def flipped(self) -> Quantizer | None:
        """The quantizer of the transposed tensor, or None if no options describe it."""
        return self if self.side("row") == self.side("col") else None

    def encode_stochastic(self, x: Tensor, stats: Mapping[str, Tensor], bits: RandomBits) -> Storage:
        """As ``encode``, rounding with random bits."""
        raise NotImplementedError(f"{type(self).__name__} must define encode_stochastic(self, x, stats, bits)")

    def recall(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The statistics to encode with, from what is remembered."""
        raise NotImplementedError(f"{type(self).__name__} must define recall(self, state)")

    def remember(self, state: Mapping[str, Tensor], stats: Mapping[str, Tensor]) -> None:
        """Take the reduced statistics of this step into the state, in place."""

    # ------------------------------------------------------------------------------ what every format has

    def quantize(
        self,
        x: Tensor,
        *,
        row: bool = True,
        col: bool = True,
        amax_group: ProcessGroup | None = None,
        state: Mapping[str, Tensor] | None = None,
        seed: Tensor | int | None = None,
        offset: int = 0,
    ) -> QuantizedTensor:
        """Encode ``x`` in the wanted directions. No gradient flows through it, and no tangent may.

        ``amax_group``: ``x`` is one of equal shards along dimension 0, and statistics that cover several shards are
        reduced over this group. ``state`` (see ``new_state``) is what earlier steps left; it is updated in place.
        ``seed`` and ``offset`` (the first row of a shard in the whole tensor) determine stochastic rounding; without
        a seed one is drawn from torch's generator.
        """
        from lpq.core.quantize import (
            quantize_tensor,
        )  # the one import that points up: it is built on quantizers

        return quantize_tensor(self, x, row=row, col=col, group=amax_group, state=state, seed=seed, offset=offset)

    def new_state(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Fresh state for one tensor, for ``quantize(state=…)``; empty if the format remembers nothing."""
        return {
            prefix + s.name: torch.zeros(s.shape, dtype=torch.float32, device=device)
            for prefix, quantizer in self.state_branches().items()
            for s in quantizer.state
        }

    def state_branches(self) -> dict[str, Quantizer]:
        """The quantizers whose state a tensor needs, by name prefix: one if both directions share all they know."""
        row, col = self.side("row"), self.side("col")
        if (row is col or row == col) and row.transposable and self.col_source == "original":
            return {"": row}
        return {"row_": row, "col_": col}

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """The quantizer with these options, which may come from a string, a file or a call."""
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                raise OptionError.unknown(registry.format_of(cls).name, name, known)
        return cls(**options).ready()

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, hint = getattr(self, field.name), hints[field.name]
            if not _fits(value, hint):
                raise OptionError.invalid(type(self).__name__, field.name, value, _words(hint))
            if type(value) in (int, float) and (hint is float or float in get_args(hint)):
                object.__setattr__(self, field.name, float(value) + 0.0)  # 3 and 3.0, or 0.0 and -0.0, are one text

    @cached_property
    def text(self) -> str:
        """The string that ``lpq.quantizer`` makes this quantizer from."""
        return registry.spec_string(self)

    @cached_property
    def storage(self) -> type[Storage]:
        """The storage class of the format."""
        storage: type[Storage] = registry.storage_class(registry.format_of(type(self)).name)
        return storage

    @cached_property
    def layout(self) -> tuple[Buffer, ...]:
        """The buffers of an operand."""
        return self.storage.layout_for(self)

    @cached_property
    def _uncut(self) -> tuple[str | None, ...]:
        return tuple(self._why_no_parts(dim) for dim in range(len(DIMENSIONS)))

    def why_no_parts(self, dim: int) -> str | None:
        """Why an operand must not be cut along its rows (0) or columns (1), whole blocks or not; None if it may."""
        return self._uncut[dim]

    def _why_no_parts(self, dim: int) -> str | None:
        if self.plain:
            return None
        if dim in self.uncut:
            return f"the {DIMENSIONS[dim]} of an operand of {self} must not be cut"
        spanning = [buffer.name for buffer in self.layout if buffer.block[dim] is None]
        if not spanning or any(stat.block[dim] is None for stat in self.stats):
            return None
        return (
            f"buffer {spanning[0]!r} of {self} is of all {DIMENSIONS[dim]} of an operand together and follows from no "
            "statistic of them"
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What the buffers of an operand are called, in their order."""
        return tuple(buffer.name for buffer in self.layout)

    @cached_property
    def checked(self) -> set[object]:
        """Which methods returned what is declared, for which dtype and device: ``lpq.core.returned`` adds to it."""
        return set()

    def ready(self) -> Self:
        """Look up now what is looked up once: ``torch.compile``, which cannot trace that, then finds it done."""
        for quantizer in (self, self.side("row"), self.side("col")):
            _ = quantizer.text, quantizer.storage
        for direction in get_args(Direction):
            side = self.side(direction)
            _ = side.layout, side.names, side.stats, side.state, side.transposable, side._uncut
            _check_side(self, side, direction)
        return self

    def __str__(self) -> str:
        return self.text


def _check_side(quantizer: Quantizer, side: Quantizer, direction: Direction) -> None:
    """Refuse early what would fail in a compiler, which cannot make quantizers, or at the first transpose."""
    if quantizer.side(direction) is not side:
        method = f"{type(quantizer).__name__}.side({direction!r})"
        raise registry.at_fault(
            registry.format_of(type(quantizer)).name,
            f"{quantizer}: {method} makes a new quantizer whenever it is called",
            "make it once, in a functools.cached_property, and return that; torch.compile cannot make one",
        )
    if side.transposable and side.storage.transposed is Storage.transposed:
        storage = side.storage.__name__
        raise registry.at_fault(
            registry.format_of(type(side)).name,
            f"{side} says that it is transposable, and {storage} has no transposed()",
            f"define {storage}.transposed(self), or take transposable away",
        )


def _hints(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except NameError as error:
        raise OptionError(
            f"the annotations of {cls.__module__}.{cls.__qualname__} cannot be read: {error}. Its options are checked "
            "by them: import what they name where the module runs, and not under TYPE_CHECKING"
        ) from error


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return any(value is a or (type(value) is type(a) and value == a) for a in get_args(hint))
    alternatives = get_args(hint)
    if alternatives and not isinstance(hint, type):
        return any(_fits(value, a) for a in alternatives)
    if hint is type(None):
        return value is None
    if hint is int:
        return type(value) is int
    if hint is float:
        return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
    return not isinstance(hint, type) or isinstance(value, hint)


def _words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(repr(a) for a in get_args(hint))
    alternatives = get_args(hint)
    if alternatives:
        return " or ".join(_words(a) for a in alternatives)
    return {type(None): "none", bool: "true or false", int: "a whole number", float: "a number"}.get(hint, "") or str(
        getattr(hint, "__name__", hint)
    )
