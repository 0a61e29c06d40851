"""Encoding a tensor by itself: measure → reduce → encode, for both directions at once."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from lpq.formats.format import Quantizer, Storage
from lpq.formats.sections import Sections
from lpq.operations.cut import Cut, check_shard
from lpq.operations.encoder import EncoderSpec, through_operators
from lpq.operations.inputs import check_input
from lpq.operations.part_encoders import bind_part
from lpq.operations.states import State, remember

__all__ = ["Operands", "encode_operands", "remember"]


class Operands(NamedTuple):
    """The wanted operands of one tensor, and the statistics that ``remember`` takes into its state."""

    row: Storage | None
    col: Storage | None
    measured: list[Tensor]


def encode_operands(
    quantizer: Quantizer,
    x: Tensor,
    *,
    row: bool = True,
    col: bool = True,
    group: ProcessGroup | None = None,
    state: State | None = None,
    seed: Tensor | None = None,
    offset: int = 0,
    measures: bool = False,
) -> Operands:
    """Encode the matrix ``x``. The state is read, never written: see ``remember``. Buffers lie in memory as encoding
    leaves them, which may be column by column: ``Storage.row_major`` is for operands that are kept.

    Args:
        quantizer: The quantizer of the tensor.
        x: The matrix, or a stack of matrices.
        row: Whether the row operand is wanted.
        col: Whether the column operand is wanted.
        group: The ranks that have equal shards along dimension 0, of which ``x`` is one; None: ``x`` is whole.
        state: The statistics of earlier steps, if the quantizer has a state.
        seed: The seed of random bits, a tensor on the device; None: a new one is drawn where it is needed.
        offset: The first row of ``x`` in the whole tensor.
        measures: Whether statistics are returned though there is no state.
    """
    check_input(x)
    *count, rows, cols = x.shape
    spec = EncoderSpec(quantizer, (rows, cols), x.dtype, x.device, row, col, state is not None, measures=measures)
    spec = spec._replace(offset=offset)
    if count:
        spec = spec._replace(sections=Sections(count[0], stack=True, at_once=False))
    if group is None or group.size() == 1:
        encoder = through_operators(spec)
    else:
        check_shard(quantizer.side("row") if row else None, quantizer.side("col") if col else None, rows)
        shard = Cut(0, rank=0, ranks=group.size(), size=rows)  # ``offset`` says where it lies
        name = group.group_name
        encoder = bind_part(through_operators, spec, shard, name).alone(name).encoder
    of_row, of_col, measured = encoder.encode(x, state or (), seed)
    return Operands(*encoder.storages(of_row, of_col), list(measured))
