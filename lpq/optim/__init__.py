"""FP32 master weights around any torch optimizer, for weights that are stored quantized."""

from lpq.optim.initial import load_high_precision
from lpq.optim.masters import MasterWeights

__all__ = ["MasterWeights", "load_high_precision"]
