"""A run from its start to its table, and what it refuses to start."""

from __future__ import annotations

import builtins
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from training import MakeConfig, shown

import lpq
from lpq.cli.explain import explain
from lpq.kernels import KernelError
from lpq.recipes import RecipeError
from lpq.registry.errors import LpqError
from lpq.train import TrainError, loop, machine, plot, report, run, trainer
from lpq.train.data import load
from lpq.train.errors import TrainOptionError
from lpq.train.machine import baseline_on, fixed_sums, pick_device
from lpq.train.measure import held_for_backward, served_by
from lpq.train.model import GPT, GPTShape
from lpq.train.team import Team
from lpq.train.trainer import Trainer

CPU = torch.device("cpu")


def test_a_run_compares_the_recipe_with_bf16_and_leaves_its_numbers(
    tiny: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a table, a file and a plot."""
    monkeypatch.setattr(report, "draw", plot.draw)
    summary = run(tiny(recipe="fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"), console)
    recipe, bf16 = summary.outcomes
    assert len(recipe.losses) == len(bf16.losses) == 6
    assert recipe.losses[0] != bf16.losses[0]
    assert recipe.losses[0] == pytest.approx(bf16.losses[0], rel=1e-2)  # the same weights and the same batch
    assert summary.gap == recipe.held_out_loss / bf16.held_out_loss - 1
    said = shown(console)
    for number in (recipe, bf16):
        assert f"{number.held_out_loss:.4f}" in said
        assert f"{number.perplexity:.5g}" in said
    assert f"{summary.gap:+.2%}" in said
    assert "held for backward" in said
    assert "4 layers converted" in said
    for gemm in ("fprop", "dgrad", "wgrad"):
        assert gemm in said
    assert {s.gemm: s.operands for s in recipe.served} == {
        "fprop": "mxfp8 · mxfp8",
        "dgrad": "nvfp4(stochastic=true) · nvfp4(block=16x16)",
        "wgrad": "identity(dtype=bfloat16) · identity(dtype=bfloat16)",
    }
    assert [s.layers for s in recipe.served] == [4, 4, 4]
    written = json.loads((summary.directory / "summary.json").read_text())
    assert written["config"]["steps"] == 6
    assert written["gap"] == summary.gap
    for outcome, stored in zip(summary.outcomes, written["outcomes"], strict=True):
        assert stored["held_out_loss"] == outcome.held_out_loss
        assert stored["perplexity"] == math.exp(outcome.held_out_loss)
        assert stored["bytes_held"] == outcome.measured.held > 0
    assert (summary.directory / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "blocks.0.mlp.up" in (summary.directory / "conversion.txt").read_text()
    assert "blocks.0.mlp.up" not in said


def test_a_run_alone_without_matplotlib(tiny: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """One column and no gap; no plot, in words; the full report, as it is asked for; the model is told each step."""
    real, set_step, steps = builtins.__import__, lpq.set_step, list[int]()

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(report, "draw", plot.draw)
    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    monkeypatch.setattr(lpq, "set_step", lambda model, step: (steps.append(step), set_step(model, step)))
    summary = run(tiny(baseline=False, full=True), console)
    assert (summary.directory / "conversion.txt").read_text().strip() in shown(console)
    assert "full =" not in (summary.directory / "config.toml").read_text()
    assert "no plot, for matplotlib is not installed" in shown(console)
    assert not (summary.directory / "loss.png").exists()
    assert len(summary.outcomes) == 1
    assert summary.gap is None
    assert "gap" not in shown(console)
    assert not (summary.directory / baseline_on(CPU)).exists()
    assert steps == list(range(6))


@pytest.mark.parametrize("fast", [True, False])
def test_the_baseline_is_fp32_where_bf16_is_slow(
    fast: bool, tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    for module in (machine, trainer, loop):
        monkeypatch.setattr(module, "fast_bf16", lambda device: fast)
    seen: list[torch.dtype] = []
    multiply = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: (seen.append((y := multiply(*args)).dtype), y)[1])
    summary = run(tiny(steps=2, recipe="mxfp8"), console)
    name = "bf16" if fast else "fp32"
    assert summary.outcomes[1].title == name
    assert (summary.directory / name).is_dir()
    assert f"gap to {name}" in shown(console)
    assert ("no instructions" in shown(console)) == (not fast)
    assert set(seen) == {torch.bfloat16 if fast else torch.float32}  # of the baseline, and of layers left alone


@pytest.mark.slow
def test_a_narrow_terminal_has_records_in_place_of_tables(tiny: MakeConfig) -> None:
    narrow = Console(file=io.StringIO(), width=50)
    summary = run(tiny(steps=1, recipe="mxfp8", baseline=False), narrow)
    lines = shown(narrow).splitlines()
    assert lines[lines.index("held-out loss (nats per byte)") + 1].split() == [
        "mxfp8", f"{summary.outcomes[0].held_out_loss:.4f}"
    ]  # fmt: skip
    assert ["operands", "mxfp8", "·", "mxfp8"] in [line.split() for line in lines]


def test_a_model_learns_and_seeds_matter(tiny: MakeConfig, console: Console) -> None:
    learned = run(tiny("a", steps=30, lr=2e-2, batch=8, checkpoint_every=0, baseline=False), console).outcomes[0]
    assert learned.losses[0] > math.log(256)  # no better than chance
    assert learned.held_out_loss < 2.5
    seeds = [run(tiny(f"seed {s}", baseline=False, seed=s), console).outcomes[0].losses for s in (1, 1 << 32 | 1)]
    assert seeds[0] != seeds[1]


def test_a_pattern_that_matches_nothing_is_told(tiny: MakeConfig, console: Console, tmp_path: Path) -> None:
    policy = tmp_path / "p.toml"
    policy.write_text('[[rules]]\nmatch = ["blocks.*", "decoder.*"]\nrecipe = "mxfp8"\n')
    with pytest.warns(UserWarning, match=r"no layer matches 'decoder\.\*'"):
        run(tiny(policy=str(policy), baseline=False), console)


def test_a_policy_that_reaches_no_layer_is_refused_before_anything_is_made(
    tiny: MakeConfig, console: Console, tmp_path: Path
) -> None:
    policy = tmp_path / "p.toml"
    policy.write_text('[[rules]]\nmatch = "decoder.*"\nrecipe = "mxfp8"\n')
    words = r"p\.toml converts no layer of a model of layers = 1 and width = 32, .*qkv: no rule .*\. Change the model"
    with pytest.raises(TrainOptionError, match=words):
        run(config := tiny(policy=str(policy)), console)
    assert not Path(str(config.out)).exists()
    kept = loop.policy_of(tiny(recipe="bf16"))
    assert kept == lpq.policy("bf16")  # a recipe like any other


def test_a_policy_is_no_recipe(tiny: MakeConfig, console: Console, tmp_path: Path) -> None:
    rules = tmp_path / "p.toml"
    rules.write_text('[[rules]]\nmatch = "*"\nrecipe = "mxfp8"\n')
    with pytest.raises(RecipeError, match=r"has rules: give it as --policy .*p\.toml"):
        run(tiny(recipe=str(rules)), console)
    with pytest.raises(RecipeError, match=r"has rules: .*`lpq train --policy .*p\.toml`"):
        explain(str(rules))
    recipe = tmp_path / "narrow.toml"
    recipe.write_text(lpq.recipe("mxfp8").to_toml())
    assert run(tiny(recipe=str(recipe), steps=1, baseline=False), console).outcomes[0].title == "narrow"


def test_a_run_refused_at_its_first_step_can_be_corrected(
    tiny: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(steps=2, baseline=False)
    assert config.out is not None
    with monkeypatch.context() as refused:
        refused.setenv("LPQ_KERNELS", "triton")
        with pytest.raises(LpqError):
            run(config, console)
    assert not Path(config.out).exists()
    assert len(run(config, console).outcomes[0].losses) == 2


def test_a_backend_that_is_none_is_refused_before_anything_is_made(
    tiny: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LPQ_KERNELS", "cdua, torch")
    with pytest.raises(KernelError, match=r"LPQ_KERNELS=cdua, torch: unknown cdua; choose from reference, torch"):
        run(tiny(), console)
    assert shown(console) == ""


@pytest.mark.parametrize(("steps", "told"), [(3, [1, 2, 3]), (25, [3, 6, 9, 12, 15, 18, 21, 24, 25])])
def test_without_a_terminal_a_line_tells_of_every_tenth(
    tiny: MakeConfig, console: Console, steps: int, told: list[int]
) -> None:
    losses = run(tiny(steps=steps, recipe="bf16", baseline=False), console).outcomes[0].losses
    lines = [line for line in shown(console).splitlines() if line.startswith("bf16: step ")]
    assert lines == [f"bf16: step {n} of {steps}, loss {losses[n - 1]:.3f}" for n in told]
    assert "━" not in shown(console).partition("lpq train")[0]


def test_in_a_terminal_there_is_a_bar(tiny: MakeConfig) -> None:
    terminal = Console(file=io.StringIO(), width=200, force_terminal=True)
    run(tiny(steps=2, recipe="bf16", baseline=False), terminal)
    assert "━" in shown(terminal).partition("lpq train")[0]
    assert "step 1 of 2" not in shown(terminal)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-current", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"])
def test_weights_stored_quantized_with_masters_train_to_the_same_bits(
    tiny: MakeConfig, console: Console, recipe: str
) -> None:
    ways = ("quantized", "high_precision")
    stored, plain = (run(tiny(w, recipe=recipe, weights=w, baseline=False, steps=3), console).outcomes[0] for w in ways)
    assert stored.losses == plain.losses
    assert stored.held_out_loss == plain.held_out_loss
    assert stored.measured.weights < plain.measured.weights
    assert stored.measured.optimizer > plain.measured.optimizer
    assert shown(console).count("optimizer state") == 1


def test_a_policy_that_changes_stored_weights_is_refused(tiny: MakeConfig, console: Console, tmp_path: Path) -> None:
    policy = tmp_path / "p.toml"
    policy.write_text(
        '[[rules]]\nuntil = 0.5\nmatch = "*"\nrecipe = "mxfp8"\n[[rules]]\nmatch = "*"\nrecipe = "nvfp4"\n'
    )
    with pytest.raises(
        RecipeError, match=r"blocks\.0\.attention\.qkv: its weight would be stored quantized, and the policy changes"
    ):
        run(tiny(policy=str(policy), weights="quantized"), console)


@pytest.mark.parametrize(
    ("name", "words"),
    [("abacus", "is no device"), ("meta", "runs on cpu and cuda"), ("cuda:99", "device = 'cuda:99', but")],
)
def test_a_device_that_is_not_there_is_refused(name: str, words: str) -> None:
    with pytest.raises(TrainError, match=words):
        pick_device(name)


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainError, match=r"no CUDA device that PyTorch can use: use --device cpu, or auto"):
        pick_device("cuda")
    assert pick_device("auto") == CPU


def test_a_diverged_run_ends_in_words(tiny: MakeConfig, text: Path) -> None:
    config = tiny()
    trainer = Trainer(config, load(config.data, config.seq), None, Team(device=CPU))
    weight = trainer.model.blocks[0].mlp.up.weight
    before = weight.detach().clone()
    hook = weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(
        TrainError, match=r"step 1 has a loss of \d.* and a gradient norm of (nan|inf): training diverged"
    ):
        trainer.advance()
    assert torch.equal(weight, before)  # no such step reaches the weights
    hook.remove()
    with torch.no_grad():
        trainer.model.embedding.weight.fill_(math.nan)
    with pytest.raises(TrainError, match=r"a loss of nan"):
        trainer.advance()


def _bytes(kept: dict[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in kept.values())


def test_held_bytes_count_each_memory_once_and_no_parameter() -> None:
    layer = nn.Linear(8, 4, bias=False)
    x = torch.randn(16, 8)
    with held_for_backward(layer) as held:
        layer(x)
        layer(x.view(4, 4, 8))
    assert _bytes(held) == 16 * 8 * 4  # x, once; the weight is the model's own
    with held_for_backward(layer) as more:
        torch.exp(layer(x))
    assert _bytes(more) == 16 * 8 * 4 + 16 * 4 * 4


def test_the_encoded_input_takes_less_than_the_input() -> None:
    held = {}
    for recipe in ("bf16", "fp8-current"):
        model = lpq.convert(nn.Sequential(nn.Linear(256, 32, bias=False, dtype=torch.bfloat16)), recipe)
        with held_for_backward(model) as kept:
            model(torch.randn(512, 256, dtype=torch.bfloat16))
        held[recipe] = _bytes(kept)
    assert held["bf16"] == 512 * 256 * 2
    assert 512 * 256 <= held["fp8-current"] < 512 * 256 * 1.1


def test_what_is_left_alone_is_served_by_torch() -> None:
    model = GPT(GPTShape(layers=2, heads=2, width=32))
    lpq.convert(model, {"rules": [{"match": "*.mlp.*", "recipe": "mxfp8"}]})
    served = {(s.gemm, s.operands): (s.kernel, s.layers) for s in served_by(model, CPU)}
    assert served["fprop", "left to PyTorch"] == ("torch", 4)
    assert served["fprop", "mxfp8 · mxfp8"][1] == 4
    reasons = next(s.why_not for s in served_by(model, CPU) if s.operands == "mxfp8 · mxfp8")
    assert reasons == ("torch, cuda: runs on cuda, not on cpu",)  # said once for all of their kernels


def test_a_compiled_run_is_the_eager_run(
    tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch, console: Console, tmp_path: Path
) -> None:
    """One layer of low precision is enough."""
    policy = tmp_path / "policy.toml"
    policy.write_text('[[rules]]\nmatch = "*.mlp.up"\nrecipe = "nvfp4"\n')
    compiled: list[nn.Module] = []

    def compile_to_the_same_operations(self: nn.Module) -> None:
        compiled.append(self)
        self._compiled_call_impl = torch.compile(self._call_impl, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", compile_to_the_same_operations)
    options = {"policy": str(policy), "baseline": False, "steps": 2}
    eager, other = (run(tiny(str(c), compile=c, **options), console).outcomes[0] for c in (False, True))
    assert len(compiled) == 1
    assert eager.losses == other.losses
    assert eager.held_out_loss == other.held_out_loss
    assert other.measured.held > 0


def test_the_number_of_threads_is_the_run_s_alone(
    tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    advance = Trainer.advance
    monkeypatch.setattr(Trainer, "advance", lambda self: (seen.append(torch.get_num_threads()), advance(self))[1])
    for threads in (1, 3, 0):
        run(tiny(f"{threads} threads", threads=threads, steps=1, baseline=False), console)
    assert seen == [1, 3, before]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", ["cpu", "cuda"])
@pytest.mark.parametrize(("deterministic", "warn_only"), [(False, False), (True, False), (True, True)])
def test_sums_are_asked_for_as_before_once_a_run_has_ended(
    name: str, deterministic: bool, warn_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # it would stay
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    try:
        with fixed_sums(torch.device(name), 0):
            assert asked() == ((deterministic, warn_only) if name == "cpu" else (True, False))
        assert asked() == (deterministic, warn_only)
    finally:
        torch.use_deterministic_algorithms(False)
