"""The one option of identity. There is nothing to measure, and encoding is a view or a cast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from lpq.core import Quantizer, Storage

SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class IdentityQuantizer(Quantizer):
    """The matrix itself."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype to cast the matrix to, as a name (``bf16`` for short) or a ``torch.dtype``. None: the matrix keeps its
    dtype."""

    plain = True
    transposable = True

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        dtype = options.get("dtype")
        if isinstance(dtype, torch.dtype):
            options["dtype"] = str(dtype).removeprefix("torch.")
        elif isinstance(dtype, str):
            options["dtype"] = SHORT.get(dtype, dtype)
        return super().from_options(**options)

    @property
    def known_failures(self) -> dict[str, str]:
        """To the conformance kit: a cast is no better than the dtype."""
        if self.dtype != "float16":
            return {}
        return {"test_error_is_bounded[tiny]": "fp16 has no number between 0 and 2^-24"}

    def encode(self, x: Tensor, stats: Mapping[str, Tensor]) -> Storage:
        return self.storage(data=x if self.dtype is None else x.to(getattr(torch, self.dtype)))
