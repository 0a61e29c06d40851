"""How MXFP8 weights lie in the files of inference engines: elements and exponents as they are, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lpq.formats.elements import E4M3
from lpq.registry import Inputs, Part, Scheme, decoded_in_bf16
from lpq_mxfp8.quantizer import MXFP8Quantizer
from lpq_mxfp8.reference import BLOCK
from lpq_mxfp8.storage import MXFP8Storage

GROUP = 32
WEIGHT = Part(name="weight", dtype=E4M3, shape=lambda rows, cols: (rows, cols), holds="codes")


def _serves(quantizer: Any) -> bool:
    return isinstance(quantizer, MXFP8Quantizer) and quantizer.dtype == "e4m3"


def _why_not(rows: int, cols: int) -> str | None:
    return f"its columns are no multiple of {GROUP}" if cols % GROUP else None


def _write(storage: MXFP8Storage) -> Sequence[Tensor]:
    return storage.data, storage.scale


def _read(quantizer: MXFP8Quantizer, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    return parts


def _scheme(
    layout: str, scale: str, config: Mapping[str, Any], inputs: Mapping[str, Any], not_experts: tuple[str, ...] = (),
    **others: Any,
) -> Scheme:  # fmt: skip
    assert BLOCK == (1, GROUP)
    exponents = Part(name=scale, dtype=torch.uint8, shape=lambda rows, cols: (rows, cols // GROUP), holds="exponents")
    measured = Inputs(serves=_serves, quantizer="mxfp8", config=inputs, not_experts=not_experts)
    return Scheme(
        layout=layout, title="MXFP8", serves=_serves, quantizer="mxfp8", config=config, parts=(WEIGHT, exponents),
        write=_write, read=_read, inputs=(measured,), why_not=_why_not,
        not_experts=not_experts, **others,
    )  # fmt: skip


def _args(dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": dynamic,
        "scale_dtype": "torch.uint8",
    }  # fmt: skip


BITS = {"num_bits": 8, "type": "float", "dynamic": False, "group_size": GROUP}
SCHEMES = (
    _scheme(
        "compressed-tensors", "weight_scale", {"format": "mxfp8-quantized", "weights": _args(False)},
        {"input_activations": _args(True)}, remark=decoded_in_bf16, readers=("vLLM", "transformers"),
        not_experts=("transformers",),
    ),
    _scheme(
        "modelopt", "weight_scale", {"group_size": GROUP, "weights": BITS},
        {"quant_algo": "MXFP8", "input_activations": {**BITS, "dynamic": True}}, readers=("vLLM", "SGLang"),
    ),
    _scheme(
        "fp8-block", "weight_scale_inv", {"weight_block_size": [1, GROUP], "scale_fmt": "ue8m0"},
        {"activation_scheme": "dynamic"}, readers=("transformers",),
        unwritten="vLLM and SGLang take its exponents for fp32 scales, without an error; export to "
        "'compressed-tensors', which vLLM and transformers read, or to 'modelopt', which vLLM and SGLang read",
    ),
)  # fmt: skip
