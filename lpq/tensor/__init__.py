"""QuantizedTensor: a tensor that is stored quantized, with its operators and the methods that FSDP2 calls."""

from lpq.tensor.aten import dispatch
from lpq.tensor.quantize import quantize
from lpq.tensor.quantized_tensor import PrecisionWarning, QuantizedTensor

__all__ = ["PrecisionWarning", "QuantizedTensor", "dispatch", "quantize"]
