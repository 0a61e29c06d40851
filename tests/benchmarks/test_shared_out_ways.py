"""Each layout trains the model that one GPU trains, over gloo and at tiny sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks import environment, layouts, overlap, saving, stored, tables, timing
from benchmarks.shapes import TINY, Decoder, Mixture, Stack
from lpq.bench.contenders import Contender

CPU = torch.device("cpu")
SMALL = replace(TINY, hidden=128, ffn=128, heads=4, kv_heads=4, batch=4, sequence=16)
EXPERTS = Mixture(1, 64, 64, 2, 2, sequence=16, batch=4, experts=4)


@on_ranks(4)
def test_each_layout_has_the_losses_of_one_rank(rank: int) -> None:
    ways = [way for way in layouts.of_blocks(4) if way.mode is None and not way.overlap and "zero" not in way.name]
    everyone = layouts.contenders(("mxfp8",), compiled=False, of=SMALL)
    _alike(_measured(ways, everyone, SMALL), {way.name for way in ways})


@on_ranks(4)
def test_each_layout_of_experts_has_the_losses_of_one_rank(rank: int) -> None:
    ways = layouts.of_experts(4)
    everyone = layouts.contenders(("mxfp8", "mxfp8-one-copy"), compiled=False, of=EXPERTS)
    _alike(_measured(ways, everyone, EXPERTS), {way.name for way in ways})


def _measured(ways: Sequence[layouts.Layout], everyone: Sequence[Contender], of: Stack) -> dict[str, Any]:
    """Take two steps, of which the second has the loss with the weights that the first stepped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "WARM", 1)
        *_, result = layouts.measure(ways, everyone, of, 1, CPU)
    return result


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


def test_what_the_compiler_alone_overlaps_is_not_run_without_it() -> None:
    """An overlapped row of lpq is then compared with bf16 in the same layout without overlap."""
    (layout,) = [way for way in layouts.of_blocks(4) if way.name == "TP 4, overlapped"]
    everyone = layouts.contenders(("mxfp8",), compiled=True, of=SMALL)
    meant = [one.name for one in everyone if layouts._meant(layout, one)]
    assert meant == ["bf16, compiled", "lpq mxfp8", "lpq mxfp8, compiled"]
    rows = [
        {"layout": "TP 4", **everyone[0].record(), "tokens_per_second": 100.0, "peak_bytes": None},
        {"layout": "TP 4, overlapped", **everyone[2].record(), "tokens_per_second": 150.0, "peak_bytes": None},
    ]
    (table,) = tables.layouts({**asdict(SMALL), "ranks": 4, "results": rows}).values()
    assert [row[3] for row in table.rows] == ["1.00", "1.50"]


def test_the_compiler_overlaps_bf16_and_leaves_the_order_of_lpq(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[str] = []
    group: Any = SimpleNamespace(group_name="all")
    monkeypatch.setattr(overlap, "enable_symm_mem_for_group", groups.append)
    plain, mine = layouts.contenders(("mxfp8",), compiled=True, of=SMALL)[1::2]
    cuts_up = []
    for contender, overlapped in ((plain, True), (plain, False), (mine, True), (mine, False)):
        how = overlap.options(contender, overlapped, overlapped, group)
        cuts_up.append(torch._inductor.config._micro_pipeline_tp)
        assert ("options" in how) == (overlapped and contender is mine)
    assert (cuts_up, groups) == ([True, False, False, False], ["all"])


@on_ranks(2)
def test_what_was_saved_is_what_is_loaded(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    saved = saving.measured(folder, ["save"], "fp8-delayed", TINY, CPU)
    loaded = saving.measured(folder, ["load", "save"], "fp8-delayed", TINY, CPU)
    assert loaded["loaded"] == saved["saved"] != loaded["saved"]
    assert loaded["step"] == saving.STEPS
    if rank == 0:
        record = environment.record(["FOLDER"], 2, "benchmarks.saving")
        saving.keep(tmp_path, "saving", {**record}, saved, TINY)
        whole = saving.keep(tmp_path, "saving", {**record, "devices": 1}, loaded, TINY)
        assert stored.load(tmp_path) == {"saving": whole}
        assert [row["did"] for row in whole["results"]] == [["save"], ["load", "save"]]
        assert whole["environment"]["devices"] == 2


WHOLE = Decoder(1, 128, 1, 32, 64)


def _saves(rank: int, folder: Path) -> None:
    found = saving.measured(folder, ["save-async"], "fp8-delayed", WHOLE, CPU, "selective")
    assert "save_seconds" not in found
    assert found["steps_meanwhile"] >= 0
    (folder.parent / f"saved-{rank}").write_text(found["saved"])


def _loads(rank: int, folder: Path) -> None:
    found = saving.measured(folder, ["load"], "fp8-delayed", WHOLE, CPU, "selective")
    assert found["loaded"] == (folder.parent / "saved-0").read_text() == (folder.parent / "saved-1").read_text()
    assert (found["step"], found["ranks"]) == (saving.STEPS, 1)


def test_a_model_of_hugging_face_is_saved_on_two_ranks_and_loaded_on_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers, which `make install` brings")
    spawn(_saves, 2, tmp_path / "saved", fresh=True)
    spawn(_loads, 1, tmp_path / "saved", fresh=True)


@on_ranks(2)
def test_a_digest_depends_on_each_bit_and_its_place(rank: int) -> None:
    values = torch.arange(24.0).view(6, 4)
    found = []
    for one in (values, values.flip(0), values + torch.eye(6, 4) * 2**-18):
        parts = distribute_tensor(one, init_device_mesh("cpu", (2,)), [Shard(0)])
        total = saving._mixed(parts).clone()
        dist.all_reduce(total)
        assert total == saving._mixed(one)
        found.append(int(total))
    assert len({*found}) == 3
