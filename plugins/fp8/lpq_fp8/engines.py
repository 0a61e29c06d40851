"""How FP8 weights lie in the files of inference engines: elements unchanged, and the scales that decode them, in
fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lpq.formats.elements import E4M3, FLT_MAX
from lpq.formats.inverse import preimage
from lpq.formats.layout import Block, blocks
from lpq.registry import Described, Group, Inputs, Layout, LayoutError, Part, Scheme
from lpq.registry.showing import brief
from lpq_fp8.quantizer import FP8Quantizer
from lpq_fp8.reference import BLOCKS, ROW, TENSOR, scale_from_amax
from lpq_fp8.storage import FP8Storage

VLLM, SGLANG, TRANSFORMERS, TENSORRT = "vLLM", "SGLang", "transformers", "TensorRT-LLM"
SQUARE, LINE, GROUP = BLOCKS["128x128"], BLOCKS["1x128"], 128
Shape = Callable[[int, int], tuple[int, ...]]
WEIGHT = Part(name="weight", dtype=E4M3, shape=lambda rows, cols: (rows, cols), holds="codes")


def _input_scale(amax: Tensor) -> Tensor:
    return scale_from_amax(amax, torch.finfo(E4M3).max, FLT_MAX, pow2=False).reciprocal()


def _input_amax(scale: Tensor) -> Tensor:
    scale = scale.reshape(())
    return preimage(_input_scale, scale, scale * torch.finfo(E4M3).max)


def _is(block: Block, *, pow2: bool | None = None) -> Callable[[Any], bool]:
    """Whether a quantizer encodes in E4M3 with a scale for each such block."""

    def serves(quantizer: Any) -> bool:
        return (
            isinstance(quantizer, FP8Quantizer)
            and (quantizer.dtype, quantizer.scaled_block) == ("e4m3", block)
            and pow2 in (None, quantizer.pow2_scales)
        )

    return serves


def _part(name: str, shape: Shape, *others: str, whole: bool = False) -> Part:
    return Part(name=name, others=others, dtype=torch.float32, shape=shape, holds="value" if whole else "scales")


def _static(name: str, shape: tuple[int, ...], config: Mapping[str, Any], *others: str) -> Inputs:
    return Inputs(
        serves=_is(TENSOR, pow2=False),
        quantizer="fp8(static=true)",
        config=config,
        part=_part(name, lambda rows, cols: shape, *others, whole=True),
        write=lambda amax: _input_scale(amax).reshape(shape),
        read=_input_amax,
    )


def _dynamic(block: Block, quantizer: str, config: Mapping[str, Any], **others: Any) -> Inputs:
    return Inputs(serves=_is(block), quantizer=quantizer, config=config, **others)


def _whole_groups(rows: int, cols: int, dtype: str) -> str | None:
    if not cols % GROUP:
        return None
    return (
        f"transformers encodes inputs in groups of {GROUP} columns, and fails where the last group has fewer: load "
        "with CompressedTensorsConfig(dequantize=True), or give these layers the recipe fp8-row"
    )


def _scheme(layout: str, title: str, quantizer: str, scale: Part, config: Mapping[str, Any], **others: Any) -> Scheme:
    def write(storage: FP8Storage) -> Sequence[Tensor]:
        rows, cols = storage.shape
        return storage.data, storage.scale.reshape(scale.shape(rows, cols))

    def read(quantizer: FP8Quantizer, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        weight, found = parts
        if quantizer.pow2_scales and not bool((torch.frexp(found).mantissa == 0.5).all()):
            raise ValueError(f"its scales are no powers of two, as the scales of {quantizer} are")
        return weight, found.reshape(quantizer.layout[1].grid(*weight.shape))

    return Scheme(
        layout=layout, title=title, quantizer=quantizer, config=config, parts=(WEIGHT, scale), write=write, read=read,
        **others,
    )  # fmt: skip


def _grid(rows: int, cols: int) -> tuple[int, ...]:
    return blocks(rows, SQUARE[0]), blocks(cols, SQUARE[1])


# ---------------------------------------------------------------------------------------------- compressed-tensors


def _args(strategy: str, dynamic: bool, **others: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": dynamic, **others}


def _activations(strategy: str, dynamic: bool, **others: Any) -> dict[str, Any]:
    return {"format": "float-quantized", "input_activations": _args(strategy, dynamic, **others)}


COMPRESSED_INPUTS = (
    _static("input_scale", (1,), _activations("tensor", False)),
    _dynamic(TENSOR, "fp8", _activations("tensor", True)),
    _dynamic(ROW, "fp8(scaling=row)", _activations("token", True)),
    _dynamic(LINE, "fp8(scaling=block)", _activations("group", True, group_size=GROUP), remark=_whole_groups),
)


def _compressed(
    title: str, block: Block, quantizer: str, shape: Shape, whole: bool, experts: Sequence[str], **weights: Any
) -> Scheme:
    """``experts``: the strategies of inputs with which vLLM loads experts. It loads no blocks with static inputs, and
    transformers no experts with scales of blocks."""
    others = (TRANSFORMERS,) if block == SQUARE else ()
    config = {"format": "naive-quantized", "weights": _args(dynamic=False, **weights)}
    scale = _part("weight_scale", shape, whole=whole)
    inputs = [
        replace(
            one, not_experts=(*(() if one.config["input_activations"]["strategy"] in experts else (VLLM,)), *others),
            not_readers=(VLLM,) if block == SQUARE and one.part is not None else (),
        )
        for one in COMPRESSED_INPUTS
    ]  # fmt: skip
    return _scheme(
        "compressed-tensors", title, quantizer, scale, config, serves=_is(block), inputs=tuple(inputs),
        readers=(VLLM, SGLANG, TRANSFORMERS), not_experts=(VLLM, *others),
    )  # fmt: skip


ANY_BLOCK = "fp8(scaling=block, block=128x128, pow2=false)"
POW2_BLOCK = "fp8(scaling=block, block=128x128)"
COMPRESSED = (
    _compressed("FP8 per tensor", TENSOR, "fp8", lambda rows, cols: (1,), True, ["tensor"], strategy="tensor"),
    _compressed(
        "FP8 per row", ROW, "fp8(scaling=row)", lambda rows, cols: (rows, 1), False, ["token"], strategy="channel"
    ),
    _compressed(
        "FP8 per block",
        SQUARE,
        ANY_BLOCK,
        _grid,
        False,
        ["tensor", "token", "group"],
        strategy="block",
        block_structure=[128, 128],
    ),
)

# ---------------------------------------------------------------------------------------------- modelopt


def _modelopt(
    title: str, block: Block, quantizer: str, scale: Part, *inputs: Inputs, readers: tuple[str, ...],
    not_experts: tuple[str, ...] = (), **config: Any,
) -> Scheme:  # fmt: skip
    return _scheme(
        "modelopt", title, quantizer, scale, config, serves=_is(block), inputs=inputs, readers=(TENSORRT, *readers),
        not_experts=not_experts,
    )  # fmt: skip


BITS = {"num_bits": 8, "type": "float", "dynamic": False}
TOKENS = {"num_bits": 8, "type": "float", "dynamic": True}
MODELOPT = (
    _modelopt(
        "FP8 per tensor", TENSOR, "fp8", _part("weight_scale", lambda rows, cols: (), whole=True),
        _static("input_scale", (), {"quant_algo": "FP8", "input_activations": BITS}), weights=BITS,
        readers=(VLLM, SGLANG),
    ),
    _modelopt(
        "FP8 per row", ROW, "fp8(scaling=row)", _part("weight_scale", lambda rows, cols: (rows,)),
        _dynamic(
            ROW, "fp8(scaling=row)", {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "input_activations": TOKENS},
            not_experts=(VLLM,),
        ), weights=BITS, readers=(VLLM,),
    ),
    _modelopt(
        "FP8 per block", SQUARE, ANY_BLOCK,
        _part("weight_scale", lambda rows, cols: (_grid(rows, cols)[0], 1, _grid(rows, cols)[1], 1)),
        quant_algo="fp8_pb_wo", weights=BITS, readers=(VLLM,), not_experts=(VLLM,),
    ),
)  # fmt: skip

# ---------------------------------------------------------------------------------------------- fp8-block

METHOD, FMT = "fp8", "e4m3"
DEFAULTS = {"activation_scheme": "dynamic", "scale_fmt": "float"}
"""The values of a configuration that does not have these keys, in transformers and in engines. One without
``weight_block_size`` has no blocks, as in engines: transformers writes that key always."""
ALONE = {"fmt": FMT, "expert_dtype": "fp8", "modules_to_convert": []}
"""The only values that are accepted of keys by which other programs quantize more, or in another way."""
LEFT = ("modules_to_not_convert", "ignored_layers")
"""The list of layers in high precision, as lpq writes it and as others do."""


def _fine(
    title: str, block: Block, quantizer: str, scale: Part, *inputs: Inputs, pow2: bool | None, size: list[int] | None,
    scale_fmt: Mapping[str, str] | None = None, **others: Any,
) -> Scheme:  # fmt: skip
    config = {"weight_block_size": size, **(scale_fmt or {})}
    return _scheme("fp8-block", title, quantizer, scale, config, serves=_is(block, pow2=pow2), inputs=inputs, **others)


BY_BLOCK = _dynamic(LINE, "fp8(scaling=block)", {"activation_scheme": "dynamic"})
INVERSE = _part("weight_scale_inv", _grid)
READERS = (VLLM, SGLANG, TRANSFORMERS)
FINE_GRAINED = (
    _fine(
        "FP8 per block", SQUARE, POW2_BLOCK, INVERSE, BY_BLOCK, pow2=True, size=[128, 128], readers=READERS,
        scale_fmt={"scale_fmt": "ue8m0"},
    ),
    _fine(
        "FP8 per block", SQUARE, ANY_BLOCK, INVERSE, BY_BLOCK, pow2=False, size=[128, 128], readers=READERS,
    ),
    _fine(
        "FP8 per tensor", TENSOR, "fp8", _part("weight_scale_inv", lambda rows, cols: (), "weight_scale", whole=True),
        _static("activation_scale", (), {"activation_scheme": "static"}, "input_scale"),
        _dynamic(TENSOR, "fp8", {"activation_scheme": "dynamic"}), pow2=None, size=None,
        unwritten="transformers calls its scales weight_scale_inv and activation_scale, vLLM and SGLang call them "
        "weight_scale and input_scale, and none reads the names of the other; export to 'compressed-tensors', which "
        "all of them read",
    ),
)  # fmt: skip
SCHEMES = COMPRESSED + MODELOPT + FINE_GRAINED


class FineGrained(Layout):
    """DeepSeek's, which transformers calls ``fp8``: one scheme for all layers, and inputs that engines encode alike.

    A scheme's ``config`` is what stands in ``quantization_config`` itself.
    """

    def files(self, groups: Sequence[Group], left: Sequence[str]) -> dict[str, dict[str, Any]]:
        other = 'use the layout "compressed-tensors"'
        if len(groups) > 1:
            found = "; ".join(f"{group.scheme.title}: {brief([*group.layers])}" for group in groups)
            raise LayoutError(
                f"the layout 'fp8-block' has one scheme for all layers, and the model has {found}: {other}"
            )
        (group,) = groups
        if group.inputs is None:
            raise LayoutError(
                f"engines encode the inputs of layers in the layout 'fp8-block', {group.scheme.title}, and the recipe "
                f"of {brief([*group.layers])} does not encode them so: {other}"
            )
        config = {"quant_method": METHOD, "fmt": FMT, **group.config, LEFT[0]: [*left]}
        return {"config.json": {"quantization_config": config}}

    def read(self, files: Mapping[str, Mapping[str, Any]], schemes: Sequence[Scheme]) -> Described | None:
        config = files.get("config.json", {}).get("quantization_config")
        if not isinstance(config, Mapping) or config.get("quant_method") != METHOD:
            return None
        for key, only in ALONE.items():
            if config.get(key) and config[key] != only:
                raise LayoutError(f"config.json: its {key} is {brief(config[key])}, and lpq reads {brief(only)} there")
        left: Sequence[str] = next((config[key] for key in LEFT if config.get(key)), [])
        config = {**DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
        scheme = next((s for s in schemes if _wanted(DEFAULTS | dict(s.config)) == _wanted(config)), None)
        if scheme is None:
            raise LayoutError(f"config.json: no format that is installed has {brief(_wanted(config))}")
        how = config["activation_scheme"]
        inputs = next((i for i in scheme.inputs if i.config["activation_scheme"] == how), None)
        if inputs is None:
            raise LayoutError(f"config.json: no inputs are known by activation_scheme={brief(how)} in {scheme.title}")

        def described(layer: str) -> tuple[Scheme, Inputs | None] | None:
            return None if layer in left else (scheme, inputs)

        return described


def _wanted(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration by which a scheme is found. One scale of the whole is fp32 here, whatever dtype it
    came in."""
    block = config.get("weight_block_size")
    return {"weight_block_size": block, **({"scale_fmt": config["scale_fmt"]} if block is not None else {})}
