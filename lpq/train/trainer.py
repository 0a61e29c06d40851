"""One model on its way through the steps. All that its future depends on is in ``state``.

Parameters and optimizer are fp32 and the model runs under bf16 autocast, with or without a policy: a layer
that ``lpq.convert`` leaves alone multiplies in bf16 as PyTorch does. There is no autocast on a processor that
lacks bf16 instructions, where PyTorch is twenty times slower in bf16 than in fp32; see ``machine.fast_bf16``.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lpq
from lpq.train.config import TrainConfig
from lpq.train.data import Text
from lpq.train.errors import CheckpointError, TrainError
from lpq.train.machine import fast_bf16
from lpq.train.measure import held_for_backward
from lpq.train.model import GPT, Shape

if TYPE_CHECKING:
    from lpq.recipes import Policy

HELD_OUT_BATCHES = 16
"""How many batches of the held-out text the final loss is the mean of."""


class Trainer:
    """A model, its optimizer and where they are; without a policy the model stays plain PyTorch."""

    def __init__(self, config: TrainConfig, text: Text, policy: Policy | None, device: torch.device) -> None:
        self.config, self.text, self.policy, self.device = config, text, policy, device
        self.step = 0
        """Steps done."""
        self.losses: list[float] = []
        """The training loss of each step done."""
        self.bytes_held = 0
        """What the first step held for backward."""
        torch.manual_seed(config.seed)
        model = GPT(Shape(config.layers, config.heads, config.width)).to(device)
        if policy is not None:
            lpq.convert(model, policy, steps=config.steps)
        if config.compile:
            model.compile()  # in place: the names in the state dict stay
        self.model = model
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(0.9, 0.95),
            fused=True,
        )

    def advance(self) -> dict[str, float]:
        """Do one step; return what there is to tell of it."""
        began = time.perf_counter()
        if self.policy is not None:
            lpq.set_step(self.model, self.step)
        lr = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        tokens, targets = self.text.batch(self.config.seed, self.step, self.config.batch, self.config.seq)
        with held_for_backward(self.model) if self.step == 0 else nullcontext() as held:
            loss = self.loss(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
        if held is not None:
            self.bytes_held = held.bytes
        if not (math.isfinite(value := loss.item()) and math.isfinite(norm)):
            raise TrainError(
                f"step {self.step} has a loss of {value} and a gradient norm of {norm}: training diverged. A lower "
                "--lr may train, or a recipe with more bits in the gradients; the checkpoints from before are kept"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(value)
        self.step += 1
        seconds = time.perf_counter() - began
        return {"step": self.step, "loss": value, "lr": lr, "grad_norm": norm, "seconds": seconds}

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy in nats per byte."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=fast_bf16(self.device)):
            logits = self.model(tokens.to(self.device))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.to(self.device).flatten())

    def learning_rate(self) -> float:
        """Of the next step: a linear warm-up, then half a cosine down to a tenth."""
        warm = max(1, self.config.steps // 20)
        if self.step < warm:
            return self.config.lr * (self.step + 1) / warm
        done = (self.step - warm) / max(1, self.config.steps - warm)
        return self.config.lr * (0.55 + 0.45 * math.cos(math.pi * done))

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The loss on text that the model never trained on."""
        self.model.eval()
        batches = (self.text.held_out_batch(i, self.config.batch, self.config.seq) for i in range(HELD_OUT_BATCHES))
        mean = sum(self.loss(*batch).item() for batch in batches) / HELD_OUT_BATCHES
        self.model.train()
        return mean

    def state(self) -> dict[str, Any]:
        """Everything that the steps to come depend on."""
        on_gpu = self.device.type == "cuda"
        return {
            "step": self.step,
            "losses": self.losses,
            "bytes_held": self.bytes_held,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": {
                "cpu": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state(self.device) if on_gpu else None,
            },
            "text": self.text.digest,
            "policy": self.policy_text,
            "config": self.config.to_toml(),
        }

    @property
    def policy_text(self) -> str:
        """The policy as TOML; empty without one."""
        return self.policy.to_toml() if self.policy is not None else ""

    def restore(self, state: dict[str, Any]) -> None:
        """Become what ``state`` was taken from."""
        if state["text"] != self.text.digest:
            raise CheckpointError(
                f"the text ({self.text.source}) has changed since the checkpoint was written, so the run "
                "cannot go on with the same batches: restore the text, or start a new run"
            )
        if state["policy"] != self.policy_text:
            raise CheckpointError(
                "the policy has changed since the checkpoint was written: restore it, or start a new run. "
                f"The checkpoint's is:\n{state['policy']}"
            )
        if self.policy is not None and state["step"]:
            lpq.set_step(self.model, state["step"] - 1)  # the recipes, and so the buffers, of the last step done
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses, self.bytes_held = state["step"], list(state["losses"]), state["bytes_held"]
        torch.set_rng_state(state["rng"]["cpu"])
        if self.device.type == "cuda" and state["rng"]["cuda"] is not None:
            torch.cuda.set_rng_state(state["rng"]["cuda"], self.device)
