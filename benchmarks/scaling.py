"""One model on several numbers of GPUs: what the results of Hugging Face's models make together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PART = "scaling"
APART = {"part", "environment", "results", "ranks"}
"""The keys in which results of one model on other numbers of GPUs may differ."""


def over_ranks(results: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A result for each model that was trained by the same code on two numbers of GPUs or more."""
    models: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for stem, result in results.items():
        if result["part"] == "llama" and result.get("sharded"):
            setting = {key: value for key, value in result.items() if key not in APART}
            models.setdefault(repr(sorted(setting.items())), []).append((stem, result))
    found = {}
    for same in models.values():
        if len({result["ranks"] for _, result in same}) > 1:
            same.sort(key=lambda one: one[1]["ranks"])
            (stem, first), *_ = same
            rows = [{"ranks": result["ranks"], **row} for _, result in same for row in result["results"]]
            setting = {key: value for key, value in first.items() if key not in APART}
            name = stem.replace(f"llama-{first['ranks']}", PART, 1)
            found[name] = {**setting, "part": PART, "environment": first["environment"], "results": rows}
    return found
