"""Storage: one operand, that is one encoded matrix with the contraction along its columns.

A format subclasses it, declares ``layout`` and writes ``decode``. The core binds each instance to the shape and the
dtype of the matrix it stands for and to the quantizer that made it; none of these is ever inferred from a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from lpq.core.layout import Buffer, row_major

if TYPE_CHECKING:
    from lpq.core.quantizer import Quantizer


class Storage:
    """One encoded matrix ``[rows, cols]``. Buffers are attributes: ``self.data``, ``self.scale`` …"""

    layout: ClassVar[tuple[Buffer, ...]]
    """The buffers, in the order in which they are passed around; see ``layout_for`` if options change them."""

    quantizer: Quantizer
    """The quantizer of this operand: its options are the storage's options."""
    shape: tuple[int, int]
    """Rows and columns of the matrix it stands for."""
    dtype: torch.dtype
    """The dtype of the matrix it stands for."""

    # ------------------------------------------------------------------------------ what a format writes

    @classmethod
    def layout_for(cls, quantizer: Quantizer) -> tuple[Buffer, ...]:
        """The layout under these options. Override it where an option changes a buffer."""
        return cls.layout

    def decode(self) -> Tensor:
        """The matrix that the buffers stand for, in fp32, in plain PyTorch. This is what defines the format."""
        raise NotImplementedError(f"{type(self).__name__} must define decode(self)")

    def decode_rotated(self) -> Tensor:
        """As ``decode``, but left in the rotated basis that ``quantizer.rotation`` names, padding included.

        The product of two matrices in one basis is that of the decoded ones.
        """
        return self.decode()

    def transposed(self) -> Self:
        """The operand of the transposed matrix, without the original. Only for a transposable quantizer."""
        raise NotImplementedError(
            f"{self.quantizer} is not transposable; a quantizer that says so needs {type(self).__name__}.transposed()"
        )

    # ------------------------------------------------------------------------------ what every format has

    def __init__(self, **buffers: Tensor) -> None:
        for name, tensor in buffers.items():
            setattr(self, name, tensor)

    def __getattr__(self, name: str) -> Tensor:
        made = vars(self)
        given = [key for key, value in made.items() if isinstance(value, Tensor)]
        known = made["quantizer"].names if "quantizer" in made else [b.name for b in getattr(type(self), "layout", ())]
        if name in known:  # obj, for Python to suggest no other attribute
            raise AttributeError(
                f"{type(self).__name__} was made without its buffer {name!r}: given were {given}", obj=self
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; its buffers are {list(known) or given}")

    def bind(self, quantizer: Quantizer, shape: tuple[int, int], dtype: torch.dtype) -> Self:
        """Say what this storage stands for."""
        self.quantizer, self.shape, self.dtype = quantizer, shape, dtype
        return self

    @classmethod
    def wrap(cls, tensors: Sequence[Tensor], quantizer: Quantizer, shape: tuple[int, int], dtype: torch.dtype) -> Self:
        """The storage over these tensors, given in the order of the layout."""
        storage = cls.__new__(cls)
        for name, tensor in zip(quantizer.names, tensors, strict=True):
            setattr(storage, name, tensor)
        storage.quantizer, storage.shape, storage.dtype = quantizer, shape, dtype
        return storage

    @classmethod
    def empty(cls, quantizer: Quantizer, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Self:
        """Uninitialised buffers for a matrix of this shape."""
        tensors = [b.empty(*shape, dtype, device) for b in quantizer.layout]
        return cls.wrap(tensors, quantizer, shape, dtype)

    @classmethod
    def fresh(cls, quantizer: Quantizer, shape: tuple[int, int], x: Tensor) -> Self:
        """The same for an encoding of ``x``, in the order in memory in which encoding leaves them."""
        return cls.wrap([b.fresh(*shape, x) for b in quantizer.layout], quantizer, shape, x.dtype)

    def tensors(self) -> list[Tensor]:
        """The buffers in the order of the layout."""
        return [getattr(self, name) for name in self.quantizer.names]

    @property
    def text(self) -> str:
        """What an operator is told of it, beside its tensors, shape and dtype."""
        return self.quantizer.text

    def buffers(self) -> dict[str, Tensor]:
        """The buffers by name: the canonical bytes of the format."""
        return {name: getattr(self, name) for name in self.quantizer.names}

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same operand over ``function`` of each buffer."""
        return self.wrap([function(t) for t in self.tensors()], self.quantizer, self.shape, self.dtype)

    def row_major(self) -> Self:
        """The same operand as it is kept, shared and saved: whatever encoding left column by column is copied."""
        return self.map(row_major) if any(b.column_major for b in self.quantizer.layout) else self

    def astype(self, dtype: torch.dtype) -> Self:
        """The same bytes standing for a matrix of another dtype; a buffer in the matrix's own dtype is cast."""
        if dtype is self.dtype:
            return self
        layout = self.quantizer.layout
        tensors = [t.to(dtype) if b.dtype is None else t for b, t in zip(layout, self.tensors(), strict=True)]
        return self.wrap(tensors, self.quantizer, self.shape, dtype)

    def narrow(self, dim: int, start: int, stop: int) -> Self | None:
        """The operand of rows (0) or columns (1) ``[start, stop)``, as views; None where that cuts a block or what must
        not be cut (``Quantizer.why_no_parts``)."""
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
        return self.wrap(narrowed, self.quantizer, shape, self.dtype)

    @staticmethod
    def cat(parts: Sequence[Storage], dim: int) -> Storage | None:
        """The operand of matrices laid side by side along rows (0) or columns (1); None where they do not join.

        They join on whole blocks, and where one value covers the whole dimension all parts must agree on it. Matrices
        of a format that must not be cut along this dimension never join.
        """
        first = parts[0]
        if len(parts) > 1 and first.quantizer.why_no_parts(dim) is not None:
            return None
        sizes = [p.shape[dim] for p in parts]
        joined: list[Tensor] = []
        for i, buffer in enumerate(first.quantizer.layout):
            unit, tensors = buffer.unit(dim), [p.tensors()[i] for p in parts]
            if unit is not None and any(size % unit for size in sizes[:-1]):
                return None
            if unit is None and not all(_same(tensors[0], t) for t in tensors[1:]):
                return None
            # What all have alike is copied, too: nobody expects what torch.cat made to change with its parts.
            joined.append(tensors[0].clone() if unit is None else torch.cat(tensors, dim))
        rows, cols = first.shape
        shape = (sum(sizes), cols) if dim == 0 else (rows, sum(sizes))
        return first.wrap(joined, first.quantizer, shape, first.dtype)

    @property
    def device(self) -> torch.device:
        return self.tensors()[0].device

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    def __repr__(self) -> str:
        buffers = ", ".join(f"{n}={t.dtype}{list(t.shape)}" for n, t in self.buffers().items())
        return f"{type(self).__name__}({self.quantizer}, shape={list(self.shape)}, {buffers})"


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two buffers hold the same bytes; views of one buffer do, without looking."""
    one_view = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return a.shape == b.shape and (one_view or torch.equal(_bytes(a), _bytes(b)))


def _bytes(tensor: Tensor) -> Tensor:
    return row_major(tensor).view(-1).view(torch.uint8)


def check_there(buffer: Tensor) -> None:
    """Refuse an operand of a sharded weight that was not gathered: its buffers have no memory then."""
    if type(buffer) is Tensor and not buffer.data_ptr() and buffer.numel() and not buffer.is_meta:
        raise RuntimeError(
            "this operand of a sharded weight is not there: forward gathers row operands and backward column operands. "
            "If forward runs again in backward inside a compiled module, wrap it with PyTorch's checkpoint_wrapper"
        )
