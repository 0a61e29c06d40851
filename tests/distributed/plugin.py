"""A plugin that is not packaged, for the formats of a module of tests."""

from __future__ import annotations

from collections.abc import Mapping

from lpq import registry
from lpq.registry import API_VERSION, FormatSpec, hookimpl


class Plugin:
    """Formats by their names, each with its quantizer's class and its storage's, as ``"Quantizer Storage"``."""

    def __init__(
        self,
        module: str,
        name: str,
        formats: Mapping[str, str],
        bits: Mapping[str, float] | None = None,
        api_version: int = API_VERSION,
    ):
        self.name, self._specs = name, list[FormatSpec]()
        for text, classes in formats.items():
            quantizer, storage = (f"{module}:{kind}" for kind in classes.split())
            effective = (bits or {}).get(text)
            self._specs.append(
                FormatSpec(
                    name=text,
                    summary=text,
                    quantizer=quantizer,
                    storage=storage,
                    effective_bits=effective,
                    api_version=api_version,
                )
            )

    @hookimpl
    def lpq_register_formats(self) -> list[FormatSpec]:
        return self._specs

    def register(self) -> None:
        """Make the formats known in this process."""
        registry.register(self, name=self.name)
