"""QuantizedTensor: a tensor held as one or two encoded operands.

``row`` encodes the tensor as a matrix ``[M, K]`` (all leading dimensions are rows), ``col`` its transpose ``[K, M]``;
either may be absent. In a stack, ``[count, M, K]``, they encode each matrix by itself. To PyTorch it is a tensor of the
shape, dtype and device it stands for; ``lpq.tensor.aten`` defines what each operator does with the buffers. Pickled and
saved, it is its quantizer's string and its plain buffers.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lpq import registry
from lpq.formats.format import Direction, Quantizer, Storage
from lpq.formats.layout import bytes_of
from lpq.formats.sections import along, is_stack
from lpq.operations.decoding import decode
from lpq.operations.derived_operands import derive_col, derives_col
from lpq.operations.transposing import transpose
from lpq.registry.former_names import former
from lpq.registry.showing import preformatted
from lpq.registry.warning import warn
from lpq.tensor.fsdp_protocol import Gathered
from lpq.tensor.inference import normal_tensors
from lpq.tensor.rebuilt import check_flags, operands_of, set_attributes
from lpq.torch_private.tensors import is_parameter, mark_as_parameter, no_torch_function, wrapper_subclass

REMEDY = "shard with fully_shard (FSDP2), HSDP for replicas; or convert with weights=None"
"""The advice in errors about other wrappers of models."""


class Writes:
    """A count of the writes to a tensor; autograd's count leaves out those through ``.data``."""

    __slots__ = ("count", "warned")

    def __init__(self) -> None:
        self.count = 0
        self.warned = False
        """Whether a warning that it is not finite was given."""


class PrecisionWarning(UserWarning):
    """The warning that an operation which the buffers cannot express was done on the decoded tensor."""


@dataclass(frozen=True, eq=False)
class Window:
    """Where a view lies in the tensor whose buffers it shares."""

    whole: QuantizedTensor
    rows: tuple[int, int]
    """The first row in the tensor's matrix, and the one behind the last."""
    cols: tuple[int, int]
    flipped: bool
    """Whether the view is the transpose of that part."""
    apart: bool
    """Whether a write to it changes these rows and columns only. One value may cover the whole of a dimension; then the
    whole tensor is encoded anew."""

    def of(self, matrix: Tensor) -> Tensor:
        """This part of a matrix as large as the whole tensor."""
        part = matrix[self.rows[0] : self.rows[1], self.cols[0] : self.cols[1]]
        return part.t() if self.flipped else part

    def narrow(self, dim: int, start: int, stop: int, apart: bool) -> Window:
        """Rows (0) or columns (1) ``[start, stop)`` of the view."""
        by_rows = (dim == 0) != self.flipped
        first = (self.rows if by_rows else self.cols)[0]
        cut = (first + start, first + stop)
        rows, cols = (cut, self.cols) if by_rows else (self.rows, cut)
        return Window(self.whole, rows, cols, self.flipped, apart)


class QuantizedTensor(Gathered, Tensor):
    """A tensor that is stored quantized; made by ``Quantizer.quantize``."""

    stored: tuple[Storage | None, Storage | None]
    """``row`` and ``col``."""
    quantizer: Quantizer
    """The quantizer that encodes it again when it is written to."""
    amax_group: ProcessGroup | Literal["unattached"] | None
    """The group of the ranks that hold the other shards, if this tensor is a shard; attached at run time, never saved.
    A shard without the group cannot be written to where its format needs statistics of the whole."""
    window: Window | None
    """Where a view lies, if it is transposed or a view of a part; else None."""
    writes: Writes
    """The count of the writes to it, which its views share."""
    title: str
    """The name in error messages: the name of the parameter in the converted model, or empty. Views and copies keep it.
    It is neither saved nor passed to a compiler, which would compile each layer apart for it."""

    owner: weakref.ref[Any] | None
    """The layer whose weight, or shard of a weight, this is: it finds the group of the other shards. Views and copies
    keep it. It is neither saved nor passed to a compiler."""

    is_data: bool = False
    """Whether this is what ``data`` of another one returned, or a view or a copy of that."""

    _flat: tuple[Any, Any, tuple[list[str], tuple[Any, ...]]] | None = None
    """The operands, the group, and what ``__tensor_flatten__`` returns for them. Compiled code calls it in each step,
    three times."""

    encoded_by: object = None
    """The state by which a producer encoded it, for layers that remember (``lpq/nn/shared_states.py``). Views of the
    whole keep it."""

    operand_cache: tuple[Quantizer, Sequence[Tensor], Sequence[Tensor], Any] | None = None
    """The buffers of both operands, for the quantizer of the layer that read them last, or will read them: they stay
    the same tensors. Then None, or a ``SharedColumn``, for which backward keeps the tensors before it."""

    dispatch: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    """Run an operator; ``lpq.tensor.aten``, which is written over this class, provides it."""

    @staticmethod
    def __new__(
        cls,
        row: Storage | None,
        col: Storage | None,
        quantizer: Quantizer,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
        *,
        amax_group: ProcessGroup | Literal["unattached"] | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        if (operand := row if row is not None else col) is None:
            raise ValueError("a QuantizedTensor has at least one operand: give row, col or both")
        with normal_tensors(not operand.tensors()[0].is_inference()):
            self: QuantizedTensor = wrapper_subclass(
                cls, shape, dtype=dtype, device=operand.device, requires_grad=requires_grad
            )
        self.stored, self.quantizer, self.amax_group = (row, col), quantizer, amax_group
        self.window, self.writes, self.title, self.owner = None, Writes(), "", None
        # As attributes, which a compiler's guards read many of in each step, and not by a function of Python. No method
        # is called before: a compiler that traces it would ask for them.
        attributes = self.__dict__
        for direction, storage in (("row_", row), ("col_", col)):
            if storage is not None:
                for name in storage.quantizer.names:
                    attributes[direction + name] = getattr(storage, name)
        return self

    @classmethod
    def from_tensors(
        cls,
        tensors: Sequence[Tensor],
        sides: Iterable[tuple[Direction, Quantizer, Sequence[int], torch.dtype]],
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
        amax_group: ProcessGroup | Literal["unattached"] | None = None,
    ) -> QuantizedTensor:
        """A tensor over buffers, one operand's behind the other's. ``sides``: the direction, the quantizer, the shape
        and the dtype of each operand."""
        operands: dict[Direction, Storage] = {}
        for direction, side, matrix, stored in sides:
            count = len(side.layout)
            operands[direction] = side.storage.from_tensors(tensors[:count], side, tuple(matrix), stored)
            tensors = tensors[count:]
        row, col = operands.get("row"), operands.get("col")
        return cls(row, col, quantizer, torch.Size(shape), dtype, amax_group=amax_group)

    over = former("QuantizedTensor.over", from_tensors)

    @property
    def write_count(self) -> int:
        return self.writes.count

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of its operands."""
        return [buffer for storage in self.stored if storage is not None for buffer in storage.tensors()]

    @property
    def whose(self) -> str:
        """The beginning of messages about it."""
        return f"{self.title}: " if self.title else ""

    def attached(self) -> bool:
        """Whether the group of a shard is attached. Its layer finds the group once FSDP2 has sharded it."""
        layer = self.owner() if self.owner is not None else None
        if self.amax_group == "unattached" and layer is not None:
            self.amax_group = layer.weight_gather().attached()
        return self.amax_group != "unattached"

    @property
    def row(self) -> Storage | None:
        """The operand ``X``, or None."""
        return self.stored[0]

    @property
    def col(self) -> Storage | None:
        """The operand ``Xᵀ``, or None."""
        return self.stored[1]

    @property
    def operands(self) -> list[tuple[Direction, Storage]]:
        """The operands that are there."""
        both: list[tuple[Direction, Storage | None]] = [("row", self.stored[0]), ("col", self.stored[1])]
        return [(direction, storage) for direction, storage in both if storage is not None]

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The rows and the columns of the matrix; of a stack, behind the number of its matrices."""
        direction, storage = self.operands[0]
        return along(direction, storage.shape)

    @property
    def is_stack(self) -> bool:
        """Whether this tensor, or the tensor that it is a view of, is a stack."""
        return is_stack(self.operands[0][1].shape)

    def operand(self, direction: Direction) -> Storage:
        """The operand in this direction, derived from the other operand where the format can."""
        here, other = (self.row, self.col) if direction == "row" else (self.col, self.row)
        if here is not None:
            return here
        assert other is not None
        if direction == "col" and derives_col(self.quantizer):
            return derive_col(self.quantizer, other)
        if direction == "row" and derives_col(self.quantizer) and self.quantizer.col_source == "original":
            return transpose(other)
        raise ValueError(
            f"{self.whose}the {direction} operand of this {list(self.shape)} tensor is absent and {self.quantizer} "
            f"cannot derive it: quantize with {direction}=True"
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor it stands for, in its own dtype or in ``dtype``; from the row operand if it is there. No gradient
        flows through it."""
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(
                f"{self.whose}dequantize({dtype!r}): it is a floating dtype, such as torch.float32, or None"
            )
        if (row := self.stored[0]) is not None:
            return decode(row, dtype or self.dtype).reshape(self.shape)
        return decode(self.operand("col"), dtype or self.dtype).t().contiguous().reshape(self.shape)

    def with_operands(
        self,
        row: Storage | None,
        col: Storage | None,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
    ) -> QuantizedTensor:
        """A tensor like this one, over other operands."""
        tensor = QuantizedTensor(row, col, self.quantizer, shape, dtype, amax_group=self.amax_group)
        tensor.title, tensor.owner, tensor.is_data = self.title, self.owner, self.is_data
        return tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """The same tensor, over ``function`` of each buffer."""
        row, col = (s.map(function) if s is not None else None for s in self.stored)
        return self.with_operands(row, col, self.shape, self.dtype)

    def tell_if_rounded_twice(self, source: QuantizedTensor) -> None:
        """Warn if stored values are to be encoded again: values of another format, as when a checkpoint of another
        format is loaded, or a part that shares a scale with others, as when ``dcp.load`` puts shards together."""
        if any(t.quantizer.side(d).plain for t in (self, source) for d, _ in t.operands):
            return
        if self.window is not None and not self.window.apart:
            whole = self.window.whole
            warn(
                f"{whole.whose}a part {list(self.shape)} of this {list(whole.shape)} tensor is written, with which the "
                f"rest shares scales of {self.quantizer}: all of it is encoded again, and what is small beside the "
                "largest value is lost. Write the whole, or load it by lpq.checkpoint.load, on any number of ranks",
                PrecisionWarning,
            )
        elif source.quantizer != self.quantizer:
            warn(
                f"{self.whose}the values written to this {list(self.shape)} tensor, stored as {self.quantizer}, were "
                f"stored as {source.quantizer}: they are rounded twice. Write it from high precision if you can",
                PrecisionWarning,
            )

    @property
    def held_bytes(self) -> int:
        """The bytes of all its buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def data(self) -> Tensor:
        """A view that is detached from autograd. A tensor that is assigned to it is encoded, as by ``copy_``: so
        ``weight.data -= x`` computes a new tensor, and encodes that."""
        view: QuantizedTensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        view.is_data = True
        return view

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape:
            raise ValueError(
                f"{self.whose}this tensor, stored as {self.quantizer}, is {list(self.shape)}, and what is assigned to "
                f"its data {list(value.shape)}, as FullyShardedDataParallel (FSDP1) does it: {REMEDY}; or make a new "
                "parameter of it"
            )
        with torch.no_grad():
            self.copy_(value)

    def __setitem__(self, index: Any, value: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)
            part = self[index]
        if isinstance(part, QuantizedTensor):
            part.copy_(torch.as_tensor(value, device=self.device))
        else:  # the index cuts a block: the selection is no view
            plain = self.dequantize(torch.float32)
            plain[index] = value.dequantize() if isinstance(value, QuantizedTensor) else value
            self.copy_(plain)

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise BufferError(f"{self.whose}this tensor is stored as {self.quantizer}: pass on the result of dequantize()")

    # ------------------------------------------------------------------------------ to PyTorch

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        flat = self._flat
        if flat is None or flat[0] is not self.stored or flat[1] is not self.amax_group:
            names = [f"{d}_{name}" for d, storage in self.operands for name in storage.buffers()]
            sides = tuple((d, s.quantizer, tuple(s.shape), s.dtype) for d, s in self.operands)
            group = _Group(self.amax_group) if self.amax_group is not None else NO_GROUP
            context = self.quantizer, sides, self.dtype, group
            flat = self._flat = self.stored, self.amax_group, (names, context)
        return flat[2]

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        context: tuple[Any, ...],
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
    ) -> QuantizedTensor:
        quantizer, sides, dtype, group = context
        tensors = [inner[f"{direction}_{b.name}"] for direction, side, *_ in sides for b in side.layout]
        return QuantizedTensor.from_tensors(tensors, sides, quantizer, outer_size, dtype, group.value)

    def __coerce_same_metadata_as_tangent__(self, expected: Any, kind: Any = None) -> Tensor:
        """Refuse to be the gradient of an output of compiled code, which was traced for another one."""
        raise TypeError(
            f"{self.whose}a gradient of {list(self.shape)} arrived encoded as {self.quantizer} at compiled code, which "
            "was traced for one in high precision and would encode it again: return it as it was before, or "
            "gradient.dequantize(), from the backward that encoded it; or leave the layers that take it uncompiled"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls.dispatch(func, args, kwargs or {})

    __torch_function__ = no_torch_function

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        operands = ", ".join(f"{d}={s!r}" for d, s in self.operands)
        return f"QuantizedTensor({list(self.shape)}, {self.dtype}, {operands})"

    def _repr_html_(self) -> str:
        return preformatted(repr(self))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        sides = {
            d: (s.quantizer.text, {n: bytes_of(b) for n, b in s.buffers().items()}, tuple(s.shape), s.dtype)
            for d, s in self.operands
        }
        is_param = is_parameter(self)
        is_shard = self.amax_group is not None
        state = (self.quantizer.text, sides, tuple(self.shape), self.dtype, self.requires_grad, is_param, is_shard)
        return rebuild, (*state, given) if is_param and (given := self.given()) else state

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        copy = self.map(torch.clone).requires_grad_(self.requires_grad)
        if is_parameter(self):
            mark_as_parameter(copy)
        memo[id(self)] = copy
        return cast("QuantizedTensor", copy)


class _Group:
    """A holder of a process group that PyTorch compares and hashes, but neither copies nor saves."""

    def __init__(self, value: ProcessGroup | Literal["unattached"] | None) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Group) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        return self


NO_GROUP = _Group(None)


def rebuild(
    quantizer: str,
    sides: dict[str, tuple[str, dict[str, Tensor], tuple[int, int], torch.dtype]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    is_param: bool,
    is_shard: bool = False,
    attributes: Any = None,
) -> QuantizedTensor:
    """Make a saved QuantizedTensor. The format's plugin is looked up now, so a missing one is an error in words."""
    check_flags(requires_grad=requires_grad, is_param=is_param, is_shard=is_shard)
    operands = operands_of(quantizer, sides, shape, dtype)
    tensor = QuantizedTensor(
        operands.get("row"), operands.get("col"), registry.quantizer(quantizer), shape, dtype,
        requires_grad=requires_grad, amax_group="unattached" if is_shard else None,
    )  # fmt: skip
    if is_param:
        mark_as_parameter(tensor)
    return cast("QuantizedTensor", set_attributes(tensor, attributes))
