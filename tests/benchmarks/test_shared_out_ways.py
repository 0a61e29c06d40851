"""Each layout trains the model that one GPU trains, over gloo and at tiny sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks

from benchmarks import layouts, saving, stored, tables
from benchmarks.shapes import TINY, Mixture

CPU = torch.device("cpu")
SMALL = replace(TINY, hidden=128, ffn=128, heads=4, kv_heads=4, batch=4, sequence=16)
EXPERTS = Mixture(1, 64, 64, 2, 2, sequence=16, batch=4, experts=4)


@on_ranks(4)
def test_each_layout_has_the_losses_of_one_rank(rank: int) -> None:
    ways = [way for way in layouts.of_blocks(4) if way.mode is None and not way.overlap and "zero" not in way.name]
    everyone = layouts.contenders(("mxfp8",), compiled=False, of=SMALL)
    *_, result = layouts.measure(ways, everyone, SMALL, 1, CPU)
    _alike(result, {way.name for way in ways})


@on_ranks(4)
def test_each_layout_of_experts_has_the_losses_of_one_rank(rank: int) -> None:
    ways = layouts.of_experts(4)
    everyone = layouts.contenders(("mxfp8", "mxfp8-one-copy"), compiled=False, of=EXPERTS)
    *_, result = layouts.measure(ways, everyone, EXPERTS, 1, CPU)
    _alike(result, {way.name for way in ways})


def _alike(result: dict[str, Any], names: set[str]) -> None:
    rows = result["results"]
    failed = [row for row in rows if row["failure"] is not None]
    assert not failed, failed
    assert {row["layout"] for row in rows} == names
    losses = {(row["layout"], row["recipe"]): row["loss"] for row in rows}
    for (_, recipe), loss in losses.items():
        assert loss == pytest.approx(losses["one GPU", recipe], rel=5e-4)
    assert losses["one GPU", "bf16"] != losses["one GPU", "mxfp8"]
    (table,) = tables.layouts(result).values()
    assert len(table.rows) == len(rows)


@on_ranks(2)
def test_what_was_saved_is_what_is_loaded(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    saved = saving.measured(folder, ["save"], "fp8-delayed", TINY, CPU)
    loaded = saving.measured(folder, ["load", "save"], "fp8-delayed", TINY, CPU)
    assert loaded["loaded"] == saved["saved"] != loaded["saved"]
    assert loaded["step"] == saving.STEPS
    if rank == 0:
        saving.keep(tmp_path, saved, TINY)
        whole = saving.keep(tmp_path, loaded, TINY)
        assert stored.load(tmp_path) == {"saving": whole}
        assert [row["did"] for row in whole["results"]] == [["save"], ["load", "save"]]
