"""Seeing what a model does: which collectives it runs, what its weights take, and how much it multiplies."""

from lpq.observe.collectives import Collective, collectives, gathered_bytes
from lpq.observe.flops import FLOPS
from lpq.observe.footprint import Memory, held_bytes, memory

__all__ = ["FLOPS", "Collective", "Memory", "collectives", "gathered_bytes", "held_bytes", "memory"]
