"""Formats of third parties that are registered in the process of a test."""

from __future__ import annotations

from lpq.core import Quantizer, Storage
from lpq.registry import FormatSpec, hookimpl


class FormatPlugin:
    """A plugin with one format, made of these classes of a test's module."""

    def __init__(self, name: str, quantizer: type[Quantizer], storage: type[Storage]) -> None:
        first, second = (f"{cls.__module__}:{cls.__name__}" for cls in (quantizer, storage))
        self.spec = FormatSpec(name=name, summary="a test's", quantizer=first, storage=second, effective_bits=8)

    @hookimpl
    def lpq_register_formats(self) -> FormatSpec:
        return self.spec
