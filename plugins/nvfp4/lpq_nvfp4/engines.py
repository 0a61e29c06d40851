"""How NVFP4 weights lie in the files of inference engines: pairs of elements, a scale for 16, and one for all.

lpq keeps the amax of an operand; the layouts keep the divisor of the operand, or its factor. An amax that was measured
in bf16 or fp16 is found again exactly, one in fp32 to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lpq.formats.elements import E4M3
from lpq.formats.inverse import preimage
from lpq.registry import Inputs, Part, Scheme, decoded_in_bf16
from lpq_nvfp4.quantizer import NVFP4Quantizer
from lpq_nvfp4.reference import E2M1_MAX, E4M3_MAX, GROUP, tensor_scale
from lpq_nvfp4.storage import NVFP4Storage

LARGEST = E4M3_MAX * E2M1_MAX
Convert = Callable[[Tensor], Tensor]


def _divisor(amax: Tensor) -> Tensor:
    """The divisor of the whole operand. It is not finite if the amax is not, so that this is noticed."""
    return torch.where(amax.isfinite(), tensor_scale(amax), amax)


def _divisor_to_amax(divisor: Tensor) -> Tensor:
    return preimage(_divisor, divisor.reshape(()), LARGEST / divisor.reshape(()))


def _factor(amax: Tensor) -> Tensor:
    """The factor of all; 1 where the amax is 0, so that engines may divide by it."""
    return torch.where(amax == 0, 1.0, amax / torch.full_like(amax, LARGEST))


def _factor_to_amax(factor: Tensor) -> Tensor:
    return preimage(_factor, factor.reshape(()), factor.reshape(()) * LARGEST)


def _serves(quantizer: Any) -> bool:
    """Operands that are not rotated, and have one amax; how they were rounded does not matter."""
    return isinstance(quantizer, NVFP4Quantizer) and quantizer.rotation is None and quantizer.scaling == "tensor"


def _serves_inputs(quantizer: Any) -> bool:
    return _serves(quantizer) and quantizer.block == "1x16" and not _searches(quantizer)


def _searches(quantizer: Any) -> bool:
    """Inputs whose scales training searches. Engines do not, and have the same files for both."""
    return _serves(quantizer) and quantizer.block == "1x16" and quantizer.search != "amax"


def _serves_rows(quantizer: Any) -> bool:
    """No file says that each row of inputs has an amax. An engine that is told so when it starts reads files with one
    amax, and ignores it."""
    return isinstance(quantizer, NVFP4Quantizer) and quantizer.scaling == "row"


def _told_apart(rows: int, cols: int, dtype: str) -> str:
    return (
        "engines encode these inputs with the one scale of the files, and training with a scale for each row. An "
        "engine may measure each row if it is told to when it starts, as SGLang does in experts by "
        "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION=1"
    )


def _not_searched(rows: int, cols: int, dtype: str) -> str:
    return (
        "engines take the scale of each block of these inputs from its amax, and training searches it: with x=nvfp4 in "
        "fprop, training encodes them as engines do"
    )


def _why_not(rows: int, cols: int) -> str | None:
    return f"its columns are no multiple of {GROUP}" if cols % GROUP else None


def _scheme(
    layout: str, names: tuple[str, str, str, str], shape: tuple[int, ...], to: Convert, back: Convert,
    config: Mapping[str, Any], inputs: Mapping[str, Any], with_inputs: tuple[str, ...] = (),
    not_experts: tuple[str, ...] = (), **others: Any,
) -> Scheme:  # fmt: skip
    """``names``: of the weight, its scales and the scale of the whole, and of the same three for inputs.
    ``with_inputs``: the programs that read these weights only where inputs are encoded, too."""

    def write(storage: NVFP4Storage) -> Sequence[Tensor]:
        scale = storage.scale
        if storage.quantizer.block == "16x16":
            scale = scale.view(torch.uint8).repeat_interleave(GROUP, 0)[: storage.shape[0]].view(E4M3)
        return storage.data, scale, to(storage.amax).reshape(shape)

    def read(quantizer: NVFP4Quantizer, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        data, scale, whole = parts
        if quantizer.block == "16x16":
            codes = scale.view(torch.uint8)
            first = codes[::GROUP]
            if not torch.equal(first.repeat_interleave(GROUP, 0)[: codes.shape[0]], codes):
                raise ValueError(f"its rows have scales of their own, and {quantizer} has one for {GROUP} of them")
            scale = first.contiguous().view(E4M3)
        return data, scale, back(whole)

    def whole(name: str) -> Part:
        return Part(name=name, dtype=torch.float32, shape=lambda rows, cols: shape, holds="value")

    parts = (
        Part(name=names[0], dtype=torch.uint8, shape=lambda rows, cols: (rows, cols // 2), holds="codes"),
        Part(name=names[1], dtype=E4M3, shape=lambda rows, cols: (rows, cols // GROUP), holds="scales"),
        whole(names[2]),
    )
    static = Inputs(
        serves=_serves_inputs, quantizer="nvfp4(static=true)", config=inputs, part=whole(names[3]),
        write=lambda amax: to(amax).reshape(shape), read=back, readers=with_inputs, not_experts=not_experts,
    )  # fmt: skip
    return Scheme(
        layout=layout, title="NVFP4", serves=_serves, quantizer="nvfp4", config=config, parts=parts, write=write,
        read=read, why_not=_why_not, inputs=(
            static, replace(static, serves=_searches, remark=_not_searched),
            replace(static, serves=_serves_rows, remark=_told_apart),
        ), not_experts=not_experts, **others,
    )  # fmt: skip


def _args(dynamic: bool | str) -> dict[str, Any]:
    return {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": GROUP,
        "dynamic": dynamic, "scale_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip


BITS = {"num_bits": 4, "type": "float", "dynamic": False, "group_size": GROUP}
SCHEMES = (
    _scheme(
        "compressed-tensors", ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"), (1,),
        _divisor, _divisor_to_amax, {"format": "nvfp4-pack-quantized", "weights": _args(False)},
        {"input_activations": {**_args("local"), "observer": "static_minmax"}}, remark=decoded_in_bf16,
        readers=("vLLM", "SGLang", "transformers"),
        not_experts=("transformers",),  # whose decoding of experts leaves out the scale of the whole
    ),
    _scheme(
        "modelopt", ("weight", "weight_scale", "weight_scale_2", "input_scale"), (), _factor, _factor_to_amax,
        {"quant_algo": "W4A16_NVFP4", "group_size": GROUP, "weights": BITS},
        {"quant_algo": "NVFP4", "input_activations": BITS}, with_inputs=("TensorRT-LLM",),
        readers=("vLLM", "SGLang"),
    ),
)  # fmt: skip
