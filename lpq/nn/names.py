"""Names of modules as their authors gave them."""

from __future__ import annotations

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""The parts that compiling a module, or checkpointing its activations, adds to the names of the modules inside."""


def plain_name(name: str) -> str:
    """A name without the parts that wrappers add."""
    name += "."
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removesuffix(".")
