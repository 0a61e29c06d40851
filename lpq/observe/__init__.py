"""Seeing what a model does: which collectives it runs, and what its weights take."""

from lpq.observe.collectives import Collective, collectives, gathered_bytes
from lpq.observe.footprint import Memory, held_bytes, memory

__all__ = ["Collective", "Memory", "collectives", "gathered_bytes", "held_bytes", "memory"]
