"""Measurements of a model: its collectives, the bytes of its weights, and the operations of its products."""

from lpq.observe.collectives import Collective, collectives, gathered_bytes
from lpq.observe.flops import FLOPS
from lpq.observe.footprint import Memory, held_bytes, memory

__all__ = ["FLOPS", "Collective", "Memory", "collectives", "gathered_bytes", "held_bytes", "memory"]
