"""Lightning's Trainer on two ranks over gloo: DistributedDataParallel, and FSDP2 by its ModelParallelStrategy."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from boring import REVERSED, STEPS, TWO_STAGES, Boring, lightning, loader, trainer
from ranks import spawn
from support.comparing import equal_states
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lpq
from lpq.checkpoint import CheckpointError
from lpq.integrations.lightning import LpqCallback, LpqPrecision

pytestmark = pytest.mark.slow


@contextmanager
def _launched(rank: int) -> Iterator[None]:
    """As torchrun has it; the processes are connected already."""
    ranks = str(dist.get_world_size())
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "1"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Mine(Boring):
    """Each rank has other rows."""

    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(batch.chunk(dist.get_world_size())[dist.get_rank()], index)


class _Sharded(_Mine):
    """Converted by the plugin, and sharded, as ModelParallelStrategy has it."""

    def configure_model(self) -> None:
        if not any(isinstance(p, DTensor) for p in self.parameters()):
            self.trainer.precision_plugin.convert_module(self)
            for layer in (self.net[0], self.net[2]):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def _fit(
    out: Path, model: Any, strategy: Any, policy: Any, resume: Any = None, callback: Any = None, **options: Any
) -> Any:
    made = trainer(
        out, LpqPrecision(policy, steps="later", **options), callback or LpqCallback(report=False), strategy=strategy,
        devices=2, use_distributed_sampler=False,
    )  # fmt: skip
    if resume is not None:
        made.ckpt_path = resume  # known before shards are loaded
    made.fit(model, loader())
    return made


def _ddp(**options: Any) -> Any:
    return lightning.pytorch.strategies.DDPStrategy(process_group_backend="gloo", broadcast_buffers=False, **options)


def _fsdp(distributed: bool = True) -> Any:
    return lightning.pytorch.strategies.ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=distributed,
        process_group_backend="gloo",
    )  # fmt: skip


def _whole(model: Any) -> dict[str, Any]:
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}


def _of_all(values: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, values)
    return found


def _replicas_go_on_bit_for_bit(rank: int, out: Path) -> None:
    with _launched(rank):
        done, resumed, watching = _Mine(), _Mine(), LpqCallback(report=False, watch=3, layers="net.0")
        _fit(out / "a", done, _ddp(), REVERSED, callback=watching)
        assert watching.numerics is not None
        readings, theirs = _of_all([one.as_dict() for one in watching.numerics.readings()])
        assert readings == theirs  # of the rows of both
        assert {(one["step"], one["layer"]) for one in readings} == {(0, "net.0"), (3, "net.0")}
        assert (out / "a" / "numerics.jsonl").is_file()
        _fit(out / "b", resumed, _ddp(), REVERSED, out / "a" / "step=4.ckpt")
        assert resumed.losses == done.losses[4:]
        assert resumed.recipes == done.recipes[4:] == [lpq.recipe("fp8-delayed")] * 2
        assert equal_states(resumed.state_dict(), done.state_dict())
        first, second = _of_all(done.losses)
        assert first != second
        mine, other = _of_all({n: t.clone() for n, t in done.state_dict().items()})
        assert equal_states(mine, other)
        assert len([n for n in mine if n.endswith("amax_history")]) == 6


def _shards_go_on_bit_for_bit(rank: int, out: Path, distributed: bool) -> None:
    with _launched(rank):
        plain, done = _Sharded(), _Sharded()
        _fit(out / "plain", plain, _fsdp(distributed), TWO_STAGES)
        _fit(out / "a", done, _fsdp(distributed), TWO_STAGES, weights="high_precision")
        assert all(isinstance(p, DTensor) for p in done.parameters())
        assert all("gathered as" in entry.note for entry in lpq.report(done).weights)
        assert not any("gathered as" in entry.note for entry in lpq.report(plain).weights)
        assert done.losses == plain.losses
        assert len(set(done.losses)) == STEPS
        assert done.recipes == [lpq.recipe("fp8-delayed")] * 3 + [lpq.recipe("mxfp8")] * 3
        for step in (2, 4) if distributed else (4,):  # in the first stage of the policy, and in the second
            resumed = _Sharded()
            checkpoint = out / "a" / f"step={step}.ckpt"
            assert checkpoint.is_dir() == distributed
            _fit(out / f"b{step}", resumed, _fsdp(distributed), TWO_STAGES, checkpoint, weights="high_precision")
            assert resumed.losses == done.losses[step:]
            assert equal_states(_whole(resumed), _whole(done))


def _states_of_a_later_stage_are_loaded_or_missed(rank: int, out: Path) -> None:
    with _launched(rank):
        done = _Sharded()
        _fit(out / "a", done, _fsdp(), REVERSED)
        checkpoint = out / "a" / "step=4.ckpt"
        resumed = _Sharded()
        _fit(out / "b", resumed, _fsdp(), REVERSED, checkpoint)
        assert resumed.losses == done.losses[4:]
        made = trainer(
            out / "c", LpqPrecision(REVERSED, steps="later"), LpqCallback(report=False), strategy=_fsdp(), devices=2,
            use_distributed_sampler=False,
        )  # fmt: skip
        with pytest.raises(CheckpointError, match=r"were not loaded.*Set trainer\.ckpt_path = checkpoint"):
            made.fit(_Sharded(), loader(), ckpt_path=checkpoint)


@pytest.mark.parametrize("check", [_replicas_go_on_bit_for_bit, _states_of_a_later_stage_are_loaded_or_missed])
def test_two_ranks(check: Any, tmp_path: Path) -> None:
    spawn(check, 2, tmp_path)


@pytest.mark.parametrize("distributed", [True, False])
def test_shards_go_on_bit_for_bit(distributed: bool, tmp_path: Path) -> None:
    spawn(_shards_go_on_bit_for_bit, 2, tmp_path, distributed)
