"""Names of modules as their authors know them."""

from __future__ import annotations

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What compiling a module, or checkpointing its activations, puts into the names of what is inside."""


def plain_name(name: str) -> str:
    """A name without what wrappers put into it."""
    name += "."
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removesuffix(".")
