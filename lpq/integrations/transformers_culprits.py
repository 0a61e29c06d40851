"""A callback for transformers' Trainer that finds the layer which takes a run off its course, and may promote it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lpq.nn import set_step
from lpq.nn.first_argument import check_whole
from lpq.observe import Before, Course, Culprits
from lpq.observe.culprits import check_search
from lpq.observe.readings import NumericsError
from lpq.observe.replay import gradient_norm
from lpq.observe.trigger import Trigger
from lpq.registry.warning import warn
from lpq.torch_private.autograd import at_the_end_of_backward
from lpq.torch_private.distributed import active_replica

NAME = "CulpritsCallback"
if TYPE_CHECKING:
    CulpritsCallback: type[Any]


class _Pass(NamedTuple):
    """A forward and backward of the step."""

    run: nn.Module
    """The module that was called: the model, or what adds up its gradients over replicas."""
    args: tuple[Any, ...]
    by_name: dict[str, Any]
    loss: Tensor
    share: Tensor
    """The gradient of the loss: how much it counts in the step, as a part of a batch, times the scale of fp16."""


class _Culprits:
    """Compares the loss of each step, and the norm that the gradients have before the Trainer clips them, with the
    steps before. A step that leaves this course is replayed before the optimizer steps, with a warning of the culprits;
    ``found`` has them by step. If it is not finite, it is done again with the layers that are promoted. Later steps are
    not replayed before one was on the course again. The course is kept in the Trainer's checkpoints. The host waits for
    the loss in each step."""

    def __init__(
        self, *, course: Course | None = None, promote: int = 0, most: int = 3, least: float = 0.1, replays: int = 64
    ) -> None:
        """``promote``: for how many steps the culprits are in bf16 then, by rules of the policy that ``LpqCallback``
        follows and keeps; 0: they stay. The others are as in ``lpq.observe.culprits``."""
        check_whole(NAME, 0, NumericsError, promote=promote)
        check_search(NAME, course, most=most, least=least, replays=replays)
        self._args = {"promote": promote, "most": most, "least": least, "replays": replays}
        self.has_course = self._got_course = course is not None
        """The former is the checkpoint's where the Trainer makes the callback anew."""
        self._trigger = Trigger(course, promote, most=most, least=least, replays=replays)
        self.found: dict[int, Culprits] = self._trigger.found
        self._called: tuple[Any, tuple[Any, ...], dict[str, Any]] = None, (), {}
        self._passes: list[_Pass] = []
        self._norm: Tensor | None = None
        self._before: Before | None = None
        self._hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Go on with the course of the checkpoint, and note the batches and the losses from now on."""
        record = state.stateful_callbacks.get(NAME) if state.global_step else None
        record = record[0] if isinstance(record, list) else record
        if self.has_course and not self._got_course:
            raise NumericsError(
                f"{NAME}: the run of the checkpoint had a course= of its own, which "
                "restore_callback_states_from_checkpoint=True cannot make again: leave that out, and give course= as "
                "before"
            )
        self._trigger.check(model)
        if record is not None:
            self._trigger.course.load_state_dict(record["attributes"]["saved_course"])
        state.stateful_callbacks.setdefault(NAME, self.state())  # absent if the checkpoint was saved without it
        self._hooks = [
            model.register_forward_pre_hook(self._note, with_kwargs=True), model.register_forward_hook(self._take)
        ]  # fmt: skip

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def state(self) -> dict[str, Any]:
        """The state that the Trainer keeps in its checkpoint."""
        attributes = {"saved_course": self._trigger.course.state_dict(), "has_course": self.has_course}
        return {"args": self._args, "attributes": attributes}

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Note what the step depends on."""
        self._passes, self._norm, self._before = [], None, Before(model)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: nn.Module, optimizer: Any = None, **_: Any
    ) -> None:
        """Replay the step if it leaves the course."""
        passes, self._passes, before, self._before = self._passes, [], self._before, None  # no hook notes replays
        if before is None:
            return
        if self._norm is None:
            raise NumericsError(
                f"{NAME}: no backward of step {state.global_step} came from a loss that the model returned, as where "
                "the Trainer computes the loss itself: have the model return the loss that is trained, as its first "
                "output or by the name `loss`, or call lpq.observe.culprits in a loop of your own"
            )
        scaler = getattr(optimizer, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()

        def closure() -> Tensor:
            losses = []
            for number, one in enumerate(passes, 1):
                alone = getattr(one.run, "no_sync", nullcontext) if number < len(passes) else nullcontext
                with alone():
                    loss = _loss(one.run(*one.args, **one.by_name))
                    loss.backward(one.share / scale)
                losses.append(loss.detach() * one.share / scale)
            return torch.stack(losses).sum()

        loss = _mean(torch.stack([one.loss * one.share / scale for one in passes]).sum())
        norm, promotions = _mean(self._norm / scale), len(self._trigger.promoted)
        if words := self._trigger.look(passes[0].run, state.global_step, loss, norm, closure, before):
            warn(words)
        lost = scaler is None and not (math.isfinite(loss) and math.isfinite(norm))  # a scaler leaves such a step out
        if lost and len(self._trigger.promoted) > promotions:
            before.restore()
            model.zero_grad()
            set_step(model, state.global_step)
            again, own = _mean(closure()), gradient_norm(model)
            self._trigger.done_again(again, _mean(own))
            if most := args.max_grad_norm:
                nn.utils.clip_grads_with_norm_(model.parameters(), most, own, foreach=False)  # of several meshes

    def _note(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._before is not None and model.training:
            self._called = active_replica() or model, args, dict(kwargs)

    def _take(self, model: nn.Module, args: Any, output: Any) -> None:
        """Have the backward of this loss note the pass and, when it ends, the norm of what was added up so far."""
        if self._before is None or not model.training:
            return
        loss, called = _loss(output), self._called
        if not (isinstance(loss, Tensor) and loss.requires_grad):
            return
        value = loss.detach()

        def measure() -> None:
            self._norm = gradient_norm(model)

        def note(share: Tensor) -> None:
            self._passes.append(_Pass(*called, value, share.detach()))
            # Behind what FSDP2 and DistributedDataParallel do when it ends, which they ask for later in this backward.
            at_the_end_of_backward(lambda: at_the_end_of_backward(measure))

        loss.register_hook(note)  # type: ignore[no-untyped-call]


def _loss(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else output[0]


def _mean(value: Tensor) -> float:
    """The mean over all ranks, so that they decide alike."""
    value = value.detach().clone().float()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return float(value)


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers.trainer_callback import ExportableState, TrainerCallback

    cls = type(
        NAME, (_Culprits, TrainerCallback, ExportableState), {"__module__": __name__, "__doc__": _Culprits.__doc__}
    )
    globals()[name] = cls
    return cls
