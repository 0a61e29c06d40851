"""Layers whose GEMMs multiply quantized operands, and the conversion of a model."""

from lpq.nn.conversion import Report, convert, hold_weights, replan, report, set_step
from lpq.nn.linear import Linear

__all__ = ["Linear", "Report", "convert", "hold_weights", "replan", "report", "set_step"]
