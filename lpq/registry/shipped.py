"""The policies that come with lpq: a TOML file for each, whose first line says what it is."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "policies"


def policies() -> dict[str, str]:
    """Their names, each with a line about it."""
    files = sorted(FOLDER.glob("*.toml"))
    return {path.stem: path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for path in files}


def policy_file(name: object) -> Path | None:
    """The file of the policy with this name; None if there is none."""
    return next((path for path in FOLDER.glob("*.toml") if path.stem == name), None)
