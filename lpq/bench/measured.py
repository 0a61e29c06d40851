"""Measurements on an H100: the results of ``benchmarks`` that are part of the package."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lpq.files.disk import json_of

LLAMA = "llama-h100.json"
"""Hugging Face's Llama, trained in bf16 and by recipes."""


@dataclass(frozen=True)
class Gain:
    """A model trained by a recipe and in bf16, both compiled."""

    recipe: str
    device: str
    hidden: int
    layers: int
    times_as_fast: float
    memory: float
    """The most memory of a step, as a part of bf16's."""
    date: str


def gain(recipe: str) -> Gain | None:
    """The gain of the Llama by ``recipe``; None where it was not measured."""
    table = json_of(results(LLAMA).read_text(encoding="utf-8"))
    own, bf16 = (_compiled(table, library, name) for library, name in (("lpq", recipe), ("torch", "bf16")))
    if own is None or bf16 is None:
        return None
    return Gain(
        recipe,
        table["environment"]["device"],
        table["hidden"],
        table["layers"],
        own["tokens_per_second"] / bf16["tokens_per_second"],
        own["peak_bytes"] / bf16["peak_bytes"],
        datetime.fromisoformat(table["environment"]["date"]).date().isoformat(),
    )


def results(name: str) -> Path:
    """The file of results: in the installed package, or in the repository whose package is used."""
    package = Path(__file__).parent
    installed = package / name
    return installed if installed.is_file() else package.parents[1] / "benchmarks" / "results" / name


def _compiled(table: dict[str, Any], library: str, recipe: str) -> dict[str, Any] | None:
    rows = (r for r in table["results"] if (r["library"], r["recipe"], r["compiled"]) == (library, recipe, True))
    return next((r for r in rows if r.get("tokens_per_second")), None)
