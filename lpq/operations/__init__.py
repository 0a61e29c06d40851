"""The five operations on operands: measure, quantize, decode, transpose and gemm; and both operands of a tensor.

Each operation has a body, which takes a kernel from the kernel table; where none serves, it runs the reference, which
is made of the format's own methods. Around the body is a ``torch.library`` operator over plain tensors and quantizer
strings, so that for ``torch.compile`` and fake tensors it is one node with a known result. Where nothing watches, the
body is called directly: PyTorch's dispatcher costs the host more than all that lpq does.
"""

from lpq.operations import forward_only as forward_only  # these three define operators
from lpq.operations import group_products as group_products
from lpq.operations import groups as groups
from lpq.operations.decoding import decode, decode_reference
from lpq.operations.measuring import measure, measure_reference
from lpq.operations.multiplying import gemm
from lpq.operations.operands import encode_operands
from lpq.operations.quantizing import quantize
from lpq.operations.references import gemm_reference, quantize_reference
from lpq.operations.sides import declared
from lpq.operations.states import remember
from lpq.operations.transposing import transpose, transpose_reference

__all__ = [
    "declared",
    "decode",
    "decode_reference",
    "encode_operands",
    "gemm",
    "gemm_reference",
    "measure",
    "measure_reference",
    "quantize",
    "quantize_reference",
    "remember",
    "transpose",
    "transpose_reference",
]
