"""How MXFP4 weights lie in files that inference engines read, in the layout of compressed-tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lpq.registry import Inputs, Part, Scheme, decoded_in_bf16
from lpq_mxfp4.quantizer import MXFP4Quantizer
from lpq_mxfp4.reference import GROUP
from lpq_mxfp4.storage import MXFP4Storage


def _serves(quantizer: Any) -> bool:
    """Operands that are not rotated; how they were rounded does not matter."""
    return isinstance(quantizer, MXFP4Quantizer) and not quantizer.rht


def _serves_inputs(quantizer: Any) -> bool:
    return _serves(quantizer) and quantizer.scale == "even"


def _other_scales(rows: int, cols: int, dtype: str) -> str:
    return (
        "engines round the scale of each block of these inputs to even, and training by another rule: with "
        "x=mxfp4(scale=even) in fprop, training encodes them as engines do"
    )


def _write(storage: MXFP4Storage) -> Sequence[Tensor]:
    return storage.data, storage.scale


def _read(quantizer: MXFP4Quantizer, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    return parts


def _why_not(rows: int, cols: int) -> str | None:
    return f"its columns are no multiple of {GROUP}" if cols % GROUP else None


def _args(dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": dynamic,
        "scale_dtype": "torch.uint8",
    }  # fmt: skip


INPUTS = Inputs(serves=_serves_inputs, quantizer="mxfp4(scale=even)", config={"input_activations": _args(True)})
SCHEMES = (
    Scheme(
        layout="compressed-tensors",
        title="MXFP4",
        serves=_serves,
        quantizer="mxfp4",
        config={"format": "mxfp4-pack-quantized", "weights": _args(False)},
        parts=(
            Part(name="weight_packed", dtype=torch.uint8, shape=lambda rows, cols: (rows, cols // 2), holds="codes"),
            Part(
                name="weight_scale", dtype=torch.uint8, shape=lambda rows, cols: (rows, cols // GROUP),
                holds="exponents",
            ),
        ),
        write=_write,
        read=_read,
        inputs=(INPUTS, replace(INPUTS, serves=_serves, remark=_other_scales)),
        readers=("vLLM", "transformers"),
        why_not=_why_not,
        remark=decoded_in_bf16,
    ),
)  # fmt: skip
