"""Whether quantizers are told apart by their options: plans, compiled graphs and kernels are kept for equal ones."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lpq.registry.errors import words
from lpq.registry.registry import cached


@cached
def fault(cls: type) -> str | None:
    """The mistake in ``==`` or ``hash`` of a quantizer class; None if they compare and hash the options. It is tried
    with quantizers whose options are bare objects, which support ``==`` and ``hash`` alone.
    """
    same = {field.name: object() for field in fields(cls)}
    try:
        one, other = with_options(cls, same), with_options(cls, same)
        if one != other or hash(one) != hash(other):
            return "is not equal to a copy of itself"
        for name in same:
            if with_options(cls, same) == with_options(cls, same | {name: object()}):
                return f"is equal to one with another {name}"
    except Exception as error:
        return f"compares by more than its options: == raised {words(error)}"
    return None


def with_options(cls: type, options: dict[str, object]) -> Any:
    """A quantizer with these options, which are not checked."""
    quantizer: Any = object.__new__(cls)
    for name, value in options.items():
        object.__setattr__(quantizer, name, value)
    return quantizer
