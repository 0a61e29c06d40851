"""One model in training. Its checkpoints hold everything on which the next steps depend.

Parameters and optimizer are fp32 and the model runs under bf16 autocast, with or without a policy: a layer that
``lpq.convert`` leaves alone multiplies in bf16 as PyTorch does. There is no autocast on a processor that lacks bf16
instructions, where PyTorch is twenty times slower in bf16 than in fp32; see ``machine.fast_bf16``. Started by torchrun,
the model is sharded, each rank takes its share of a batch, and losses are means over all ranks.
"""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lpq
from lpq import checkpoint
from lpq.checkpoint import CheckpointError
from lpq.nn.sharded_weights import Weights
from lpq.nn.stateful_layer import stateful_layers
from lpq.nn.stepping import promote
from lpq.observe import Numerics
from lpq.observe.replay import Before
from lpq.observe.trigger import Trigger
from lpq.optim import MasterWeights, load_high_precision
from lpq.recipes import Policy
from lpq.train.config import TrainConfig
from lpq.train.data import Text
from lpq.train.errors import GOES_ON, Diverged
from lpq.train.machine import fast_bf16
from lpq.train.measure import Probe, StepBytes
from lpq.train.model import GPT, GPTShape
from lpq.train.recorded import Passes, Recorded
from lpq.train.team import Team

HELD_OUT_BATCHES = 16
"""The number of batches of held-out text whose mean is the final loss."""
DIVERGED = (
    "training diverged. A lower --lr may train, or a recipe with more bits in the gradients; checkpoints from before "
    "are kept"
)
DECAY = 0.2
"""The part of a run in which the learning rate of ``wsd`` decays."""
BESIDE = {"losses", "measured", "rng", "text", "policy", "config"}
"""The values that a run needs beside its tensors."""
KEEP = 2
"""How many checkpoints stay: the newest, and one in case the newest is damaged."""


class Trainer:
    """A model, its optimizer and where they are; without a policy the model stays plain PyTorch."""

    def __init__(
        self, config: TrainConfig, text: Text, policy: Policy | None, team: Team, *, probes: bool = True
    ) -> None:
        """``probes``: whether the first step is measured, for which a compiled one is compiled apart."""
        self.config, self.text, self.policy = config, text, policy
        self.team, self.device, self.probes = team, team.device, probes
        self.step = 0
        """Steps done."""
        self.losses: list[float] = []
        """The training loss of each step done."""
        self.measured: StepBytes | None = None
        """The bytes that the first step held and sent."""
        self.watch: Numerics | None = None
        replays = policy is not None and (config.replay or config.promote > 0)
        self.trigger = Trigger(promote=config.promote) if replays else None
        self.findings: str | None = None
        """The findings of a replay of the last step, in words."""
        torch.manual_seed(config.seed)
        self.model = GPT(GPTShape(config.layers, config.heads, config.width)).to(self.device)
        stored = policy is not None and config.weights == "quantized"
        initial = {name: value.clone() for name, value in self.model.state_dict().items()} if stored else {}
        self._prepare()
        recorded = Recorded(self.model, self._passes, self.device) if config.record else None
        self._run: Passes = recorded or self._passes
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(0.9, 0.95),
            fused=True,
        )
        if stored:
            self.optimizer = MasterWeights(self.optimizer)
            load_high_precision(self.model, initial, self.optimizer)

    def _prepare(self) -> None:
        """Convert, compile and shard the model, in this order; it is the same on every rank."""
        config, team, model = self.config, self.team, self.model
        if self.policy is not None:
            stored = config.weights == "quantized"
            weights: Weights | None = "quantized" if stored else "high_precision" if team.many else None
            ranks = team.size if weights is not None else None
            lpq.convert(model, self.policy, steps=config.steps, weights=weights, ranks=ranks)
        if config.compile:  # in place: the names in the state dict stay
            for block in model.blocks:
                block.compile()
        if team.many:
            team.shard(model)
            self._seed()

    def _seed(self) -> None:
        """Have each rank round with random bits of its own."""
        torch.manual_seed(random.Random(f"{self.config.seed}/{self.step}/{self.team.rank}").getrandbits(63))

    def begin_watch(self) -> Numerics | None:
        """Watch the numerics of the steps from here on, if the run is to, by the numbers that their records have."""
        if self.config.watch and self.policy is not None:
            other = self.config.what_if or None
            self.watch = lpq.observe.numerics(self.model, every=self.config.watch, step=self.step + 1, what_if=other)
        return self.watch

    def advance(self) -> dict[str, Any]:
        """Do one step; return its record, such as the loss. A step that is not finite is done again where a replay
        promoted the layers that did it."""
        began = time.perf_counter()
        if self.policy is not None:
            lpq.set_step(self.model, self.step)
        lr = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch = self.text.batch(self.config.seed, self.step, self.config.batch, self.config.seq)
        first = self.measured is None or self.measured.ranks != self.team.size
        probe = Probe(self.model, self.optimizer, self.team) if first and self.probes else None
        before = Before(self.model) if self.trigger is not None else None
        with self.watch.step() if self.watch is not None else nullcontext():
            value, norm = self._gradients(batch, probe)
        promoted = self._look(batch, value, norm, before)
        if promoted and self.trigger and before and not (math.isfinite(value) and math.isfinite(norm)):
            before.restore()
            self.optimizer.zero_grad()
            lpq.set_step(self.model, self.step)
            value, norm = self.trigger.done_again(*self._gradients(batch, None))
        if not (math.isfinite(value) and math.isfinite(norm)):
            findings = f"\n{self.findings}" if self.findings else ""
            raise Diverged(
                f"step {self.step + 1} has a loss of {value} and a gradient norm of {norm}: {DIVERGED}{findings}"
            )
        self.optimizer.step()
        if probe is not None:
            self.measured = probe.measured()
        self.optimizer.zero_grad()
        self.losses.append(value)
        self.step += 1
        seconds = time.perf_counter() - began
        record = {"step": self.step, "loss": value, "lr": lr, "grad_norm": norm, "seconds": seconds}
        return record if self.findings is None else {**record, "replay": self.findings}

    def _gradients(self, batch: tuple[Tensor, Tensor], probe: Probe | None) -> tuple[float, float]:
        """Run forward and backward and clip the gradients; return the loss and the norm that they had, of all ranks."""
        loss, total = self._run(*batch) if probe is None else self._passes(*batch, probe)
        norm = (total.full_tensor() if isinstance(total, DTensor) else total).item()
        return self.team.mean(loss), norm

    def _passes(self, tokens: Tensor, targets: Tensor, probe: Probe | None = None) -> tuple[Tensor, Tensor]:
        with probe.forward() if probe is not None else nullcontext():
            loss = self.loss(tokens, targets)
        with probe.backward() if probe is not None else nullcontext():
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)

    def _look(self, batch: tuple[Tensor, Tensor], loss: float, norm: float, before: Before | None) -> bool:
        """Replay the step if it leaves the course of the run; return whether that promoted layers."""
        self.findings = None
        if self.trigger is None:
            return False

        def closure() -> Tensor:
            again = self.loss(*batch)
            again.backward()  # type: ignore[no-untyped-call]
            return again

        promotions = len(self.trigger.promoted)
        self.findings = self.trigger.look(self.model, self.step, loss, norm, closure, before)
        return len(self.trigger.promoted) > promotions

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy, in nats per byte, of this rank's share of a batch."""
        return loss_of(self.model, *(self.team.share(t).to(self.device) for t in (tokens, targets)))

    def learning_rate(self) -> float:
        """The learning rate of the next step: a linear warm-up, then a decay to a tenth.

        It decays by half a cosine over all of the rest or, with ``wsd``, linearly over the last fifth.
        """
        config = self.config
        warm = max(1, int(config.steps * config.warmup))
        if self.step < warm:
            return config.lr * (self.step + 1) / warm
        if config.schedule == "wsd":
            last = config.steps * DECAY
            return config.lr * (1 - 0.9 * max(0.0, 1 - (config.steps - self.step) / last))
        part = (self.step - warm) / max(1, config.steps - warm)
        return config.lr * (0.55 + 0.45 * math.cos(math.pi * part))

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The loss on text that the model never trained on."""
        self.model.eval()
        eager = torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext()
        batches = (self.text.held_out_batch(i, self.config.batch, self.config.seq) for i in range(HELD_OUT_BATCHES))
        with eager:  # a graph for evaluation alone would take longer to compile than to run
            mean = sum(self.team.mean(self.loss(*batch)) for batch in batches) / HELD_OUT_BATCHES
        self.model.train()
        if not math.isfinite(mean):
            raise Diverged(f"after step {self.step} the loss on held-out text is {mean}: {DIVERGED}")
        return mean

    # ------------------------------------------------------------------------------ checkpoints

    def save(self, directory: Path) -> int:
        """Write a checkpoint, all ranks together; return its step."""
        on_gpu = self.device.type == "cuda"
        rng = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(self.device) if on_gpu else None}
        beside: dict[str, Any] = {
            "losses": self.losses,
            "measured": asdict(self.measured) if self.measured is not None else None,
            "rng": [*self.team.exchange(rng).values()],
            "text": self.text.digest,
            "policy": self.policy_text,
            "config": self.config.to_toml(),
        }
        if self.trigger is not None:
            beside |= {"course": self.trigger.course.state_dict(), "promoted": self.trigger.promoted}
        try:
            checkpoint.save(self.model, directory, self.optimizer, step=self.step, extra=beside, keep=KEEP)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {GOES_ON}") from error
        return self.step

    @property
    def policy_text(self) -> str:
        """The policy as TOML; empty without one."""
        return self.policy.to_toml() if self.policy is not None else ""

    def resume(self, directory: Path, say: Callable[[str], None]) -> bool:
        """Take the state of the newest whole checkpoint; return False where there never was one.

        ``say`` is called with a message about every newer one that was refused. When all are refused, that is an error.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", checkpoint.CheckpointWarning)  # ``say`` gets them below
                # Rules and the course have to be of the checkpoint that is loaded.
                exact = self.trigger is not None
                beside = checkpoint.info(directory, process_group=dist.group.WORLD, thorough=exact).extra
                self._check(beside)
                self._promote_again(beside)
                info = checkpoint.load(self.model, directory, self.optimizer)
        except checkpoint.NoCheckpoint as none:
            if any(directory.glob("step-*")):
                say(str(none))
            return False
        for line in [*info.refused, *([info.why] if info.why else [])]:
            say(line)
        beside = info.extra
        self.losses = list(beside["losses"])
        self.step = len(self.losses)
        self.measured = StepBytes(**beside["measured"]) if beside["measured"] is not None else None
        if len(beside["rng"]) != self.team.size:
            self._seed()  # random bits that no rank has drawn yet
            return True
        rng = beside["rng"][self.team.rank]
        torch.set_rng_state(rng["cpu"])
        if self.device.type == "cuda" and rng["cuda"] is not None:
            torch.cuda.set_rng_state(rng["cuda"], self.device)
        return True

    def _promote_again(self, beside: Mapping[str, Any]) -> None:
        """Take the course of a run from a checkpoint, and the promotions that belong to its policy."""
        if self.trigger is None:
            return
        if "course" in beside:
            self.trigger.course.load_state_dict(beside["course"])
        layers = stateful_layers(self.model)
        for until, recipes in beside.get("promoted", ()):
            promote(self.model, {layers[name]: lpq.recipe(text) for name, text in recipes.items()}, until=until)
            self.trigger.promoted.append((until, recipes))

    def _check(self, beside: Any) -> None:
        if not isinstance(beside, dict) or not beside.keys() >= BESIDE:
            raise CheckpointError("the checkpoint was not written by lpq train: resume with what wrote it")
        if beside["text"] != self.text.digest:
            raise CheckpointError(
                f"the text ({self.text.source}) has changed since the checkpoint was written, so the run "
                "cannot go on with the same batches: restore the text, or start a new run"
            )
        if beside["policy"] != self.policy_text:
            raise CheckpointError(
                "the policy has changed since the checkpoint was written: restore it, or start a new run. "
                f"The checkpoint's is:\n{beside['policy']}"
            )


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy, in nats per byte, under bf16 autocast."""
    device = tokens.device
    with torch.autocast(device.type, torch.bfloat16, enabled=fast_bf16(device)):
        logits = model(tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
