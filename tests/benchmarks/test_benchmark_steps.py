"""The steps that the benchmarks time do what they say, on the CPU and at tiny sizes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from imitated_gpu import imitated_gpu
from ranks import on_ranks, spawn
from test_cost_of_a_gather import Steps, model_of
from torch import nn
from transformers import LlamaConfig, LlamaModel

import lpq
from benchmarks import (
    after_step,
    contenders,
    group_choice,
    grouped,
    huggingface,
    liger,
    parallel,
    profiles,
    sources,
    stack,
)
from benchmarks.contenders import of_layers, of_stacks
from benchmarks.floor import FLOORS, Bare
from benchmarks.host import measure
from benchmarks.llama import Llama, rotations
from benchmarks.rows import CUT
from benchmarks.shapes import TINY, Decoder, Experts, Pair
from benchmarks.timing import WARM
from lpq.bench.contenders import Contender, by_recipes
from lpq.bench.layers import Layers, LayerSize
from lpq.bench.timing import Effort, Step, Timing

CPU = torch.device("cpu")
SMALL = LayerSize(64, 32, 48)
SOON = 60
"""Seconds; the group would wait for two minutes."""


def _failing(module: nn.Module) -> nn.Module:
    raise RuntimeError("not today")


def test_a_step_quantizes_the_weight_each_time_and_drops_gradients() -> None:
    layers = Layers(of_layers(("fp8-current",), compiled=False), SMALL, CPU)
    assert layers.failures == {}
    for name, step in layers.steps().items():
        module = layers.modules[name]
        step()
        assert module.weight.grad is None
        before = module(layers.x)
        with torch.no_grad():
            module.weight.neg_()
        assert torch.equal(module(layers.x), -before)


def test_a_mode_is_that_of_all_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def compile_(module: nn.Module, *, fullgraph: bool, dynamic: bool, mode: str | None) -> nn.Module:
        seen.append(mode)
        return module

    monkeypatch.setattr(torch, "compile", compile_)
    for mode in (None, "reduce-overhead"):
        Layers([replace(one, mode=mode) for one in of_layers(("fp8-current",))[:4]], SMALL, CPU)
    assert seen == [None, None, "reduce-overhead", "reduce-overhead"]


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "fp8-row"])
def test_a_floor_multiplies_and_copies_what_the_recipe_does(recipe: str) -> None:
    if recipe == "fp8-row" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 has no product of FP8 rows on the CPU")
    shape = LayerSize(64, 32, 48)
    bare = Bare(FLOORS[recipe], shape, CPU)
    fprop, dgrad, wgrad = (gemm() for gemm in bare._sets[0])
    assert (fprop.shape, dgrad.shape, wgrad.shape) == ((64, 48), (64, 32), (48, 32))
    assert all(torch.isfinite(product).all() for product in (fprop, dgrad, wgrad))
    copied = sum(tensor.nbytes for pair in bare._copies for tensor in pair)
    assert copied == FLOORS[recipe].quantized_bytes(shape)
    for step in bare.steps(recipe).values():
        step()


def test_what_fails_is_a_result_and_the_others_go_on() -> None:
    everyone = [*of_layers((), compiled=False), Contender("torchao", "tensorwise", False, _failing)]
    rows = measure(everyone, Effort(rounds=1, steps=2), CPU)["results"]
    assert [row["failure"] for row in rows] == [None, "RuntimeError: not today"]
    assert rows[0]["us"] > 0
    assert rows[0]["one_thread_us"] > 0
    assert "us" not in rows[1]


def test_a_missing_library_does_not_take_part() -> None:  # as conftest.py has none
    assert {c.library for c in of_layers()} == {"torch", "lpq"}
    assert {c.library for c in of_stacks()} == {"torch", "lpq"}


def test_the_stack_is_causal_and_has_the_parameters_of_llama() -> None:
    torch.manual_seed(0)
    model = Llama(TINY)
    x = torch.randn(1, TINY.sequence, TINY.hidden)
    cos, sin = rotations(TINY, CPU, torch.float32)
    y = model(x, cos, sin)
    x[:, TINY.sequence // 2 :] = 0
    half = model(x, cos, sin)
    assert torch.equal(y[:, : TINY.sequence // 2], half[:, : TINY.sequence // 2])
    assert not torch.equal(y, half)
    kv = TINY.hidden * TINY.kv_heads // TINY.heads
    block = 2 * TINY.hidden**2 + 2 * TINY.hidden * kv + 3 * TINY.hidden * TINY.ffn + 2 * TINY.hidden
    assert sum(p.numel() for p in model.parameters()) == TINY.blocks * block


def test_the_stack_trains_sharded_over_one_rank() -> None:
    with stack.group() as ranks:
        *earlier, result = stack.measure(of_stacks(("fp8-current",), compiled=False), TINY, 2, CPU)
    assert [len(found["results"]) for found in (*earlier, result)] == [1, 1, 2, 2, 2]
    assert [found["results"][-1]["failure"] for found in earlier] == [CUT, None, CUT, None]
    assert ranks == result["ranks"] == 1
    assert [row["failure"] for row in result["results"]] == [None, None]
    plain, quantized = (row["loss"] for row in result["results"])
    assert plain == pytest.approx(quantized, rel=0.05)
    assert all(row["tokens_per_second"] > 0 for row in result["results"])
    assert all(row["gathered_bytes"] is None for row in result["results"]), "nothing travels"


@on_ranks(2)
def test_a_stack_gathers_the_operands_of_its_weights(rank: int) -> None:
    *_, result = stack.measure(of_stacks(("fp8-current",), compiled=False), TINY, 1, CPU)
    assert [row["failure"] for row in result["results"]] == [None, None]
    model = Llama(TINY)
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    plain, quantized = (row["gathered_bytes"] for row in result["results"])
    assert plain == 2 * 2 * (weights + norms), "all in bf16, in forward and again in backward"
    assert quantized == 2 * (weights + 2 * norms), "the row operands in forward and the column operands in backward"


def _llama(rank: int, checkpointing: str) -> None:
    everyone = contenders.of_models(("fp8-current",), compiled=False, sharded=True)
    *_, result = huggingface.measure(everyone, Decoder(1, 128, 1, 32, 64), 1, CPU, checkpointing=checkpointing)
    names = [row["recipe"] for row in result["results"]]
    assert names == ["bf16", "fp8-current, gathered in bf16", "fp8-current"]
    assert [row["failure"] for row in result["results"]] == [None] * 3
    plain, in_bf16, quantized = (row["loss"] for row in result["results"])
    assert in_bf16 == quantized == pytest.approx(plain, rel=0.05)
    assert plain != quantized
    assert all(row["gathered_bytes"] for row in result["results"])
    assert (result["checkpointing"], result["sharded"], result["ranks"]) == (checkpointing, True, 2)


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_a_model_is_sharded_with_weights_gathered_both_ways(checkpointing: str) -> None:
    pytest.importorskip("transformers", reason="needs transformers, which `make install` brings")
    spawn(_llama, 2, checkpointing, fresh=True)


def _part(rank: int, whole: int) -> None:
    contender, *_ = contenders.of_models(("mxfp8",), sharded=True)
    largest = [0]
    made = torch.Tensor.normal_

    def normal_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        largest[0] = max(largest[0], self.numel())
        return made(self, *args, **kwargs)

    torch.Tensor.normal_ = normal_  # type: ignore[method-assign,assignment]
    model = huggingface.made(contender, Decoder(1, 128, 1, 32, 64), "none", CPU)
    torch.Tensor.normal_ = made  # type: ignore[method-assign]
    assert largest[0] == whole // 2, "only this rank's part is ever filled"
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    norm, *_ = (p for name, p in model.named_parameters() if "norm" in name)
    assert torch.equal(norm.full_tensor(), torch.ones(128))


def test_no_rank_holds_the_whole_of_a_sharded_model() -> None:
    pytest.importorskip("transformers", reason="needs transformers, which `make install` brings")
    spawn(_part, 2, 4 * 128 * 128, fresh=True)


def test_a_model_of_experts_is_trained_with_fused_blocks() -> None:
    pytest.importorskip("transformers", reason="needs transformers, which `make install` brings")
    everyone = contenders.of_models(("mxfp8",), compiled=False, sharded=False, fused=True)
    *_, result = huggingface.measure(everyone, Decoder(1, 128, 1, 32, 64, width=96, experts=2), 1, CPU)
    assert [(row["recipe"], row["failure"]) for row in result["results"]] == [
        ("bf16", None), ("mxfp8", None), ("mxfp8, fused", None),
    ]  # fmt: skip
    plain, apart, fused = (row["loss"] for row in result["results"])
    assert plain != apart == fused


@pytest.mark.starts
def test_attention_alone_is_compiled_between_fused_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    own = nn.Module.compile

    def compile_(module: nn.Module, *, dynamic: bool) -> None:
        seen.append(type(module).__name__)
        own(module, dynamic=dynamic, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(nn.Module, "compile", compile_)
    everyone = contenders.of_models(("fp8-delayed",), fused=True)
    everyone = contenders.chosen(everyone, ["lpq fp8-delayed, fused", "lpq fp8-delayed, attention"])
    *_, result = huggingface.measure(everyone, Decoder(2, 128, 1, 32, 64), 1, CPU)
    _, fused, attention = result["results"]
    assert attention["recipe"] == "fp8-delayed, attention compiled, fused"
    assert attention["failure"] is None
    assert attention["loss"] == fused["loss"]
    assert seen == ["LlamaAttention"] * 2


def test_whole_steps_are_recorded_beside_those_that_are_not() -> None:
    everyone = contenders.of_models(("mxfp8",), sharded=True, recorded=True)
    ours = [one for one in everyone if one.library in ("torch", "lpq")]
    plain, again = ours[: len(ours) // 2], ours[len(ours) // 2 :]
    assert [one.name for one in plain] == [one.name.replace(", recorded", "") for one in again]
    assert not any(one.recorded for one in plain)
    assert all(one.recorded and ", recorded" in one.name for one in again)


def test_a_policy_that_changes_in_a_run_is_measured_as_the_run_begins() -> None:
    (one,) = by_recipes(("nvfp4-pretrain",))
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(8))
    one.convert(nn.ModuleDict({"layers": layers}))
    recipes = [getattr(linear, "recipe", None) for layer in layers for linear in layer.children()]
    assert recipes == [lpq.recipe("nvfp4-eden")] * 6 + [None] * 2


def test_a_gpu_computes_or_only_sends_or_is_idle() -> None:
    spans = [("gemm", 0, 10), ("copy", 5, 10), ("ncclAllGather", 15, 20), ("gemm", 20, 10), ("gemm", 45, 10)]
    events: list[dict[str, object]] = [{"name": name, "ts": 100 + ts, "dur": dur} for name, ts, dur in spans]
    found = profiles.spent_in([*events[2:], *events[:2]], 1)
    assert (found.computing, found.sending, found.idle) == pytest.approx((35e-6, 10e-6, 10e-6))


def _failing_on_one_rank(module: nn.Module) -> nn.Module:
    return _failing(module) if dist.get_rank() == 1 else module


class FailingAtTheEnd:
    """On one rank, after the last of so many steps, when no other waits for it."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self, module: nn.Module) -> None:
        self.left -= 1
        if not self.left:
            _failing_on_one_rank(module)


@on_ranks(2)
def test_what_fails_in_one_rank_fails_in_all_and_the_others_go_on(rank: int) -> None:
    everyone = [
        Contender("torchao", "tensorwise", False, _failing_on_one_rank),
        Contender("torch", "bf16", False),
        Contender("torchao", "rowwise", False, after_step=FailingAtTheEnd(WARM + 2)),
        Contender("torch", "bf16 again", False),
    ]
    began = time.monotonic()
    *_, result = stack.measure(everyone, TINY, 2, CPU)
    assert time.monotonic() - began < SOON
    failure = "rank 1: RuntimeError: not today"
    assert [row["failure"] for row in result["results"]] == [failure, None, failure, None]
    assert [row.get("tokens_per_second", 0) > 0 for row in result["results"]] == [False, True, False, True]


def test_only_some_take_part_and_bf16_always() -> None:
    names = [c.name for c in contenders.chosen(of_layers(("fp8-current", "nvfp4")), ["lpq nvfp4"])]
    assert names == ["bf16", "lpq nvfp4", "lpq nvfp4, compiled"]


def test_a_name_that_nobody_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = of_layers(("fp8-current",))
    with pytest.raises(contenders.NobodyError, match=r"--only 'lpq fp8-curent' is nobody's name: there are bf16, "):
        contenders.chosen(everyone, ["bf16", "lpq fp8-curent"])
    monkeypatch.setattr(contenders, "installed", lambda library: None)
    assert [c.name for c in contenders.chosen(everyone, ["torchao tensorwise"])] == ["bf16"]
    monkeypatch.setattr(contenders, "installed", lambda library: "1.0")
    with pytest.raises(contenders.NobodyError, match="torchao tensorwise"):
        contenders.chosen([c for c in everyone if c.library != "torchao"], ["torchao tensorwise"])


def test_grouped_layers_are_handed_on_one_by_one() -> None:
    def clock(steps: dict[str, Step], effort: Effort) -> dict[str, Timing]:
        for step in steps.values():
            step()
        return dict.fromkeys(steps, Timing(1e-3, 1e-3, 1e-3))

    seen = [
        [row["recipe"] for row in found["shapes"][-1]["results"]]
        for found in grouped.measure(("mxfp8", "nvfp4"), (Experts(2, 16, 32, 48),), Effort(), CPU, clock)
    ]
    assert seen == [["bf16"], ["bf16", "mxfp8"], ["bf16", "mxfp8", "nvfp4"]]
    *_, last = grouped.measure(("mxfp8", "fp8-delayed"), (Experts(2, 16, 32, 48),), Effort(), CPU, clock)
    (shape,) = last["shapes"]
    assert "failure" in shape["floor"], "the CPU has no scaled product of groups"
    assert [row["failure"] is None for row in shape["results"]] == [True, True, False]
    assert shape["results"][1]["ms"] == shape["results"][1]["bf16_ms"] == 1.0


def test_the_constants_of_groups_follow_from_times() -> None:
    """A GPU is imitated whose products of codes have a fixed cost, and save half of bf16's time beside it."""
    shape = Experts(2, 1024, 64, 32)
    operations = 2 * 2 * 64 * 32  # of a row of each expert

    def clock(steps: dict[str, Step], effort: Effort) -> dict[str, Timing]:
        if "layer" in steps:
            return {"layer": Timing(*3 * [3 * (512 + 100) * operations + 5 * sum(shape.tensors)])}
        rows = steps["bf16 fprop"]().shape[0] / 2
        results = [step() for step in steps.values()]
        assert [r.shape for r in results[:3]] == [r.shape for r in results[3:]]
        of = {"bf16": rows * operations, "codes": (rows / 2 + 100) * operations}
        return {name: Timing(*3 * [of[name.partition(" ")[0]]]) for name in steps}

    *tried, saved, encoding = group_choice.lines((shape,), Effort(), CPU, clock)
    assert len(tried) == len(group_choice.ROWS)
    assert tried[2].endswith(f"÷ bf16 {(512 + 100) / 1024:.2f}")
    assert saved.startswith(f"SAVED = {(512 - 100) / 1024:.2g}  ")
    assert encoding.startswith("ENCODING = 5  ")


def test_an_optimizer_could_save_the_search_for_amaxes_and_a_read() -> None:
    """A GPU is imitated that searches for 3 ms, reads or writes all weights in 2, and encodes in 5."""

    def clock(steps: dict[str, Step], effort: Effort) -> dict[str, Timing]:
        for step in steps.values():
            step()
        of = {"AdamW": 14, "copy": 4, "mxfp8": 5}
        taken = {name: of.get(name, 5 if "given" in name else 8) * 1e-3 for name in steps}
        return {name: Timing(*3 * [time]) for name, time in taken.items()}

    first, *others = after_step.lines(Decoder(layers=1, hidden=128), Effort(), CPU, clock)
    assert first == "AdamW 14.00 ms, a read of all weights 2.00 ms"
    assert others[0] == "fp8-current: encodings 8.00 ms; given amaxes save 3.00, operands 5.00"
    assert others[1] == "mxfp8: encodings 5.00 ms; given amaxes save 0.00, operands 2.00"


@on_ranks(2)
def test_shards_whose_amaxes_or_operands_are_left_behind_are_not_measured_or_encoded(rank: int) -> None:
    names: list[str] = []
    with imitated_gpu() as gpu, torch.autograd.set_multithreading_enabled(False):
        step = Steps(model_of("fp8-current", 1, 3))
        for _ in range(WARM):
            step()
        gpu.launch = lambda kernel, blocks, arguments: names.append(kernel.name)  # type: ignore[method-assign]
        for operands, left in ((False, {"encode_several"}), (True, set())):
            names.clear()
            with after_step.left_behind(operands):
                step()
                step()
            assert {"amaxes", "encode_several"} & {*names} == left
            assert "place" in names
        names.clear()
        step()
        assert {"amaxes", "encode_several"} <= {*names}


@on_ranks(2)
def test_steps_of_ranks_stand_beside_steps_without_what_an_optimizer_could_leave_behind(rank: int) -> None:
    """Whole steps take 100 ms, and others 99 and 97."""

    def clock(steps: dict[str, Step], effort: Effort) -> dict[str, Timing]:
        for step in steps.values():
            step()
        return {name: Timing(*3 * [ms * 1e-3]) for name, ms in zip(steps, (100, 99, 97), strict=True)}

    (one,) = by_recipes(("fp8-current",), weights="high_precision")
    shape = Decoder(1, 128, 1, 32, 64)
    assert [*after_step.sharded_lines(one, shape, Effort(), CPU, clock, lambda step: step)] == [
        "lpq fp8-current, 2 ranks: 100.00 ms a step",
        "amaxes left behind save at most 1.00 ms, 1.0 %",
        "operands, too, left behind save at most 3.00 ms, 3.0 %",
    ]


def _pair(rank: int) -> None:
    def clock(steps: dict[str, Step], effort: Effort, count: int) -> dict[str, Timing]:
        return dict.fromkeys(steps, Timing(1e-3, 1e-3, 1e-3))

    parallel.on_gpu = clock  # type: ignore[assignment]
    everyone = [one for one in parallel.contenders(("mxfp8",)) if not one.compiled]
    (result,) = parallel.measure(everyone, Pair(256, 128, 256), Effort(), CPU)
    plain, quantized, overlapped = result["results"]
    assert (plain["failure"], quantized["failure"], overlapped["failure"]) == (None, None, None)
    assert "gathered_bytes" not in overlapped
    assert plain["gathered_bytes"] == 2 * 256 * 128 * 2  # x in forward and dy in backward, in bf16
    operand = 256 * (128 + 128 // 32)  # codes and scales
    assert quantized["gathered_bytes"] == 4 * operand  # two of x, and two of dy


def test_a_pair_of_layers_gathers_the_operands_of_its_sequence() -> None:
    spawn(_pair, 2, fresh=True)


def test_kernels_of_liger_are_put_into_one_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def patch_norm(module: nn.Module) -> None:
        vars(module)["forward"] = lambda x: x + 1

    def bind(module: nn.Module, name: str, function: Callable[..., object]) -> None:
        vars(module)[name] = MethodType(function, module)

    class LigerSwiGLUMLP:
        def forward(self, x: object) -> object:
            return "the activation of Liger"

    patches = SimpleNamespace(_patch_rms_norm_module=patch_norm, _bind_method_to_module=bind)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patches)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.swiglu", SimpleNamespace(LigerSwiGLUMLP=LigerSwiGLUMLP))
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    patched, other = liger.with_own_norms(LlamaModel(config)), LlamaModel(config)
    layers = patched.layers[0], other.layers[0]
    assert ["forward" in vars(layer.mlp) for layer in layers] == [True, False]
    assert ["forward" in vars(layer.input_layernorm) for layer in layers] == [True, False]
    assert "forward" not in vars(layers[0].self_attn)
    assert layers[0].mlp(torch.zeros(1)) == "the activation of Liger"


@pytest.mark.parametrize("name", sources.SOURCES)
@pytest.mark.parametrize("recipe", sources.FORMATS)
@pytest.mark.parametrize("which", sources.SIDES)
def test_a_source_is_encoded_as_its_row_says(name: str, recipe: str, which: str) -> None:
    source, shape = sources.SOURCES[name], (16, 32)
    producer, states = sources.bound(source, sources.FORMATS[recipe], sources.SIDES[which], shape, CPU)
    made = producer.produce(sources.inputs_of(source, shape, CPU), states, [None] * source.outputs)
    both = which == "both"
    several = source.outputs > 1
    expected = [(True, both)] * (source.outputs - several) + [(not both, both)] * several
    assert [(bool(one.row), bool(one.col)) for one in made] == expected
    assert [bool(state) for state in states] == [recipe == "fp8-delayed"] * source.outputs
