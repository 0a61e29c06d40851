"""Identity: an operand in high precision, so that recipes and hybrids can name it as they name any format."""

from lpq.registry import FormatSpec, KernelSpec, hookimpl

EXACT = KernelSpec(
    op="exact", impl="lpq_identity.exact:exact", why_not="lpq_identity.exact:why_not", backend="torch", min_sm=80
)


@hookimpl
def lpq_register_formats() -> FormatSpec:
    return FormatSpec(
        name="identity",
        summary="the tensor itself, or cast to fp32, bf16 or fp16",
        quantizer="lpq_identity.quantizer:IdentityQuantizer",
        storage="lpq_identity.storage:IdentityStorage",
        effective_bits=None,
        kernels=(EXACT,),
    )
