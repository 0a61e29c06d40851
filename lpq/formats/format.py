"""A format: how one operand is encoded, and the operand itself.

A format subclasses two classes. A ``Quantizer`` encodes in three steps, ``measure`` → reduce → ``encode``: a frozen
dataclass whose fields are the format's options, with ``measure`` and ``encode`` for one matrix that has the contraction
along its columns. The core handles both directions of a tensor, reductions over ranks, state across steps, random bits
and kernels. A quantizer holds no tensor, no group and no flag: it is a constant.

A ``Storage`` is one operand, that is one encoded matrix: it declares ``layout`` and implements ``decode``. Each
instance is bound to the shape and the dtype of the matrix it stands for and to the quantizer that made it; none of
these is ever inferred from a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from lpq import registry
from lpq.formats.declarations import check_declared, check_side, raised_by, why_no_parts
from lpq.formats.layout import DIMENSIONS, Buffer, Covering, Stat, StateBuffer, for_dtype, row_major
from lpq.formats.options import Options
from lpq.formats.random_bits import RandomBits
from lpq.formats.rotation import TURN, Rotation
from lpq.registry.former_names import former
from lpq.registry.specs import INT64_COUNTS

Direction = Literal["row", "col"]
DIRECTIONS: tuple[Direction, Direction] = ("row", "col")


class Quantizer(Options):
    """The options of a format. Subclasses are frozen dataclasses."""

    def __deepcopy__(self, memo: object) -> Self:
        """A quantizer never changes. A compiler, which copies what it guards, then compares one object with itself."""
        return self

    declarations = (
        "stats", "transposable", "by_rows", "state", "static", "stochastic", "fresh", "plain", "col_source", "moves",
    )  # fmt: skip

    # ------------------------------------------------------------------------------ what a format writes

    @property
    def stats(self) -> tuple[Stat, ...]:
        """The statistics that ``encode`` needs. This and the properties below may be plain class attributes. The core
        computes each once (``declarations``)."""
        return ()

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        """Return the statistics of a matrix, by name. Pure, and local: the core reduces them over the ranks."""
        return {}

    def measure_again(self, x: Tensor, stats: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the statistics of round 2, by name. ``stats`` are the statistics of round 1, which span all ranks.
        Pure, and local."""
        raise NotImplementedError(f"{type(self).__name__} must define measure_again(self, x, stats)")

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        """Return the encoded matrix. Pure: all that depends on a statistic is computed here, after the reduction."""
        raise NotImplementedError(f"{type(self).__name__} must define encode(self, x, stats)")

    # --------------------------------------------------------------------------- declarations of a format

    @property
    def transposable(self) -> bool:
        """Whether ``Storage.transposed`` gives the bytes that encoding the transposed matrix would give."""
        return False

    @property
    def by_rows(self) -> Quantizer | None:
        """The quantizer of the operands in which each row has the values that this one's operand has for all rows, and
        which decode alike, bit for bit. Rows of several operands are decoded by its kernels in one launch. None: there
        is no such quantizer."""
        return None

    @property
    def rotation(self) -> Rotation | None:
        """The rotation of the columns in which the matrix is stored. The core applies it: ``measure`` and ``encode``
        get the rotated matrix in fp32, its columns padded to whole blocks. The core undoes it, too: the storage has
        ``decode_stored`` in place of ``decode``. Columns that it mixes are in one block of a buffer.

        Where its signs are drawn, ``measure`` gets the matrix itself, as ranks may measure before they have a seed in
        common. ``encode_stochastic`` keeps the number ``bits.turn`` in a buffer of the name ``turn``."""
        return None

    @property
    def state(self) -> tuple[StateBuffer, ...]:
        """The statistics that are remembered across steps: none for most formats, the statistics of the whole matrix if
        ``static``."""
        if not self.static:
            return ()
        return tuple(StateBuffer(stat.name, stat.grid(1, 1)) for stat in self.stats if stat.of_all)

    static: bool = False
    """Statistics of the whole matrix come from a state that no step moves, and are not measured; ``lpq.calibrate``
    fills it. A format declares an option ``static: bool = False`` for this, and nothing else. Without a state the
    statistics are measured."""
    stochastic: bool | str = False
    """Whether ``encode_stochastic`` is called in place of ``encode``; a format may have several ways, each with a
    word."""
    without_random_bits: Quantizer | None = None
    """The quantizer whose operand has the bytes that this one's ``encode`` returns, by the same statistics; or None."""
    without_rotation: Quantizer | None = None
    """The quantizer whose operand, over the same buffers, decodes to what ``decode_stored`` returns; or None."""
    fresh: str = "recall"
    """Where statistics come from while a layer's state is empty: ``"recall"`` reads it, ``"measure"`` measures."""
    unbiased: bool = False
    """Whether the mean of the decoded matrix, over all random bits, is the matrix. The conformance kit
    then tests it, and that the mean of each block's largest element is the element."""
    plain: ClassVar[bool] = False
    """Whether the operand is an ordinary matrix, its buffer ``data`` a view or a cast: there is nothing to launch."""
    col_source: Literal["original", "row"] = "original"
    """The source that the column operand encodes: the tensor itself, or the decoded row operand."""

    @property
    def uncut(self) -> tuple[int, ...]:
        """Dimensions along which an operand has no parts: 0 for the rows, 1 for the columns. Then it is neither sliced
        nor sharded along them.

        A dimension that a buffer spans (``None`` in its block) and no statistic does counts as one of these, since
        parts would have other values in that buffer than the whole: it need not be named here.
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
        """Encode as ``encode`` does, rounding with random bits."""
        raise NotImplementedError(f"{type(self).__name__} must define encode_stochastic(self, x, stats, bits)")

    @property
    def rounds_scales(self) -> bool:
        """Whether scales are rounded: ``unrounded`` is not called otherwise."""
        return True

    def unrounded(self, x: Tensor, stats: Mapping[str, Tensor]) -> Tensor | None:
        """Return the fp32 values that ``encode``, given the same, would store if it rounded no scale; None: the format
        does not say. ``lpq.observe.numerics`` tells by it which part of an error comes from rounded scales."""
        return None

    def recall(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor | None]:
        """Return the statistics to encode with, from the state; None for one that is measured nevertheless."""
        if self.static:
            return {stat.name: state.get(stat.name) for stat in self.stats}
        raise NotImplementedError(f"{type(self).__name__} must define recall(self, state)")

    def remember(self, state: Mapping[str, Tensor], stats: Mapping[str, Tensor]) -> None:
        """Take the reduced statistics of this step into the state, in place."""

    # ------------------------------------------------------------------------------ what every format has

    quantize: ClassVar[Callable[..., Any]]
    """``quantizer.quantize(x)`` is a tensor that is encoded. ``lpq.tensor.quantize`` is put here by its own module."""

    @property
    def moves(self) -> bool:
        """Whether a step changes the state."""
        return len(self.state) > 0 and not self.static

    def recalls(self, stat: Stat) -> bool:
        """Whether ``recall`` gives this statistic."""
        return bool(self.state) and (stat.of_all or not self.static)

    def frozen(self, search: str | None = None, *, static: bool = True) -> Quantizer:
        """Return this quantizer with static statistics, or without, and with its option ``search`` set, as far as it
        has such options and statistics of the whole matrix. A format whose options are quantizers passes the call on to
        them."""
        options: dict[str, object] = {}
        named = {f.name: f.type for f in fields(self)}  # type: ignore[arg-type]
        if "static" in named and any(stat.of_all for stat in self.stats):
            options["static"] = static
        if search is not None and "search" in named:
            options["search"] = search
        if all(getattr(self, name) == value for name, value in options.items()):
            return self
        return replace(self, **options).ready()  # type: ignore[type-var]

    def searched_by(self, method: str) -> bool:
        """Whether scales of blocks are searched as this ``method`` of ``lpq.calibrate`` names it: the option ``search``
        has its name. A format that says it by another option defines this and ``frozen``."""
        return getattr(self, "search", None) == method

    def new_state(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Fresh state for one tensor, for ``quantize(state=…)``; empty if the format remembers nothing."""
        return {
            prefix + s.name: torch.zeros(s.shape, dtype=torch.float32, device=device)
            for prefix, quantizer in self.state_branches().items()
            for s in quantizer.state
        }

    def state_branches(self) -> dict[str, Quantizer]:
        """The quantizers whose state a tensor needs, by name prefix: one if both directions have the same
        statistics."""
        row, col = self.side("row"), self.side("col")
        if (row is col or row == col) and row.transposable and self.col_source == "original":
            return {"": row}
        return {"row_": row, "col_": col}

    @cached_property
    def basis(self) -> Rotation | None:
        """The rotation, which operands are compared by; operands of one basis are multiplied without undoing it."""
        return self.rotation

    def whole(self, cols: int) -> bool:
        """Whether ``cols`` columns are whole groups of a rotation, so that none is stored beside them."""
        return self.basis is None or cols % self.basis.block == 0

    def rotated(self, x: Tensor, bits: RandomBits | None = None) -> Tensor:
        """The matrix as ``measure`` and, with ``bits``, ``encode_stochastic`` get it: ``x`` itself where there is no
        rotation, or where it must be drawn and there are no bits."""
        if self.basis is None or (self.basis.drawn and bits is None):
            return x
        return self.basis.apply(x, bits.turn if self.basis.drawn and bits is not None else None)

    @cached_property
    def counts_in_fp32(self) -> tuple[str, ...]:
        """The counts that the format measures in fp32 and wants back so, as plugins of interface 1 do."""
        counts = tuple(stat.name for stat in self.stats if stat.reduce == "sum")
        return counts if counts and registry.format_of(type(self)).api_version < INT64_COUNTS else ()

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
        return tuple(why_no_parts(self, dim) for dim in range(len(DIMENSIONS)))

    def why_no_parts(self, dim: int) -> str | None:
        """Why an operand must not be cut along its rows (0) or columns (1), whole blocks or not; None if it may."""
        return self._uncut[dim]

    def units(self, dim: int) -> tuple[int, ...]:
        """The numbers of rows (0) or columns (1) that its buffers and statistics do not let be cut apart."""
        return self._units[dim]

    @cached_property
    def _units(self) -> tuple[tuple[int, ...], ...]:
        declared: list[Covering] = [*self.layout, *self.stats]
        return tuple(
            tuple(dict.fromkeys(unit for covering in declared if (unit := covering.unit(dim)) is not None))
            for dim in range(len(DIMENSIONS))
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the buffers of an operand, in their order."""
        return tuple(buffer.name for buffer in self.layout)

    @cached_property
    def checked(self) -> set[object]:
        """The methods whose results were compared with declarations, by dtype and device; each check adds to it."""
        return set()

    def ready(self) -> Self:
        """Make all cached lookups now: ``torch.compile``, which cannot trace them, then finds them done."""
        _ = self._ready
        return self

    @cached_property
    def _ready(self) -> None:
        """Made once, as each layer asks for it: a check tries a format's state out."""
        with raised_by(self):
            for quantizer in (self, self.side("row"), self.side("col")):
                _ = quantizer.text, quantizer.storage
            for direction in get_args(Direction):
                side = self.side(direction)
                check_declared(side, stats=(Stat, side.stats), layout=(Buffer, side.layout))
                _ = side.names, side._uncut, side._units, side.basis, side.counts_in_fp32
                _ = [getattr(side, name) for name in side.declarations]
                check_side(self, side, direction, Quantizer, Storage)


class Storage:
    """One encoded matrix ``[rows, cols]``. Buffers are attributes: ``self.data``, ``self.scale`` …"""

    layout: ClassVar[tuple[Buffer, ...]]
    """The buffers, in the order in which they are passed around; see ``layout_for`` if options change them."""

    quantizer: Quantizer
    """The quantizer of this operand: its options are the storage's options."""
    shape: tuple[int, ...]
    """Rows and columns of the matrix; in a stack (``formats.sections``), behind the number of matrices."""
    dtype: torch.dtype
    """The dtype of the matrix it stands for."""

    # ------------------------------------------------------------------------------ what a format writes

    @classmethod
    def layout_for(cls, quantizer: Quantizer) -> tuple[Buffer, ...]:
        """Return the layout under these options. Override it where an option changes a buffer."""
        return cls.layout

    def decode(self) -> Tensor:
        """Return the matrix that the buffers stand for, in fp32, in plain PyTorch. This defines the format. A format
        that may be rotated defines ``decode_stored`` in its place."""
        stored, rotation = self.decode_stored(), self.quantizer.basis
        if rotation is not None:
            stored = rotation.undo(stored, getattr(self, TURN) if rotation.drawn else None)
        return stored[:, : self.shape[1]]

    def decode_stored(self) -> Tensor:
        """Return the values that are stored, in fp32: the matrix before a rotation is undone. Padding may be cut off
        where there is no rotation."""
        raise NotImplementedError(f"{type(self).__name__} must define decode(self)")

    def transposed(self) -> Self:
        """Return the operand of the transposed matrix, without the original. Only for a transposable quantizer."""
        raise NotImplementedError(
            f"{self.quantizer} is not transposable; a quantizer that is needs {type(self).__name__}.transposed()"
        )

    # ------------------------------------------------------------------------------ what every format has

    def decode_rotated(self) -> Tensor:
        """Decode as ``decode`` does, but stay in the rotated basis, with padding that counts in no product. The product
        of two matrices in one basis (``quantizer.basis``) equals the product of the decoded matrices."""
        rotation = self.quantizer.basis
        if rotation is None:
            return self.decode()
        turn = getattr(self, TURN) if rotation.drawn else None
        return rotation.without_padding(self.decode_stored(), self.shape[1], turn)

    def __init__(self, **buffers: Tensor) -> None:
        for name, tensor in buffers.items():
            setattr(self, name, tensor)

    def __getattr__(self, name: str) -> Tensor:
        own = vars(self)
        there = [key for key, value in own.items() if isinstance(value, Tensor)]
        names = own["quantizer"].names if "quantizer" in own else [b.name for b in getattr(type(self), "layout", ())]
        if name in names:  # obj, for Python to suggest no other attribute
            raise AttributeError(
                f"{type(self).__name__} was made without its buffer {name!r}: given were {there}", obj=self
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; its buffers are {list(names) or there}")

    def bind(self, quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype) -> Self:
        """Set the quantizer, and the shape and dtype of the matrix that this storage stands for."""
        self.quantizer, self.shape, self.dtype = quantizer, shape, dtype
        return self

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[Tensor], quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Self:
        """The storage over these tensors, given in the order of the layout."""
        storage = cls.__new__(cls)
        for name, tensor in zip(quantizer.names, tensors, strict=True):
            setattr(storage, name, tensor)
        storage.quantizer, storage.shape, storage.dtype = quantizer, shape, dtype
        return storage

    wrap = former("Storage.wrap", from_tensors)

    @classmethod
    def empty(cls, quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        """Uninitialised buffers for a matrix of this shape, or a stack of them."""
        *count, rows, cols = shape
        tensors = [b.empty(rows, cols, dtype, device, count) for b in quantizer.layout]
        return cls.from_tensors(tensors, quantizer, shape, dtype)

    @classmethod
    def fresh(cls, quantizer: Quantizer, shape: tuple[int, ...], x: Tensor) -> Self:
        """Uninitialised buffers for an encoding of ``x``, in the memory order in which encoding leaves them."""
        *count, rows, cols = shape
        return cls.from_tensors([b.fresh(rows, cols, x, count) for b in quantizer.layout], quantizer, shape, x.dtype)

    def tensors(self) -> list[Tensor]:
        """The buffers in the order of the layout."""
        return [getattr(self, name) for name in self.quantizer.names]

    @property
    def text(self) -> str:
        """The text that operators get for it, beside its tensors, shape and dtype."""
        return self.quantizer.text

    def buffers(self) -> dict[str, Tensor]:
        """The buffers by name: the canonical bytes of the format."""
        return {name: getattr(self, name) for name in self.quantizer.names}

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the same operand over ``function`` of each buffer."""
        return self.from_tensors([function(t) for t in self.tensors()], self.quantizer, self.shape, self.dtype)

    def row_major(self) -> Self:
        """Return the same operand with row-major buffers, as it is kept, shared and saved; buffers in another order are
        copied."""
        return self.map(row_major) if any(b.column_major for b in self.quantizer.layout) else self

    def astype(self, dtype: torch.dtype) -> Self:
        """Return the same bytes for a matrix of another dtype; a buffer in the matrix's own dtype is cast."""
        if dtype is self.dtype:
            return self
        buffers = for_dtype(self.quantizer.layout, self.tensors(), dtype)
        return self.from_tensors(buffers, self.quantizer, self.shape, dtype)

    def narrow(self, dim: int, start: int, stop: int) -> Self | None:
        """Return the operand of rows (0) or columns (1) ``[start, stop)``, as views; None where that cuts a block, or a
        dimension that must not be cut (``Quantizer.why_no_parts``)."""
        if (start, stop) != (0, self.shape[dim]) and self.quantizer.why_no_parts(dim) is not None:
            return None
        narrowed: list[Tensor] = []
        for buffer, tensor in zip(self.quantizer.layout, self.tensors(), strict=True):
            piece = buffer.narrow(tensor, dim, start, stop, self.shape[dim])
            if piece is None:
                return None
            narrowed.append(piece)
        rows, cols = self.shape
        shape = (stop - start, cols) if dim == 0 else (rows, stop - start)
        return self.from_tensors(narrowed, self.quantizer, shape, self.dtype)

    @property
    def device(self) -> torch.device:
        return self.tensors()[0].device

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    def __repr__(self) -> str:
        buffers = ", ".join(f"{n}={t.dtype}{list(t.shape)}" for n, t in self.buffers().items())
        return f"{type(self).__name__}({self.quantizer}, shape={list(self.shape)}, {buffers})"
