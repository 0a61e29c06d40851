"""A training that is recorded in CUDA graphs computes the bits of one that is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpq
from lpq.train import data, loop
from lpq.train.config import TrainConfig
from lpq.train.machine import fixed_sums
from lpq.train.recorded import Recorded
from lpq.train.team import Team
from lpq.train.trainer import Trainer

STEPS = 20
"""Enough that some are replayed after the last change of recipes, at step 17."""
RECIPES = ["fp8-current", "fp8-delayed", "nvfp4", "nvfp4-late-switch", "nvfp4-pretrain", "nvfp4-last-blocks"]


def trained(recipe: str | None, *, record: bool, **options: Any) -> tuple[Trainer, list[Any]]:
    device = torch.device("cuda", 0)
    shape: dict[str, Any] = {"layers": 2, "heads": 2, "width": 128, "seq": 64, "batch": 4, "steps": STEPS, "text": 1}
    config = TrainConfig(policy=recipe, record=record, **shape, **options)
    policy = None if recipe is None else loop.policy_of(config)
    text = data.load(config.data, config.seq, config.text)
    with fixed_sums(device, config.threads):
        trainer = Trainer(config, text, policy, Team(device=device), probes=False)
        records = [trainer.advance() for _ in range(STEPS)]
        records.append({"held out": trainer.held_out_loss()})
    for one in records:
        one.pop("seconds", None)
    return trainer, records


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_the_bits_are_those_of_a_training_that_is_not_recorded(recipe: str | None) -> None:
    plain, expected = trained(recipe, record=False)
    recorded, got = trained(recipe, record=True)
    assert got == expected
    theirs = plain.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in recorded.model.state_dict().items())
    assert isinstance(recorded._run, Recorded)
    assert recorded._run._graph is not None  # and so the last steps were replays
    assert not isinstance(plain._run, Recorded)


def test_recipes_that_change_are_recorded_anew() -> None:
    trainer, _ = trained("nvfp4-late-switch", record=True)
    assert isinstance(trainer._run, Recorded)
    assert trainer._run._recipes == [layer.recipe for layer in trainer._run._layers]
    trainer.step = 0
    graph = trainer._run._graph
    trainer.advance()
    assert trainer._run._graph is not graph


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.q(x) * self.k(x) + self.v(x).sigmoid()
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.part = nn.RMSNorm(256), Part()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.part(self.norm(x))
        return y


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed"])
def test_a_compiled_part_behind_a_fused_norm_is_recorded(recipe: str) -> None:
    """Nothing in a step waits for the host."""
    x, dy = (torch.randn(128, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = []
    for record in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        block = lpq.convert(Block().to("cuda", torch.bfloat16), recipe, fuse=True)
        block.part.compile(fullgraph=True)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                block.zero_grad()
                block(x).backward(dy)
            block.zero_grad()
            if not record:
                y = block(x)
                y.backward(dy)
        torch.cuda.current_stream().wait_stream(stream)
        if record:
            with torch.cuda.graph(graph, stream=stream):
                y = block(x)
                y.backward(dy)
            graph.replay()
        grads = [p.grad for p in block.parameters()]
        found.append([t.clone() for t in (y.detach(), *grads, *block.state_dict().values()) if t is not None])
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


def test_a_compiled_training_is_recorded_too() -> None:
    _, expected = trained("fp8-current", record=False, compile=True)
    torch.compiler.reset()
    _, got = trained("fp8-current", record=True, compile=True)
    assert got == expected
