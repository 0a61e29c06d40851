"""Optimizers around any torch optimizer: fp32 master weights, and states that are stored in a format."""

from lpq.optim.initial import load_high_precision
from lpq.optim.masters import MasterWeights
from lpq.optim.states import QuantizedStates

__all__ = ["MasterWeights", "QuantizedStates", "load_high_precision"]
