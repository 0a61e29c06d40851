"""Layers whose products multiply quantized operands, and the conversion of a model."""

from lpq.nn.conversion import convert, report
from lpq.nn.fused_blocks import fuse, unfuse
from lpq.nn.fused_mlp import SwiGLU, swiglu
from lpq.nn.grouped_linear import GroupedLinear
from lpq.nn.holding import hold_weights
from lpq.nn.linear import Layer, Linear
from lpq.nn.norms import LayerNorm, RMSNorm
from lpq.nn.reports import Report
from lpq.nn.restoring import restore
from lpq.nn.stepping import replan, set_step

__all__ = [
    "GroupedLinear",
    "Layer",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "Report",
    "SwiGLU",
    "convert",
    "fuse",
    "hold_weights",
    "replan",
    "report",
    "restore",
    "set_step",
    "swiglu",
    "unfuse",
]
