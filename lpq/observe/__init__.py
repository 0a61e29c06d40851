"""Measurements of a model: its encoded tensors, its collectives, the bytes of its weights, its operations."""

from lpq.nn.observing import observing
from lpq.observe.collectives import Collective, collectives, gathered_bytes
from lpq.observe.course import Course
from lpq.observe.culprits import Culprit, Culprits, culprits
from lpq.observe.flops import FLOPS
from lpq.observe.footprint import Memory, held_bytes, memory
from lpq.observe.numerics import Numerics, numerics
from lpq.observe.readings import NumericsError, Readings
from lpq.observe.replay import Before
from lpq.observe.sums import Reading
from lpq.tensor.observed import Observed, Observer

__all__ = [
    "FLOPS", "Before", "Collective", "Course", "Culprit", "Culprits", "Memory", "Numerics", "NumericsError", "Observed",
    "Observer", "Reading", "Readings", "collectives", "culprits", "gathered_bytes", "held_bytes", "memory", "numerics",
    "observing",
]  # fmt: skip
