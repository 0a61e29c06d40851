"""Hybrid: the row operand of a tensor from one quantizer and the column operand from another, any two."""

from lpq.registry import FormatSpec, hookimpl


@hookimpl
def lpq_register_formats() -> FormatSpec:
    return FormatSpec(
        name="hybrid",
        summary="row operand from one quantizer, column operand from another",
        quantizer="lpq_hybrid.quantizer:HybridQuantizer",
        storage="lpq.core:Storage",  # it has no operands of its own: each belongs to its side's format
        effective_bits=None,
    )
