"""Sections: matrices that are encoded and multiplied each by itself, as if there were no other."""

from __future__ import annotations

from typing import NamedTuple


class Sections(NamedTuple):
    """How a tensor is divided: into groups of rows, whose ends are in a tensor, or into the matrices of a stack."""

    number: int
    stack: bool
    at_once: bool
    """Whether the device computes all of them at once, and the host does not read where groups end."""
