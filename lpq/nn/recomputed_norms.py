"""The output of a norm that has encoded it, computed once more: for something that takes no operands, and for the
column operand, which backward makes by ``x.save=input``.

By that option forward encodes the row operand alone, and the layers keep what the norm is computed of: its input, which
it keeps itself, and a few numbers. The first of them whose backward runs makes the column operand, for all, to the bit
as forward would have made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lpq.nn.siblings import SharedColumn
from lpq.operations.binding import on_device
from lpq.operations.encoder import Encoder, EncoderSpec, bind_encoder
from lpq.operations.inputs import as_matrix
from lpq.operations.norms import NormKind
from lpq.operations.producer import producing
from lpq.operations.source import Source
from lpq.torch_private import cuda
from lpq.torch_private.tensors import version_of


def value_of(norm: NormKind, x: Tensor, columns: Sequence[Tensor], version: int | None) -> Tensor:
    """The output of a norm that has encoded it, for something that takes no operands in this pass. ``version``: of the
    input then; None: nobody counts its writes."""
    _check_unwritten(x, version, "something other than layers of lpq took the output, which is computed for it")
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False), on_device(x.device):
        return norm.compute(x.detach(), *columns)


def _check_unwritten(x: Tensor, version: int | None, then: str) -> None:
    if version is not None and version_of(x) != version:
        raise RuntimeError(
            f"the input of a norm, {list(x.shape)}, was written to, and then {then}: write to a copy, or call "
            "lpq.unfuse on the block"
        )


class ColumnOfNorm(SharedColumn):
    """The column operand of a norm's output. Streams of a GPU have one each, as none waits for another."""

    stream: int = 0

    def __init__(self, encoder: Encoder, version: int | None) -> None:
        """``version``: of the input, as for ``value_of``. Autograd compares it once a layer keeps the input."""
        super().__init__(encoder)
        self.version = version

    def check(self, x: Tensor, *_: Tensor) -> None:
        """Check what a layer is to keep for backward, the input first."""
        _check_unwritten(x, self.version, "a layer took the output, which backward computes for it again")

    def begin(self, begin: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor]) -> Any:
        stream = cuda.current_stream(tensors[0].get_device()) if tensors[0].is_cuda else 0
        if stream != self.stream:
            self.operand, self.stream = None, stream
        return super().begin(begin, tensors)


def inputs_of_column(x: Tensor, rows: Sequence[Tensor], columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors that layers keep in place of the operand: the input of the norm, what a kernel found of its rows, and
    copies of the parameters. FSDP2 may have freed these when backward of a layer begins."""
    return x.detach(), *rows, *(column.clone() for column in columns)


def column_encoder(norm: NormKind, source: Source | None, spec: EncoderSpec) -> Encoder:
    """The encoder that makes the operand, of these tensors and of the statistics that forward measured. ``source``: the
    norm's, where kernels compute it; None: the operations of its module do."""
    encoder, measured = (producing(source) if source is not None else bind_encoder)(spec), len(spec.given)

    def later(kept: Sequence[Tensor]) -> Sequence[Tensor]:
        count = len(kept) - measured
        x, *columns = inputs = kept[:count]
        of: Any = as_matrix(value_of(norm, x, columns, None)) if source is None else inputs
        return encoder.encode(of, kept[count:], None)[1]

    return encoder._replace(begin=tuple, later=later)
