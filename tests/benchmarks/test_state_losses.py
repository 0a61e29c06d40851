"""The script that compares optimizer states counts their bytes exactly, and trains from the same seeds."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from benchmarks import state_losses
from benchmarks.evidence import LIBRARIES
from benchmarks.states import FORMATS, MODELS, contenders, stored

STEP = 4
"""The bytes of the count of steps."""


def stepped(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def test_bytes_of_states_are_those_of_their_tensors() -> None:
    """Elements of one byte, a byte of scale for 32 of them, or four for 128; memory of two states counts once."""
    p = nn.Parameter(torch.randn(128, 256))
    elements = p.numel()
    assert state_losses.state_bytes(stepped(AdamW([p]))) == 8 * elements + STEP
    quantized = stepped(stored(FORMATS["mxfp8, fp8 by block"], [p]))
    assert state_losses.state_bytes(quantized) == 2 * elements + elements // 32 + 4 * elements // 128 + STEP
    shared = AdamW([p])
    shared.state[p] = {"exp_avg": (one := torch.zeros(10)), "exp_avg_sq": one[5:]}
    assert state_losses.state_bytes(shared) == 40


def test_the_page_of_times_has_what_the_script_times() -> None:
    """The rows of both dtypes of weights, by the names that the script prints: of wide matrices, and of two models."""
    page = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()
    text = " ".join(page.split())
    for name, formats in FORMATS.items():
        first, second = formats.values()
        assert f"`lpq, {name}` stores `exp_avg` as `{first}`" in text
        assert f"`exp_avg_sq` as `{second}`" in text
    for dtype in (torch.float32, torch.bfloat16):
        weights = str(dtype).removeprefix("torch.")
        names = [name for name in contenders(dtype) if not name.startswith(LIBRARIES)]
        assert [page.count(f"\n| {weights} | {name} | ") for name in names] == [1 + len(MODELS)] * 3
        assert page.count(f"\n| {weights} | torchao AdamW8bit | ") == 1
    for line in (Path(__file__).parents[2] / "benchmarks" / "results" / "states-h200.txt").read_text().splitlines():
        if line.startswith(("| float32 |", "| bfloat16 |")):
            assert f"\n{line}\n" in page or f"\n| {' | '.join(line.strip('| ').split(' | ')[:4])} |\n" in page
    for model, shapes in MODELS.items():
        assert f"python -m benchmarks.states --model {model}" in page
        assert f"{sum(math.prod(shape) for shape in shapes):,} weights" in text
        assert f" {len(shapes)} parameters" in text


def test_contenders_train_the_same_model_on_the_same_batches() -> None:
    """The first loss is before any step; afterwards fp32 states and stored ones part."""
    of = {title: state_losses.contenders()[title] for title in (state_losses.EXACT, "lpq fp8 by block")}
    found = [state_losses.train(title, make, "toy", torch.device("cpu"), 0, tokens="3k") for title, make in of.items()]
    exact, quantized = found
    assert (exact.baseline, quantized.baseline) == (True, False)
    assert len(exact.losses) == len(quantized.losses) == 6
    assert exact.losses[0] == quantized.losses[0]
    assert exact.losses != quantized.losses
    assert exact.settings["bytes_a_weight"] > 7.9 > 2.2 > quantized.settings["bytes_a_weight"]
