"""Measurements of a model: its encoded tensors, its collectives, the bytes of its weights, its operations."""

from lpq.nn.observing import observing
from lpq.observe.collectives import Collective, collectives, gathered_bytes
from lpq.observe.flops import FLOPS
from lpq.observe.footprint import Memory, held_bytes, memory
from lpq.observe.numerics import Numerics, numerics
from lpq.observe.readings import NumericsError, Readings
from lpq.observe.sums import Reading
from lpq.tensor.observed import Observed, Observer

__all__ = [
    "FLOPS", "Collective", "Memory", "Numerics", "NumericsError", "Observed", "Observer", "Reading", "Readings",
    "collectives", "gathered_bytes", "held_bytes", "memory", "numerics", "observing",
]  # fmt: skip
