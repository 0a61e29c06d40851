"""Layers whose products multiply quantized operands, and the conversion of a model."""

from lpq.nn.conversion import convert, report
from lpq.nn.fused_blocks import fuse, unfuse
from lpq.nn.fused_mlp import SwiGLU, geglu, swiglu
from lpq.nn.grouped_linear import GroupedLinear
from lpq.nn.holding import hold_weights
from lpq.nn.linear import Layer, Linear
from lpq.nn.norm_functions import layer_norm, rms_norm
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
    "geglu",
    "hold_weights",
    "layer_norm",
    "replan",
    "report",
    "restore",
    "rms_norm",
    "set_step",
    "swiglu",
    "unfuse",
]
