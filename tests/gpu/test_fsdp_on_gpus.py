"""Sharded training over NCCL: as with ordinary gathers, as unsharded, what it sends, and what a lost rank does."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparing import copy_bytes, equal_states

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from operands import gathered
from ranks import spawn
from sharded import W8, How, batch, built, give_gradients, optimizer_for, same_parts, step, train, whole
from test_bytes import every_collective_of_a_step
from test_failures import MISHAPS, Mishap, Run
from test_fsdp import RECIPES
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

import lpq
from lpq.optim import MasterWeights

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
BACKEND = "cpu:gloo,cuda:nccl"


def _fused_masters(params: Any) -> Optimizer:
    return MasterWeights(AdamW(params, lr=1e-2, fused=True))


def _plain(params: Any) -> Optimizer:
    return AdamW(params, lr=1e-2, foreach=True)


def _foreach(params: Any) -> Optimizer:
    return MasterWeights(AdamW(params, lr=1e-2, foreach=True), keep=False)


# ---------------------------------------------------------------------------------- as with ordinary gathers

WAYS: list[dict[str, Any]] = [
    {}, {"reshard": False, "mixed": True}, {"mixed": True, "checkpoint": True}, {"offload": True}, {"accumulate": 2},
]  # fmt: skip


def _same(a: How, b: How) -> None:
    ordinary, p = train(a)
    quantized, q = train(b)
    assert ordinary == quantized, b
    for (name, one), other in zip(p.named_parameters(), q.parameters(), strict=True):
        for x, y in zip(_parts(one), _parts(other), strict=True):
            assert torch.equal(x, y), (b, name)


def _parts(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of a parameter: of one that is stored quantized, those of this rank's buffers."""
    local = parameter.detach()._local_tensor  # type: ignore[attr-defined]
    if not isinstance(local, lpq.QuantizedTensor):
        return [whole(parameter.detach())]
    return [copy_bytes(t) for _, s in local.operands for t in s.tensors()]


def _trains_alike(rank: int, device: str) -> None:
    for recipe in RECIPES:
        for way in WAYS:
            how = How(recipe, device=device, **way)
            _same(replace(how, weights=None), how)


def _stored_weights_train_alike(rank: int, device: str) -> None:
    for recipe in RECIPES:
        how = How(recipe, weights="quantized", ranks=2, device=device, optimizer=_fused_masters)
        _same(how, replace(how, reshard=False))
        _same(how, replace(how, checkpoint=True))


def _compiled(rank: int, device: str) -> None:
    """No parameter is a vector: two graphs of Inductor may sum the gradient of such a one in two orders."""
    for way in ({"mixed": True}, {"checkpoint": True}):
        for recipe in ("fp8-current", "nvfp4"):
            how = How(recipe, compile=True, device=device, vectors=False, **way)
            _same(replace(how, weights=None), how)


# ---------------------------------------------------------------------------------- recorded in a CUDA graph


def _recorded(rank: int, device: str) -> None:
    """A whole step, gathers and optimizer with it, as docs/sharding.md records it."""
    optimizer = partial(AdamW, lr=1e-2, fused=True, capturable=True)
    ways: list[dict[str, Any]] = [{"bf16": True, "recipe": "fp8-current"}]  # each shard is measured by itself
    for recipe in ("fp8-current", "fp8-delayed", "mxfp8", "nvfp4"):
        ways += [{"mixed": True, "recipe": recipe, "compile": compiled} for compiled in (False, True)]
    for way in ways:
        for weights in (None, "high_precision"):
            how = How(weights=weights, vectors=False, device=device, optimizer=optimizer, **way)
            expected, ours = _steps(how, record=False), _steps(how, record=True)
            for number, (a, b) in enumerate(zip(ours, expected, strict=True)):
                assert torch.equal(a, b), (how, number)
            assert len({float(loss) for loss in expected[:STEPS]}) == STEPS  # else a graph could repeat itself


STEPS, BEFORE = 6, 3


def _steps(how: How, record: bool) -> list[torch.Tensor]:
    """The losses of some steps, each on data of its own, and the weights then; ``record``: all but the first ones are
    replays."""
    torch.compiler.reset()
    torch.manual_seed(0)
    net = built(how)
    optimizer, x = optimizer_for(how, net), batch(0, how)

    def one() -> torch.Tensor:
        loss = (net(x) - x.roll(1, 0)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run, losses = one, []
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    for number in range(STEPS):
        x.copy_(batch(number, how))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            losses.append(run().clone())
        torch.cuda.current_stream().wait_stream(stream)
        if record and number == BEFORE - 1:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                loss = one()

            def run(loss: torch.Tensor = loss) -> torch.Tensor:
                graph.replay()
                return loss

    torch.cuda.synchronize()
    return [*losses, *(whole(parameter.detach()) for parameter in net.parameters())]


# ---------------------------------------------------------------------------------- as unsharded

STORED = [
    "fp8-current", "fp8-block", "mxfp8", W8.format("fp8(scaling=row)"), W8.format("nvfp4(block=16x16)"),
    W8.format("hybrid(row=nvfp4, col=mxfp8)"), W8.format("hybrid(row=fp8, col=nvfp4, col_source=row)"),
]  # fmt: skip


def _stored_as_unsharded(rank: int, device: str) -> None:
    """The bytes that are stored and gathered: of given gradients, before any forward, and of the model's own."""
    for recipe in STORED:
        for optimizer in (_fused_masters, _foreach):
            about = (recipe, optimizer.__name__)
            how = How(recipe, weights="quantized", ranks=2, device=device, optimizer=optimizer)
            ours, theirs = built(how), built(replace(how, shard=False))
            optimizers = [optimizer(net.parameters()) for net in (ours, theirs)]
            _step_together(ours, theirs, optimizers)
            same_parts(ours, theirs, ("given gradients", *about))
            _gathers_the_bytes_of(ours, theirs, how, about)
            for number in range(3):
                step(ours, optimizers[0], number, how)
                step(theirs, optimizers[1], number, replace(how, shard=False))
                same_parts(ours, theirs, (number, *about))
            _gathers_the_bytes_of(ours, theirs, how, about)


def _step_together(ours: nn.Module, theirs: nn.Module, optimizers: list[Optimizer]) -> None:
    before = [copy_bytes(weight) for weight in _values(theirs)]
    for net, optimizer in zip((ours, theirs), optimizers, strict=True):
        for _ in range(2):
            give_gradients(net)
            optimizer.step()
        optimizer.zero_grad()
    assert not any(torch.equal(a, copy_bytes(b)) for a, b in zip(before, _values(theirs), strict=True))


def _values(net: nn.Module) -> list[torch.Tensor]:
    found = [p.detach() for p in net.parameters()]
    return [p.dequantize() if isinstance(p, lpq.QuantizedTensor) else p for p in found]


def _gathers_the_bytes_of(ours: nn.Module, theirs: nn.Module, how: How, about: Any) -> None:
    found = gathered(ours, batch(9, how))
    ours.zero_grad()
    layers = {name: m for name, m in theirs.named_modules() if isinstance(m, lpq.nn.Linear)}
    assert found.keys() == {(name, when) for name in layers for when in ("forward", "backward")}
    for (name, when), buffers in found.items():
        weight = layers[name].weight.detach()
        assert isinstance(weight, lpq.QuantizedTensor)
        operand = weight.operand("row" if when == "forward" else "col")
        assert equal_states(buffers, {n: copy_bytes(b) for n, b in operand.buffers().items()}), (name, when, about)


# ---------------------------------------------------------------------------------- what it sends

SENT = ["fp8-current", "fp8-delayed", "mxfp8", "nvfp4", W8.format("hybrid(row=mxfp8, col=nvfp4)")]


def _bytes_and_reductions(rank: int, device: str) -> None:
    every_collective_of_a_step(rank, SENT, device)


# ---------------------------------------------------------------------------------- that the host does not wait


def _the_host_does_not_wait(rank: int, device: str) -> None:
    """Where synchronisation is an error, a step is taken as ever."""
    stored: list[Any] = [(recipe, "quantized", _fused_masters) for recipe in ("fp8-current", "mxfp8")]
    for recipe, weights, optimizer in [*((recipe, "high_precision", _plain) for recipe in RECIPES), *stored]:
        for way in ({"mixed": True}, {"checkpoint": True}, {"reshard": False}):
            how = How(recipe, weights=weights, device=device, optimizer=optimizer, **way)
            net = built(how)
            steps = optimizer(net.parameters())
            for number in range(2):  # what is compiled or looked up once
                step(net, steps, number, how)
            x = batch(2, how)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                (net(x) - x).float().square().mean().backward()
                steps.step()
                steps.zero_grad()
                with pytest.raises(RuntimeError, match="synchroniz"):  # were the host to wait, it would be seen
                    x.sum().item()
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "check",
    [
        _trains_alike, _stored_weights_train_alike, _compiled, _recorded, _stored_as_unsharded, _bytes_and_reductions,
        _the_host_does_not_wait,
    ],
)  # fmt: skip
def test_two_gpus(check: Any) -> None:
    spawn(check, 2, "cuda", backend=BACKEND)


# ---------------------------------------------------------------------------------- a rank that raises

PLACES = ("forward", "backward", "the reduction of masters")
START = 100
"""Seconds in which processes begin, with others beside them."""
TIMEOUT = 5
"""Seconds, of the process group, once the ranks work together."""
PATIENCE = 90
"""Seconds more for the watchdog of NCCL to look, and to end the process: it was seen to wait 60 in between."""


def _unlucky(rank: int, place: str, folder: str, device: str, backend: str) -> None:
    """Rank 1 raises in its second step, and lives on without a word."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # a record for debugging, for which it would wait longer still
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    weights, work, spoil = MISHAPS[place]
    mesh = DeviceMesh.from_group(dist.group.WORLD, device)
    how = How("fp8-current", weights=weights, width=64, inner=64, device=device, mesh=mesh)
    net = built(how)
    optimizer: Optimizer = AdamW(net.parameters())
    run = Run(how, net, MasterWeights(optimizer) if weights == "quantized" else optimizer, Path(folder))
    run.step()
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT))
    if rank == 1:
        spoil(run, pytest.MonkeyPatch())
    (Path(folder) / f"begun{rank}").write_text(str(time.monotonic()))
    try:
        work(run)
        if device == "cuda":
            torch.cuda.synchronize()
    except Mishap:
        (Path(folder) / f"raised{rank}").touch()
        time.sleep(600)  # until it is killed
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _lost(folder: Path, device: str, backend: str) -> None:
    """All places at once, each with a pair of processes of its own."""
    context = multiprocessing.get_context("spawn")
    pairs = {}
    for number, place in enumerate(PLACES):
        own = folder / str(number)
        own.mkdir()
        pairs[place] = (
            own,
            [context.Process(target=_unlucky, args=(rank, place, str(own), device, backend)) for rank in range(2)],
        )
    processes = [process for _, pair in pairs.values() for process in pair]
    for process in processes:
        process.start()
    ended: dict[str, float] = {}
    deadline = time.monotonic() + START
    while len(ended) < len(pairs) and time.monotonic() < deadline:
        begun = [float(file.read_text() or "inf") for own, _ in pairs.values() for file in own.glob("begun0")]
        if len(begun) == len(pairs):  # the patience of each counts from its own begin
            deadline = max(begun) + TIMEOUT + PATIENCE
        for place, (_, pair) in pairs.items():
            if pair[0].exitcode is not None:
                ended.setdefault(place, time.monotonic())
        time.sleep(0.1)
    codes = {place: [process.exitcode for process in pair] for place, (_, pair) in pairs.items()}
    for process in processes:
        process.kill()
    for place, (own, _) in pairs.items():
        assert (own / "raised1").exists(), (place, codes)
        assert not (own / "raised0").exists(), place
        assert codes[place][0] not in (0, None), f"{place}: {codes[place][0]}: the other waits, or thinks all is well"
        assert codes[place][1] is None, f"{place}: the rank that raised ended, too"
        took = ended[place] - float((own / "begun0").read_text())
        print(place, codes[place][0], f"{took:.1f} s")
        assert TIMEOUT / 2 < took < TIMEOUT + PATIENCE, (place, took)


def test_a_rank_that_raises_ends_the_other(tmp_path: Path) -> None:
    _lost(tmp_path, "cuda", "nccl")
