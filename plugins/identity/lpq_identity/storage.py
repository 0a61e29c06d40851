"""The buffer of an identity operand: the matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lpq.core import Buffer, Storage

LAYOUTS = {
    None: (Buffer("data", None),),
    "float32": (Buffer("data", torch.float32),),
    "bfloat16": (Buffer("data", torch.bfloat16),),
    "float16": (Buffer("data", torch.float16),),
}


class IdentityStorage(Storage):
    """``data``: the matrix itself, which may be a view of the tensor that was encoded."""

    layout = LAYOUTS[None]

    @classmethod
    def layout_for(cls, quantizer: Any) -> tuple[Buffer, ...]:
        return LAYOUTS[quantizer.dtype]

    def decode(self) -> Tensor:
        return self.data.float()

    def transposed(self) -> IdentityStorage:
        return IdentityStorage(data=self.data.t())
