"""``torchrun -m lpq train``: two processes train one sharded model, and end well, in words, or to go on later."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torchrun import forked, torchrun, under_agent
from training import POLICY, MakeConfig, assert_same, saved, shown

import lpq
from lpq.observe import Memory, memory
from lpq.train import TrainConfig, TrainError, data, run, runs
from lpq.train.launch import launched
from lpq.train.machine import baseline_on, fast_bf16, pick_device
from lpq.train.model import GPT, GPTShape
from lpq.train.team import Team
from lpq.train.trainer import Trainer

CPU = torch.device("cpu")
CTRL_C = """
if self.step == 3 and RANK == 0:
    os.kill(AGENT, signal.SIGINT)  # which passes it on
if self.step >= 3:
    time.sleep(2)
"""
RAISE = """
if self.step == 1 and RANK == 1:
    raise RuntimeError("this rank is out of luck")
"""
COMPILE = """
import torch
if self.step == 0:
    for block in self.model.blocks:  # anew, by the backend that is quick
        block.compile(backend="aot_eager", fullgraph=True)
else:
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= len(self.model.blocks), "nothing was compiled"
"""


def options(config: TrainConfig, folder: Path) -> list[str]:
    file = folder / f"{Path(str(config.out)).name}.toml"
    file.write_text(config.to_toml())
    return ["--config", str(file)]


def predicted(config: TrainConfig, policy: Any, ranks: int) -> Memory:
    """Return the memory report on the model of a run, which it builds anew."""
    model = GPT(GPTShape(config.layers, config.heads, config.width))
    if policy is not None:
        lpq.convert(model, policy, weights=config.weights.replace("-", "_"), ranks=ranks)  # type: ignore[union-attr,arg-type]
    dtype = torch.bfloat16 if fast_bf16(CPU) else None
    return memory(model, ranks, blocks=model.blocks, param_dtype=dtype)


@pytest.fixture
def big(tiny: MakeConfig) -> MakeConfig:
    """A model that two ranks can cut into whole blocks of every format."""
    return lambda out="run", **options: tiny(out, **{"width": 64, "layers": 2, **options})


def test_two_ranks_store_and_train_one_quantized_model(big: MakeConfig, console: Console, tmp_path: Path) -> None:
    config = big("sharded", recipe="nvfp4", weights="quantized", checkpoint_every=4)
    ended = forked(2, *options(config, tmp_path))
    assert ended.status == 0, ended.err
    directory = Path(str(config.out))

    # One rank prints, and the numbers are those of both.
    assert ended.out.count("nvfp4: 6 steps on 2 ranks, cpu") == 1
    assert ended.out.count("step 6 of 6") == 2
    gap = f"gap to {baseline_on(CPU)}"
    for row in ("gathered per step, forward", "gathered per step, backward", "weights of each rank", gap):
        assert ended.out.count(row) == 1
    lines = (directory / "recipe" / runs.METRICS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    alone = run(replace(config, out=str(tmp_path / "alone")), console)
    summary = json.loads((directory / "summary.json").read_text())
    for one, both in zip(alone.outcomes, summary["outcomes"], strict=True):
        assert both["held_out_loss"] == pytest.approx(one.held_out_loss, rel=5e-3)
        assert both["losses"][0] == pytest.approx(one.losses[-1], rel=2e-2)
    text = data.load(config.data, config.seq)
    fresh = Trainer(config, text, lpq.policy("nvfp4"), Team(device=CPU))  # a rank has the amaxes of its half of x
    halves = zip(*(t.chunk(2) for t in text.batch(config.seed, 0, config.batch, config.seq)), strict=True)
    expected = sum(fresh.loss(*half).item() for half in halves) / 2
    close = 5e-3 if fast_bf16(CPU) else 1e-5  # what no layer has, such as a norm, is gathered in bf16 there
    assert json.loads(lines[0])["loss"] == pytest.approx(expected, rel=close)

    # What it sent and held is what the memory report foretells; each of 14 states has a number of steps, too.
    for outcome, recipe in zip(summary["outcomes"], ("nvfp4", None), strict=True):
        found, told = outcome["measured"], predicted(config, recipe, 2)
        assert (found["forward"], found["backward"]) == (told.forward, told.backward)
        assert (found["weights"], found["gradients"]) == (told.weights, told.gradients)
        assert found["optimizer"] == told.masters + told.moments + 4 * 14
        assert found["ranks"] == 2
        assert found["held"] < alone.outcomes[0].measured.held

    # And one process takes it over: all tensors to the bit, and the run goes on.
    taken = tmp_path / "taken"
    shutil.copytree(directory, taken)
    shutil.rmtree(taken / "recipe" / "step-00000006")
    trainer = Trainer(config, text, lpq.policy("nvfp4"), Team(device=CPU))
    assert trainer.resume(taken / "recipe", print)
    trainer.save(tmp_path / "again")
    assert_same(saved(tmp_path / "again", 4)["tensors"], saved(directory / "recipe", 4)["tensors"])
    went_on = run(replace(config, out=str(taken), resume=True), console)
    assert "resumed after step 4" in shown(console)
    assert list(went_on.outcomes[0].losses[:4]) == [json.loads(line)["loss"] for line in lines[:4]]
    assert went_on.outcomes[0].held_out_loss == pytest.approx(alone.outcomes[0].held_out_loss, rel=5e-3)
    assert went_on.outcomes[0].measured.ranks == 1


def test_ctrl_c_saves_once_and_resuming_is_bitwise(
    big: MakeConfig, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    begun = big("whole", policy=str(policy), baseline=False, checkpoint_every=0, layers=1)
    with monkeypatch.context() as patched:  # begun in one process, which two ranks then take over
        advance = Trainer.advance
        patched.setattr(Trainer, "advance", lambda self: stop() if self.step == 2 else advance(self))
        stop = lambda: (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
        one = replace(begun, checkpoint_every=2)
        with pytest.raises(KeyboardInterrupt):
            run(one, console)
    whole, broken = Path(str(begun.out)), tmp_path / "broken"
    shutil.copytree(whole, broken)

    resume = ("--resume", "--checkpoint-every", 0, "--out")
    uninterrupted = forked(2, *resume, whole)
    assert uninterrupted.status == 0, uninterrupted.err
    assert "policy: resumed after step 2" in uninterrupted.out
    stopped = under_agent(2, *resume, broken, fault=CTRL_C)
    assert stopped.status != 0
    said = "stopped after step 4 of 6 (policy), which is saved; go on with: torchrun --nproc-per-node 2 -m lpq train"
    assert stopped.err.count(said) == 1
    assert "lpq: rank" not in stopped.err
    names = {p.name for p in (broken / "recipe").iterdir()}
    assert names == {"metrics.jsonl", "step-00000002", "step-00000004"}
    resumed = forked(2, *resume, broken)
    assert resumed.status == 0, resumed.err
    assert "resumed after step 4" in resumed.out

    a, b = (saved(directory / "recipe") for directory in (whole, broken))
    assert_same(a["tensors"], b["tensors"])
    for state in (a, b):
        del state["beside"]["extra"]["config"]  # it has the directory
    assert_same(a["beside"], b["beside"])
    rng = a["beside"]["extra"]["rng"]
    assert len(rng) == 2
    assert not torch.equal(rng[0]["cpu"], rng[1]["cpu"])


def test_compiled_blocks_are_sharded_and_measured(big: MakeConfig, tmp_path: Path) -> None:
    """The first step is looked at while it compiles; one layer of a block is enough."""
    policy = tmp_path / "policy.toml"
    policy.write_text('[[rules]]\nmatch = "*.mlp.up"\nrecipe = "nvfp4"\n')
    config = big(policy=str(policy), weights="quantized", compile=True, baseline=False, layers=1, steps=2)
    ended = forked(2, *options(config, tmp_path), fault=COMPILE)
    assert ended.status == 0, ended.err
    (outcome,) = json.loads((Path(str(config.out)) / "summary.json").read_text())["outcomes"]
    found, told = outcome["measured"], predicted(config, lpq.policy(policy), 2)
    assert (found["forward"], found["backward"]) == (told.forward, told.backward)


def test_a_batch_that_cannot_be_shared_out_is_refused_once(tiny: MakeConfig, tmp_path: Path) -> None:
    config = tiny(batch=3)
    ended = forked(2, *options(config, tmp_path))
    assert ended.status != 0
    assert ended.err.count("lpq: batch = 3 does not divide among 2 ranks") == 1
    assert "--batch 4" in ended.err
    assert not Path(str(config.out)).exists()


def test_help_is_printed_once() -> None:
    ended = forked(2, "--help")
    assert ended.status == 0, ended.err
    assert ended.out.count("Usage:") == ended.out.count("--checkpoint-every") == 1
    assert "Usage:" not in ended.err


def test_a_wrong_option_is_told_once() -> None:
    for start, wrong, said in ((torchrun, "--stepps=3", "--stepps"), (forked, "--steps=many", "'--steps'")):
        ended = start(2, wrong)
        assert ended.err.count("See lpq train --help") == 1, ended.err
        assert said in ended.err
        assert ended.status == 2 if start is forked else "exitcode  : 2" in ended.err


def test_a_rank_that_raises_ends_the_others_and_its_error_is_the_one_shown(tiny: MakeConfig, tmp_path: Path) -> None:
    config = tiny(baseline=False, checkpoint_every=1, recipe="mxfp8")
    ended = forked(2, *options(config, tmp_path), fault=RAISE)
    assert ended.statuses == (1, 1)
    assert ended.err.count("lpq: rank 1 failed") == ended.err.count("lpq: rank") == 1
    assert ended.err.count("Traceback") == 1
    assert "RuntimeError: this rank is out of luck" in ended.err
    assert "onnection" not in ended.err  # of the rank that was left alone
    assert (Path(str(config.out)) / "recipe" / "step-00000001").is_dir()


def test_processes_that_cannot_find_each_other_are_refused(tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not launched()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainError, match=r"WORLD_SIZE=2\), and RANK.* is not set: start them with torchrun"):
        launched()


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda", 1)
    assert pick_device("cpu") == CPU
    with pytest.raises(TrainError, match=r"is one device, and 2 processes need one each"):
        pick_device("cuda:0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(TrainError, match=r"3 processes need a CUDA device each, and this machine has 2"):
        pick_device("auto")
