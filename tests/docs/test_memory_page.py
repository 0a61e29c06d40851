"""The table of the page about memory has the numbers of ``lpq memory``."""

from __future__ import annotations

import re

from snippets import ROOT

import lpq
from lpq.cli.memory import WAYS, counted
from lpq.cli.shapes import SHAPES

STORED = [("stored quantized", recipe) for recipe in ("fp8-current", "mxfp8", "nvfp4")]
COLUMNS = [("bf16", "nvfp4"), ("gathered quantized", "nvfp4"), *STORED]
ROWS = {
    "weights of a rank": lambda m: m.weights,
    "fp32 masters": lambda m: m.masters,
    "moments": lambda m: m.moments,
    "gradients": lambda m: m.gradients,
    "all of these": lambda m: m.total,
    "gathered in a step, of all ranks": lambda m: m.forward + m.backward,
}


def test_the_numbers_are_those_of_the_command() -> None:
    found = [counted(SHAPES["llama-3-8b"], lpq.recipe(recipe), WAYS[way], 8) for way, recipe in COLUMNS]
    page = (ROOT / "docs" / "memory.md").read_text()
    for title, number in ROWS.items():
        (row,) = re.findall(rf"^\| {title} \|(.*)\|$", page, re.MULTILINE)
        assert [cell.strip() for cell in row.split("|")] == [f"{number(m) / 2**30:.2f}" for m in found], title
