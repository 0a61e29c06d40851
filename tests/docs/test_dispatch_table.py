"""The table of what can be dispatched encoded is what the formats declare."""

from __future__ import annotations

import re

import torch
from snippets import ROOT

import lpq
from lpq import registry
from lpq.distributed.shardability import operand_bytes
from lpq.formats.sections import why_not_row_by_row

FEATURES = 4096


def test_it_is_what_formats_declare() -> None:
    """So it is for the column operand of each, made of the row operand."""
    section = (ROOT / "docs" / "moe.md").read_text().partition("### Rows that travel encoded")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| (\S+) \| ?(.*?) ?\|$", section, re.MULTILINE)
    assert len(rows) == 8
    for text, share, why in rows:
        quantizer = lpq.quantizer(f"hybrid(row={text}, col=identity, col_source=row)")
        reason = why_not_row_by_row(quantizer)
        bytes_sent = operand_bytes(quantizer, FEATURES, FEATURES, torch.bfloat16, True, False)
        assert why == (reason or ""), text
        assert share == (f"{bytes_sent / (2 * FEATURES**2):.2f}" if reason is None else "no"), text


def test_no_recipe_with_a_name_makes_column_operands_of_row_operands() -> None:
    for name in registry.recipes():
        recipe = lpq.recipe(name)
        assert why_not_row_by_row(recipe.x) is not None, name
        assert why_not_row_by_row(recipe.dy) is not None, name
