"""Layers whose products multiply quantized operands, and the conversion of a model."""

from lpq.nn.conversion import convert, replan, report, set_step
from lpq.nn.grouped_linear import GroupedLinear
from lpq.nn.holding import hold_weights
from lpq.nn.linear import Layer, Linear
from lpq.nn.reports import Report

__all__ = ["GroupedLinear", "Layer", "Linear", "Report", "convert", "hold_weights", "replan", "report", "set_step"]
