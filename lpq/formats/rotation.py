"""Rotated bases: when two operands have the same rotation, so that their product equals the product of the decoded
matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from lpq import registry
from lpq.formats.options import Options

NEUTRAL = ("static", "stochastic", "search")
"""Options that the core gives a meaning: these options change no basis."""


def basis_of(quantizer: Options, rotation: str, changing: Sequence[str] | None) -> str:
    """The rotation of a quantizer, in the form in which rotations are compared: ``plugin:name``, with the values of the
    options that change it.

    A name belongs to its plugin: another plugin may use it for another rotation. Options count as changing the rotation
    unless the format declares otherwise, for the product of two bases is garbage, and undoing a rotation costs time
    only.
    """
    format, known = registry.format_of(type(quantizer)).name, [f.name for f in fields(quantizer)]  # type: ignore[arg-type]
    if unknown := [name for name in changing or () if name not in known]:
        cause = f"{quantizer} has rotation_options={changing!r}, and no option {unknown[0]!r}"
        raise registry.at_fault(format, cause, f"name the options that change the rotation, of {known}")
    names = [name for name in known if name not in NEUTRAL] if changing is None else changing
    values = ", ".join(f"{name}={getattr(quantizer, name)}" for name in names)
    named = f"{registry.plugin_of(format).name}:{rotation}"
    return f"{named}({values})" if values else named
