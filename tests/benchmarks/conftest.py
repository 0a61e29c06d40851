"""Results as the benchmarks store them, with made-up numbers."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import contenders, environment, parallel
from benchmarks.contenders import of_layers, of_models, of_stacks
from benchmarks.floor import FLOORS
from benchmarks.shapes import GROUPED, HOST, LINEAR, Decoder, Pair, Stack
from lpq.bench.contenders import Contender
from lpq.bench.timing import Timing

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))  # the helpers for several processes

RECIPES = ("fp8-current", "nvfp4")
PEER = {"library": "torchao", "recipe": "tensorwise", "compiled": True, "failure": None}


def linear(environment: dict[str, Any]) -> dict[str, Any]:
    shapes = []
    for shape in LINEAR[:2]:
        rows = [
            {**c.record(), "ms": 2.0 + i, "held_bytes": 2**20, "encoded_bytes": 2**19 if c.library == "lpq" else None}
            for i, c in enumerate(of_layers(RECIPES))
        ]
        rows.append({**PEER, "ms": 4.0, "held_bytes": None, "encoded_bytes": None})
        gemms = Timing(1e-3, 1e-3, 1e-3)
        floors = {name: floor.record(shape, gemms, gemms, 4e12) for name, floor in FLOORS.items()}
        shapes.append({**asdict(shape), "floors": floors, "results": rows})
    del shapes[1]["results"][1]["ms"]
    shapes[1]["results"][1]["failure"] = "ValueError: it cannot"
    return {"part": "linear", "environment": environment, "copy_speed": 4e12, "shapes": shapes}


def host(environment: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {**c.record(), "us": 100.0 * (i + 1), "one_thread_us": 50.0 + 25 * i, "failure": None}
        | ({} if c.compiled else {"graphed_us": 90.0 + 10 * i})
        for i, c in enumerate(of_layers(RECIPES))
    ]
    return {"part": "host", "environment": environment, "shape": str(HOST), "results": rows}


def stack(environment: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {**c.record(), "tokens_per_second": 40_000.0 + 10_000 * i, "peak_bytes": 20 * 2**30, "failure": None}
        for i, c in enumerate(of_stacks(RECIPES))
    ]
    return {"part": "stack", "environment": environment, **asdict(Stack()), "ranks": 2, "results": rows}


def llama(environment: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {**c.record(), "tokens_per_second": 50_000.0 + 10_000 * i, "peak_bytes": (20 - i) * 2**30, "failure": None}
        for i, c in enumerate([*of_models(RECIPES), Contender("torchao", "tensorwise", True)])
    ]
    return {"part": "llama", "environment": environment, **asdict(Decoder()), "ranks": 1, "results": rows}


def pair(environment: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {**c.record(), "ms": 4.0 - 0.5 * i, "gathered_bytes": None if c.compiled else 2**27 >> i, "failure": None}
        for i, c in enumerate(parallel.contenders(RECIPES))
    ]
    return {"part": "parallel", "environment": environment, **asdict(Pair()), "ranks": 2, "results": rows}


def layouts(environment: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {"layout": layout, **c.record(), "ms": 4.0, "tokens_per_second": 1e5, "peak_bytes": 2**30, "loss": 1.5}
        for layout in ("one GPU", "TP 4")
        for c in of_stacks(RECIPES, compiled=False)
    ]
    rows = [{**row, "failure": None} for row in rows]
    return {"part": "layouts", "environment": environment, **asdict(Stack()), "ranks": 4, "results": rows}


def casts(environment: dict[str, Any]) -> dict[str, Any]:
    case = {"name": "mxfp8", "sides": "row", "target": 0.92, "microseconds": 104.0, "speed": 3.9e12, "share": 0.93}
    return {
        "part": "casts", "environment": environment, "rows": 16384, "cols": 8192, "copy_speed": 4.2e12,
        "cases": [{**case, "kernel": "reference"}], "peers": [{**case, "library": "TransformerEngine"}],
    }  # fmt: skip


def grouped(environment: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {"library": library, "recipe": recipe, "compiled": False, "failure": None, "ms": ms, "bf16_ms": 8.0}
        for library, recipe, ms in (("torch", "bf16", 8.0), ("lpq", "fp8-row", 6.0))
    ]
    floor = {"bytes": 1, "gemms_ms": 4.0, "fast_gemms_ms": 3.5, "ms": 5.0, "fast_ms": 4.5}
    shapes = [{**asdict(shape), "floor": floor, "results": rows} for shape in GROUPED[:2]]
    shapes[1] = {**shapes[1], "floor": {"bytes": 1, "failure": "no"}, "results": rows[:1]}
    return {"part": "grouped", "environment": environment, "copy_speed": 4e12, "shapes": shapes}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other library takes part, whether it is installed or not."""
    monkeypatch.setattr(contenders, "installed", lambda library: None)


@pytest.fixture
def results() -> dict[str, dict[str, Any]]:
    """One file of each part."""
    record = {**environment.record(["linear"]), "peers": {"torchao": "0.17.0", "TransformerEngine": None}}
    made = {"linear": linear(record), "host": host(record), "stack-2": stack(record), "casts": casts(record)}
    made["layouts-4"] = layouts(record)
    return {**made, "llama": llama(record), "grouped": grouped(record), "parallel-2": pair(record)}
