"""Seeing what a model does: which collectives it runs, and what its weights take."""

from lpq.observe.collectives import Collective, collectives, gathered_bytes

__all__ = ["Collective", "collectives", "gathered_bytes"]
