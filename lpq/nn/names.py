"""Names of modules as their authors gave them."""

from __future__ import annotations

from lpq.torch_private.wrappers import WRAPPED


def plain_name(name: str) -> str:
    """A name without the parts that compiling a module, or checkpointing its activations, adds to it."""
    name += "."
    for wrapped in WRAPPED:
        name = name.replace(f"{wrapped}.", "")
    return name.removesuffix(".")
