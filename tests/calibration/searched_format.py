"""A third party's format whose option for the search of scales has another name than ``search``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lpq import registry
from lpq.core import Buffer, Quantizer, Stat, Storage
from lpq.registry import FormatSpec, hookimpl


@dataclass(frozen=True)
class RowsQuantizer(Quantizer):
    """INT8 with a scale for each row, which may be the best of some by the square of the error."""

    best: bool = False
    """Whether the scale is the best of some."""

    stats = (Stat("amax", block=(1, None)),)

    def measure(self, x: Tensor) -> dict[str, Tensor]:
        return {"amax": x.float().abs().amax(1, keepdim=True)}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        scales = [stats["amax"].clamp(min=1e-30) * part / 127 for part in ((1.0, 0.9) if self.best else (1.0,))]
        codes = [(x.float() / scale).round().clamp(-127, 127) for scale in scales]
        errors = [(c * s - x.float()).square().sum(1, keepdim=True) for c, s in zip(codes, scales, strict=True)]
        least = torch.stack(errors).argmin(0)
        data = torch.where(least == 0, codes[0], codes[-1])
        scale = torch.where(least == 0, scales[0], scales[-1])
        return RowsStorage(data=data.to(torch.int8), scale=scale)

    def frozen(self, search: str | None = None, *, static: bool = True) -> Quantizer:
        return self if search != "mse" or self.best else replace(self, best=True).ready()

    def searched_by(self, method: str) -> bool:
        return self.best and method == "mse"


class RowsStorage(Storage):
    layout = (Buffer("data", torch.int8), Buffer("scale", torch.float32, block=(1, None)))

    def decode(self) -> Tensor:
        return self.data.float() * self.scale


class _Plugin:
    @hookimpl
    def lpq_register_formats(self) -> FormatSpec:
        return FormatSpec(
            name="rows",
            summary="INT8 with a scale for each row",
            quantizer="searched_format:RowsQuantizer",
            storage="searched_format:RowsStorage",
            effective_bits=None,
        )


def register() -> None:
    """Make the format known in this process."""
    registry.register(_Plugin(), name="rows")
