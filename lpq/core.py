"""The names that a format is written with, for plugins and for code that encodes tensors by hand.

Importing this puts the parts together: a tensor's operators and ``Quantizer.quantize`` are each built on the class
that has them.
"""

from lpq.formats import Buffer, Quantizer, RandomBits, Stat, StateBuffer, Storage
from lpq.formats.rotation import Rotation
from lpq.operations import decode, encode_operands, gemm, remember, transpose
from lpq.registry.field_docs import describe_fields
from lpq.tensor import PrecisionWarning, QuantizedTensor, dispatch, quantize

QuantizedTensor.dispatch = staticmethod(dispatch)
Quantizer.quantize = quantize

__all__ = [
    "Buffer",
    "PrecisionWarning",
    "QuantizedTensor",
    "Quantizer",
    "RandomBits",
    "Rotation",
    "Stat",
    "StateBuffer",
    "Storage",
    "decode",
    "encode_operands",
    "gemm",
    "remember",
    "transpose",
]

describe_fields([*globals().values()])
