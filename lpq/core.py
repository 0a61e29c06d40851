"""The names that a format is written with, for plugins and for code that encodes tensors by hand.

Importing this puts the parts together: a tensor's operators and ``Quantizer.quantize`` are each built on the class
that has them.
"""

import torch

from lpq.formats import Buffer, Quantizer, RandomBits, Stat, StateBuffer, Storage
from lpq.operations import decode, encode_operands, gemm, remember, transpose
from lpq.tensor import PrecisionWarning, QuantizedTensor, dispatch, quantize
from lpq.tensor.quantized_tensor import rebuild

QuantizedTensor.dispatch = staticmethod(dispatch)
Quantizer.quantize = quantize

torch.serialization.add_safe_globals([(rebuild, "lpq.core.tensor.rebuild")])  # its name in files of earlier builds

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
