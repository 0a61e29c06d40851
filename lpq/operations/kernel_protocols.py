"""Protocols: what a kernel of each operation implements.

``lpq.registry.operations.TABLE`` names the Protocols of each operation. ``Q`` and ``S`` are the format's own
``Quantizer`` and ``Storage``. A line below a kernel, as ``_: Decode[MyStorage] = decode``, has a type checker compare
it with its Protocol. The conformance kit compares the arguments of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from lpq.formats.format import Direction, Quantizer, Storage
from lpq.operations.binding import Encode, EncodeSeveral, Encoding, Multiply, Operand, Product, Transposes
from lpq.operations.binding import Transpose as BoundTranspose
from lpq.operations.decoding import decode_reference
from lpq.operations.exact_form import BoundExact, Exact, ToExact
from lpq.operations.fused_pair import TileSide
from lpq.operations.group_products import Run
from lpq.operations.measuring import measure_reference
from lpq.operations.recoding import CodeReader
from lpq.operations.references import gemm_reference, quantize_reference
from lpq.operations.stored_tile import StoredTile
from lpq.operations.tile_program import TileProgram
from lpq.operations.transposing import transpose_reference
from lpq.registry.operations import Operation

Q = TypeVar("Q", bound=Quantizer, contravariant=True)
S = TypeVar("S", bound=Storage, contravariant=True)
OfA = TypeVar("OfA", bound=Storage, contravariant=True)
OfB = TypeVar("OfB", bound=Storage, contravariant=True)
State = Mapping[str, Tensor]


class Measure(Protocol[Q]):
    """A kernel for ``measure``; one that ``rounds`` also takes ``dtype=``."""

    def __call__(self, x: Tensor, row: Q | None, col: Q | None, /) -> list[Tensor]:
        """Return the statistics of ``x`` that these operands need, as ``measure_reference``."""


class Quantize(Protocol[Q]):
    """A kernel for ``quantize``; one that ``rounds`` also takes ``dtype=``."""

    def __call__(
        self, x: Tensor, stats: Sequence[Tensor | None], row: Q | None, col: Q | None, seed: Tensor | None,
        offset: int, measure: bool, /,
    ) -> list[Tensor]:  # fmt: skip
        """Return the buffers of these operands and, with ``measure``, the statistics, as ``quantize_reference``."""


class BindQuantize(Protocol):
    """The ``bind`` of a kernel for ``quantize``."""

    def __call__(self, encoding: Encoding, /) -> Encode | None:
        """Decide all but the tensors; None: the reference encodes."""


class BindSeveral(Protocol[Q]):
    """The ``several`` of a kernel for ``quantize``, of the row operands of contiguous matrices in fp32, whose elements
    are rounded to ``dtype``, and whose statistics are all given."""

    def __call__(
        self, quantizer: Q, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device, /
    ) -> EncodeSeveral | None:  # fmt: skip
        """Decide all but the addresses, for a launch of all these matrices; None: each is encoded by itself."""


class Decode(Protocol[S]):
    """A kernel for ``decode``."""

    def __call__(self, operand: S, dtype: torch.dtype, /) -> Tensor:
        """Return the matrix that an operand stands for, as ``decode_reference``."""


class Transpose(Protocol[S]):
    """A kernel for ``transpose``."""

    def __call__(self, operand: S, /) -> Storage:
        """Return the operand of the transposed matrix, as ``transpose_reference``."""


class BindTranspose(Protocol):
    """The ``bind`` of a kernel for ``transpose``, of operands that are not empty."""

    def __call__(self, operand: Operand, device: torch.device, /) -> BoundTranspose:
        """Decide all but the buffers."""


class BindTransposes(Protocol):
    """The ``several`` of a kernel for ``transpose``, of operands of one quantizer that are not empty."""

    def __call__(self, operands: Sequence[Operand], device: torch.device, /) -> Transposes:
        """Decide all but the buffers, for a launch of all these operands."""


class MakeGemm(Protocol[OfA, OfB]):
    """A kernel for ``gemm``."""

    def __call__(
        self, a: OfA, b: OfB, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool, /
    ) -> Tensor:  # fmt: skip
        """Return the product, as ``gemm_reference`` up to the order of sums."""


class BindGemm(Protocol):
    """The ``bind`` of a kernel for ``gemm``."""

    def __call__(self, product: Product, /) -> Multiply | None:
        """Decide all but the buffers; None: the reference multiplies."""


class MakeExact(Protocol[S]):
    """A kernel for ``exact``."""

    def __call__(self, operand: S, /) -> Exact | None:
        """Return an operand as a bf16 matrix and a factor; None: an operand of this shape has no such form."""


class BindExact(Protocol):
    """The ``bind`` of a kernel for ``exact``."""

    def __call__(self, operand: Operand, device: torch.device, /) -> BoundExact | ToExact | None:
        """Decide all but the buffers; None: ``impl`` is called. A ``BoundExact`` names its form, and so its products
        are bound without a check of each operand."""


class Tile(Protocol[Q]):
    """A kernel for ``tile`` or ``exact_tile``."""

    def __call__(self, quantizer: Q, direction: Direction, /) -> TileSide | None:
        """Describe how the operand of this direction is made tile by tile; None: it is not."""


class ReadCodes(Protocol[Q]):
    """A kernel for ``reader``."""

    def __call__(self, quantizer: Q, /) -> CodeReader:
        """Describe how the codes of an operand are read."""


class MakeStoredTile(Protocol[Q]):
    """A kernel for ``stored_tile``."""

    def __call__(self, quantizer: Q, /) -> StoredTile | None:
        """Describe how a tile of a row operand is read and written; None: it is not."""


class MakeTileProgram(Protocol[Q]):
    """A kernel for ``tile_program``."""

    def __call__(self, quantizer: Q, direction: Direction, dtype: torch.dtype, /) -> TileProgram | None:
        """Describe how a tile of the operand of this direction is measured and written, of a matrix in this dtype;
        None: it is not."""


class Remember(Protocol[Q]):
    """A kernel for ``remember``."""

    def __call__(self, quantizer: Q, state: State, stats: State, /) -> None:
        """Take the reduced statistics of a step into the state, in place, as ``Quantizer.remember``."""


class BindRemember(Protocol[Q]):
    """The ``bind`` of a kernel for ``remember``, which updates all states of a layer at once."""

    def __call__(
        self, quantizers: Sequence[Q], device: torch.device, /
    ) -> Callable[[Sequence[State], Sequence[State]], None]:
        """Decide all but the states and the statistics: one of each for every quantizer."""


class GroupedGemm(Protocol):
    """A kernel for ``grouped_gemm``; see ``lpq.operations.group_products``."""

    def __call__(
        self, a: Operand, b: Storage | Operand, offs: Tensor, fast_accumulate: bool, /
    ) -> Tensor | None:  # fmt: skip
        """Return the products of groups in bf16; None: the kernel does not take these sizes."""


class BindGroupedGemm(Protocol):
    """The ``bind`` of a kernel for ``grouped_gemm``."""

    def __call__(self, product: Product, /) -> Run | None:
        """Decide all but the buffers; None: the kernel does not take these sizes."""


def protocols_of(operation: Operation) -> dict[str, type[Any]]:
    """Return the Protocols of an operation's kernels, by the fields of ``KernelSpec`` that name implementations."""
    names = {"impl": operation.impl, "bind": operation.bind, "several": operation.several}
    return {field: globals()[name] for field, name in names.items() if name is not None}


def unfit(implementation: Callable[..., Any], protocol: type[Any], *keywords: str) -> str | None:
    """Return how the arguments of an implementation differ from its Protocol's and these keywords; None: it takes
    them, or it does not tell, as functions in C do not."""
    parameters = [p for p in signature(protocol.__call__).parameters.values() if p.name != "self"]
    try:
        own = signature(implementation)
    except ValueError:
        return None
    try:
        own.bind(*parameters, **dict.fromkeys(keywords))
    except TypeError as error:
        names = ", ".join([*(p.name for p in parameters), *(f"{keyword}=" for keyword in keywords)])
        return f"it cannot be called as {protocol.__name__}, with ({names}): {error}"
    return None


if TYPE_CHECKING:  # the references are what kernels are compared with
    _references: tuple[
        Measure[Quantizer], Quantize[Quantizer], Decode[Storage], Transpose[Storage], MakeGemm[Storage, Storage]
    ] = (measure_reference, quantize_reference, decode_reference, transpose_reference, gemm_reference)
