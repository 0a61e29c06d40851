"""Modules that torch wraps around others."""

from __future__ import annotations

WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""The names under which a compiled module, and one whose activations are checkpointed, hold the module inside."""
