"""The choice of the kernels of a norm that run beside the one that computes and encodes its elements."""

from __future__ import annotations

from typing import Protocol

import torch

from lpq.operations import norm_kernels, norm_programs, produced_programs, produced_tiles
from lpq.operations.norm_kernels import Gradients, Rows, SumRows
from lpq.operations.norms import NormKind, norm_source
from lpq.operations.producer import Kernels, kernels_of


class NormKernels(Protocol):
    """The kernels of norms in one language."""

    def bind_rows(self, norm: NormKind, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Rows: ...
    def bind_sum_rows(
        self, norm: NormKind, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> SumRows: ...
    def bind_gradients(
        self, norm: NormKind, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> Gradients | None: ...


BESIDE: dict[Kernels, NormKernels] = {produced_tiles: norm_kernels, produced_programs: norm_programs}


def norm_kernels_of(
    norm: NormKind, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> NormKernels | str:
    """Return the kernels in the language of those that compute a norm's elements, or why none do."""
    kernels = kernels_of(norm_source(norm), shape, dtype, device)
    return kernels if isinstance(kernels, str) else BESIDE[kernels]
