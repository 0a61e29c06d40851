"""Encoding a tensor into a ``QuantizedTensor``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lpq.formats.format import Quantizer
from lpq.operations.argument_checks import as_seed, check_dense, check_offset, check_stack, state_of
from lpq.operations.inputs import as_matrix, check_input
from lpq.operations.operands import encode_operands
from lpq.operations.states import State, remember
from lpq.tensor.quantized_tensor import QuantizedTensor
from lpq.tensor.traced import wrap_operands


def quantize(
    quantizer: Quantizer,
    x: Tensor,
    *,
    row: bool = True,
    col: bool = True,
    amax_group: ProcessGroup | None = None,
    state: State | None = None,
    seed: Tensor | int | None = None,
    offset: int = 0,
    stack: bool = False,
) -> QuantizedTensor:
    """Encode ``x`` in the wanted directions; written ``quantizer.quantize(x)``. No gradient flows through it, and no
    tangent may.

    ``amax_group``: ``x`` is one of equal shards along dimension 0, and statistics that cover several shards are reduced
    over this group. ``state`` (see ``Quantizer.new_state``) holds statistics of earlier steps; it is updated in place.
    ``seed`` and ``offset`` (the first row of a shard in the whole tensor) determine stochastic rounding; without a seed
    one is drawn from torch's generator.

    ``stack``: ``x`` is ``[count, rows, cols]``, a stack of ``count`` matrices, each of which is encoded by itself. The
    seed is then a tensor of one for each; there is neither state nor group.
    """
    if not (row or col):
        raise ValueError("quantize: ask for row, col or both; a tensor without an operand holds nothing")
    check_input(x)
    check_dense(x)
    check_offset(offset)
    if stack:
        check_stack(quantizer, x, seed, state, amax_group, offset)
    nothing = state is None or (isinstance(state, Mapping) and not state)
    state = None if nothing else state_of(quantizer, cast("State", state), x.device) or None
    with torch.no_grad():
        matrix = x if stack else as_matrix(x)
        if quantizer.side("row").plain or quantizer.side("col").plain:
            matrix = matrix.clone()  # its operand would be a view of the caller's tensor
        operands = encode_operands(
            quantizer, matrix, row=row, col=col, group=amax_group, state=state,
            seed=cast("Tensor | None", seed) if stack else as_seed(seed, x.device), offset=offset,
        )  # fmt: skip
        if state is not None:
            remember(quantizer, state, operands.measured, row=row, col=col, group=amax_group)
        kept_row, kept_col = (o.row_major() if o is not None else None for o in (operands.row, operands.col))
    return wrap_operands(kept_row, kept_col, quantizer, x.shape, x.dtype, amax_group)
