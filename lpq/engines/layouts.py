"""The layouts: lpq's own, which any format may have schemes for, and the layouts of plugins."""

from __future__ import annotations

from lpq import registry
from lpq.checkpoint.errors import UnknownName
from lpq.formats import Quantizer
from lpq.registry import Inputs, Layout, Part, PluginError, Scheme
from lpq.registry.errors import suggestion

OWN = {
    "compressed-tensors": (
        "lpq.engines.compressed_tensors:CompressedTensors",
        "vLLM's and SGLang's general one, and transformers'",
    ),
    "modelopt": ("lpq.engines.modelopt:ModelOpt", "NVIDIA's, for TensorRT-LLM, vLLM and SGLang"),
}
"""The layouts and their purposes, by name."""


def summaries() -> dict[str, str]:
    """The purpose of each layout, by name."""
    own = {name: summary for name, (_, summary) in OWN.items()}
    return own | {name: spec.summary for name, spec in registry.layouts().items()}


def layout_named(name: str) -> Layout:
    """The layout with this name."""
    if name in OWN:
        layout: Layout = registry.resolve(OWN[name][0])()
        return layout
    if name in registry.layouts():
        return registry.layout(name)
    raise UnknownName(f"there is no layout {name!r}: {suggestion(str(name), summaries())}")


def parts_of(scheme: Scheme, inputs: Inputs | None) -> list[Part]:
    """The tensors that files have for a layer with this scheme: the tensors of its weight, and the tensor of its input,
    if any."""
    extra = inputs.part if inputs is not None else None
    return [*scheme.parts, *([extra] if extra is not None else [])]


def schemes_for(quantizer: Quantizer, layout: str) -> list[Scheme]:
    """The schemes of this quantizer's format in this layout."""
    return [s for s in registry.schemes(registry.format_of(type(quantizer)).name) if s.layout == layout]


def schemes_in(layout: str) -> list[Scheme]:
    """How operands of any format lie in this layout; formats whose plugins cannot be used have none."""
    schemes: list[Scheme] = []
    for name in registry.formats():
        try:
            schemes += [scheme for scheme in registry.schemes(name) if scheme.layout == layout]
        except PluginError:
            continue
    return schemes
