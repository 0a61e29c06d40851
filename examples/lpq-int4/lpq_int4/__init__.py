"""INT4: 4-bit integers in blocks of 16 along the contraction, with an 8-bit scale for each block and an fp32 amax."""

from lpq.registry import FormatSpec, RecipeSpec, hookimpl


@hookimpl
def lpq_register_formats() -> FormatSpec:
    return FormatSpec(
        name="int4",
        summary="integers from -7 to 7, one E4M3 scale for 16 along the contraction, one fp32 amax",
        quantizer="lpq_int4.format:INT4Quantizer",
        storage="lpq_int4.format:INT4Storage",
        effective_bits=4.5,
    )


@hookimpl
def lpq_register_recipes() -> list[RecipeSpec]:
    return [
        RecipeSpec(name="int4", summary="INT4 for all three products", recipe="int4()"),
        RecipeSpec(
            name="int4-fwd-mxfp8-bwd",
            summary="INT4 forward, MXFP8 in both gradient products",
            recipe="fprop=int4(), dgrad=mxfp8(), wgrad=mxfp8()",
        ),
    ]
