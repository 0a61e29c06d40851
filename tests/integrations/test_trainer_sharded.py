"""Hugging Face's Trainer under accelerate's FSDP2, and accelerate without it, on several ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
import torch.distributed as dist
from llama import STEPS, TWO_STAGES, converted, llama, losses, trainer, transformers
from ranks import spawn
from sharded import How, batch, built, decoded, model, train
from support.comparing import equal_states
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

import lpq
from lpq.integrations.transformers import LpqCallback
from lpq.integrations.transformers_config import LpqConfig
from lpq.integrations.transformers_culprits import CulpritsCallback
from lpq.optim import MasterWeights

accelerate: Any = pytest.importorskip("accelerate", reason="needs accelerate, which `make install` brings")
FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


class _Sharded(transformers.Trainer):  # type: ignore[misc]
    """Shards as ``accelerate launch`` has it on GPUs: on a CPU FSDP2 is not offered, and the code is the same."""

    kind = FULL

    def create_accelerator_and_postprocess(self) -> None:
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            cpu_ram_efficient_loading=False,
            state_dict_type=self.kind,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        if self.args.bf16:
            plugin.set_mixed_precision("bf16")
        state = accelerate.Accelerator(cpu=True, mixed_precision="bf16" if self.args.bf16 else "no").state
        state._shared_state["fsdp_plugin"] = plugin
        for shared in (PartialState._shared_state, state._shared_state):
            shared["distributed_type"] = DistributedType.FSDP
        super().create_accelerator_and_postprocess()
        state._shared_state["distributed_type"] = DistributedType.FSDP


class _InShards(_Sharded):
    kind = SHARDED


@contextmanager
def _launched(rank: int) -> Iterator[None]:
    from accelerate.state import AcceleratorState

    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # never used: the processes are connected
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        AcceleratorState._reset_state(True)


def _whole(trained: Any) -> dict[str, Tensor]:
    state: dict[str, Tensor] = trained.accelerator.get_state_dict(trained.model)
    return state


RUNS: dict[str, tuple[Any, dict[str, Any], type, int]] = {
    "two stages": (TWO_STAGES, {"weights": "high_precision"}, _Sharded, STEPS),
    "codes in shards": ("nvfp4", {"weights": "quantized", "ranks": 2}, _InShards, 4),
    "histories": ("fp8-delayed", {}, _Sharded, 4),
    "histories in shards": ("fp8-delayed", {}, _InShards, 4),
}
"""Policies, how weights are stored, the kind of the checkpoint, and the steps; in shards PyTorch begins an optimizer's
state by a step of lr 0."""


def _goes_on_bit_for_bit(rank: int, out: Path, run: str) -> None:
    """Codes of stored weights and histories too: each rank remembers its own inputs until a step; a checkpoint has the
    histories of one rank."""
    policy, how, kind, steps = RUNS[run]
    with _launched(rank):
        options: Any = {"cls": kind, "max_steps": steps}
        watches = CulpritsCallback()
        done = trainer(converted(policy, **how), out / "a", LpqCallback(), watches, **options)
        done.train()
        assert all(isinstance(p, DTensor) for p in done.model.parameters())
        logged = [entry["grad_norm"] for entry in done.state.log_history if "loss" in entry]
        assert watches.state()["attributes"]["saved_course"]["norms"] == logged  # before the Trainer clips
        assert max(logged) > done.args.max_grad_norm
        assert any("gathered as" in entry.note for entry in lpq.report(done.model).weights) == bool(how)
        resumed = trainer(converted(policy, **how), out / "b", LpqCallback(), **options)
        resumed.train(resume_from_checkpoint=str(out / "a" / "checkpoint-2"))
        assert len(set(losses(done))) == steps
        assert losses(resumed) == losses(done)
        state = _whole(done)
        assert equal_states(_whole(resumed), state)
        for a, b in zip(resumed.model.parameters(), done.model.parameters(), strict=True):
            assert repr(a._local_tensor) == repr(b._local_tensor)
        histories = [{n: b for n, b in t.model.named_buffers() if "history" in n} for t in (done, resumed)]
        assert bool(histories[0]) == (policy == "fp8-delayed")
        assert equal_states(*histories)
        if run == "two stages":
            resumed.save_model(str(out / "final"))
        if run == "two stages" and rank == 0:
            loaded = transformers.LlamaForCausalLM.from_pretrained(out / "final")
            assert equal_states(loaded.state_dict(), state)
            assert type(next(iter(state.values()))) is Tensor


@pytest.mark.parametrize("run", RUNS)
def test_a_run_of_two_ranks_goes_on_bit_for_bit(run: str, tmp_path: Path) -> None:
    spawn(_goes_on_bit_for_bit, 2, tmp_path, run)


def _the_best_model_is_loaded(rank: int, out: Path) -> None:
    with _launched(rank):
        llama().save_pretrained(out / "plain")  # which the first rank does
        dist.barrier()
        model = transformers.LlamaForCausalLM.from_pretrained(
            out / "plain", quantization_config=LpqConfig("mxfp8", weights="quantized", ranks=2)
        )
        best = trainer(
            model, out, LpqCallback(), cls=_Sharded, load_best_model_at_end=True,
            eval_strategy="steps", eval_steps=2, learning_rate=10.0, lr_scheduler_type="constant", max_steps=4,
        )  # fmt: skip
        best.train()
        assert best.state.best_global_step == 2
        state = _whole(best)
        if rank == 0:
            assert equal_states(safetensors.load_file(out / "checkpoint-2" / "model.safetensors"), state)
            assert not equal_states(safetensors.load_file(out / "checkpoint-4" / "model.safetensors"), state)


def _masters_that_were_made_before_sharding_are_refused(rank: int, out: Path) -> None:
    with _launched(rank):
        model = converted(weights="quantized", ranks=2)
        early = trainer(model, out, LpqCallback(), masters=True, cls=_Sharded, max_steps=1)
        with pytest.raises(RuntimeError, match="took the place of another one after MasterWeights was made"):
            early.train()


@pytest.mark.parametrize("check", [_the_best_model_is_loaded, _masters_that_were_made_before_sharding_are_refused])
def test_two_ranks(check: Any, tmp_path: Path) -> None:
    spawn(check, 2, tmp_path)


def _four_ranks_in_bf16(rank: int, out: Path) -> None:
    """As the page has it: parameters in fp32, and ``mixed_precision: bf16``."""
    with _launched(rank):
        options: Any = {"cls": _Sharded, "max_steps": 4, "bf16": True}
        plain = trainer(converted("mxfp8"), out / "plain", LpqCallback(), **options)
        plain.train()
        done = trainer(converted("mxfp8", weights="high_precision"), out / "a", LpqCallback(), **options)
        done.train()
        assert done.accelerator.mixed_precision == "bf16"
        assert all(isinstance(p, DTensor) for p in done.model.parameters())
        assert all("gathered as" in entry.note for entry in lpq.report(done.model).weights)
        assert lpq.report(done.model).weights
        assert len(set(losses(done))) == 4
        assert losses(done) == losses(plain)
        resumed = trainer(converted("mxfp8", weights="high_precision"), out / "b", LpqCallback(), **options)
        resumed.train(resume_from_checkpoint=str(out / "a" / "checkpoint-2"))
        assert losses(resumed) == losses(done)
        assert equal_states(_whole(resumed), _whole(done))


def test_four_ranks_in_bf16_go_on_bit_for_bit(tmp_path: Path) -> None:
    spawn(_four_ranks_in_bf16, 4, tmp_path)


# ---------------------------------------------------------------------------------------------- accelerate alone


STORED = How("mxfp8", "quantized", width=64, inner=128, ranks=2)
ORDINARY, GATHERED = (replace(STORED, weights=weights) for weights in (None, "high_precision"))


def _accelerator(**options: Any) -> Any:
    """As ``accelerate launch`` sets it up on GPUs."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    blocks = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **{**blocks, **options})
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="no")
    accelerator.state._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    return accelerator


def _converted(how: How) -> nn.Module:
    net = model(how.width, how.inner, how.blocks)
    return lpq.convert(net, how.recipe, weights=how.weights, ranks=how.ranks if how.weights else None)


def _adam(params: Any) -> Optimizer:
    return AdamW(params, lr=1e-2, foreach=True)


def _rounding(optimizer: Optimizer) -> Optimizer:
    return MasterWeights(optimizer, keep=False)


def _prepared(how: How, **options: Any) -> tuple[Any, nn.Module, Any]:
    accelerator, net = _accelerator(**options), _converted(how)
    return accelerator, *accelerator.prepare(net, _adam(net.parameters()))


def _trained(
    how: How, wrapped: Callable[[Optimizer], Optimizer] | None = None, loads_once: bool = False
) -> list[float]:
    """The losses of some steps, each of which changes every parameter."""
    accelerator, net, optimizer = _prepared(how, cpu_ram_efficient_loading=loads_once)
    if wrapped is not None:
        optimizer.optimizer = wrapped(optimizer.optimizer)
    found = []
    for number in range(3):
        x = batch(number, how)
        loss = (net(x) - x.roll(1, 0)).square().mean()
        accelerator.backward(loss)
        before = [decoded(p) for p in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        assert not any(torch.equal(a, decoded(p)) for a, p in zip(before, net.parameters(), strict=True)), number
        found.append(loss.item())
    return found


def _trains_as_by_hand(rank: int) -> None:
    with _launched(rank):
        ordinary = _trained(ORDINARY)
        assert len(set(ordinary)) == 3
        assert _trained(GATHERED) == ordinary
        rounded = _trained(STORED, _rounding)
        assert rounded[0] == ordinary[0]
        assert rounded == train(replace(STORED, optimizer=lambda params: _rounding(_adam(params))), 3)[0]
        with_masters = _trained(STORED, MasterWeights)
        assert with_masters == train(replace(STORED, optimizer=lambda params: MasterWeights(_adam(params))), 3)[0]
        assert with_masters != rounded


def _is_loaded_on_rank_0_alone(rank: int) -> None:
    """accelerate's default: the other ranks get the weights from there."""
    with _launched(rank):
        assert _trained(GATHERED, loads_once=True) == _trained(ORDINARY, loads_once=True)
        words = r"stored quantized, and loses its values on .*cpu_ram_efficient_loading=F"
        with pytest.raises(RuntimeError, match=words):
            _prepared(STORED, cpu_ram_efficient_loading=True)  # on both ranks


def _what_cannot_be_exchanged_is_refused(rank: int) -> None:
    """The parameters of a model that somebody else sharded."""
    with _launched(rank):
        net = built(GATHERED)
        accelerator = _accelerator(cpu_ram_efficient_loading=False, auto_wrap_policy="no_wrap")
        net, optimizer = accelerator.prepare(net, _adam(net.parameters()))
        accelerator.backward(net(batch(0, GATHERED)).square().mean())
        words = r"has 1\.down\.weight \d+ times, .*If a library exchanged its parameters, have that shard"
        with pytest.raises(RuntimeError, match=words):
            optimizer.step()


@pytest.mark.parametrize(
    "check", [_what_cannot_be_exchanged_is_refused, _trains_as_by_hand, _is_loaded_on_rank_0_alone]
)
def test_accelerate_alone(check: Callable[[int], None]) -> None:
    spawn(check, 2)
