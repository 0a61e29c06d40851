"""A few columns of a matrix in bf16, and the others by another format."""

from __future__ import annotations

from lpq.registry import FormatSpec, hookimpl


@hookimpl
def lpq_register_formats() -> FormatSpec:
    return FormatSpec(
        name="hot_channels",
        summary="some columns in bf16, and the others by another format",
        quantizer="lpq_hot_channels.format:HotChannelsQuantizer",
        storage="lpq_hot_channels.format:HotChannelsStorage",
        effective_bits=None,
    )
