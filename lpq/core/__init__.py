"""The core: layouts, operands, quantizers, quantized tensors and the operations on them."""

from lpq.core.aten import dispatch
from lpq.core.layout import Buffer, Stat, StateBuffer
from lpq.core.operations import decode, gemm, transpose
from lpq.core.philox import RandomBits
from lpq.core.quantize import encode_operands, remember
from lpq.core.quantizer import Quantizer
from lpq.core.steps import watch
from lpq.core.storage import Storage
from lpq.core.tensor import PrecisionWarning, QuantizedTensor

QuantizedTensor.dispatch = staticmethod(dispatch)
QuantizedTensor.watch_steps = staticmethod(watch)

__all__ = [
    "Buffer",
    "PrecisionWarning",
    "QuantizedTensor",
    "Quantizer",
    "RandomBits",
    "Stat",
    "StateBuffer",
    "Storage",
    "decode",
    "encode_operands",
    "gemm",
    "remember",
    "transpose",
]
