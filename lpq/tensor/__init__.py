"""QuantizedTensor: a tensor that is stored quantized, with its operators and what FSDP2 asks of it."""

from lpq.tensor.aten import dispatch
from lpq.tensor.quantize import quantize
from lpq.tensor.quantized_tensor import PrecisionWarning, QuantizedTensor

__all__ = ["PrecisionWarning", "QuantizedTensor", "dispatch", "quantize"]
