"""Hugging Face's transformers: a callback for its Trainer; ``attach``, for saving weights that are stored quantized.

``LpqCallback`` sets a model to the step of the Trainer, and gives it the number of steps, so that a policy's rules end
where they should. It keeps the policy in the Trainer's checkpoints (``trainer_state.json``), and refuses to go on under
another one. transformers is imported when ``LpqCallback`` or ``attach`` is first used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lpq.checkpoint.errors import CheckpointError, CheckpointWarning
from lpq.engines.config_files import read_json
from lpq.files.disk import place
from lpq.integrations.decoded import attach
from lpq.integrations.going_on import CALLBACK as NAME
from lpq.integrations.going_on import begins_afresh, go_on, policy_of, warn_of_uncalled, would_forget
from lpq.nn import set_step
from lpq.nn.first_argument import check_flags, check_model
from lpq.optim import MasterWeights
from lpq.optim.unwrap import unwrapped
from lpq.registry.showing import listed
from lpq.registry.warning import warn
from lpq.tensor import QuantizedTensor
from lpq.torch_private.tensors import local_part

__all__ = ["LpqCallback", "attach", "resume"]

if TYPE_CHECKING:
    LpqCallback: type[Any]


class _Steps:
    """The callback, without the base classes that the Trainer requires."""

    def __init__(self, *, any_policy: bool = False) -> None:
        """``any_policy``: go on from a checkpoint of another policy, under the model's own."""
        check_flags(NAME, any_policy=any_policy)
        self.any_policy = any_policy
        self.policy: dict[str, Any] | None = None
        self._model: nn.Module | None = None
        self._first = True
        """Whether no step of this run has ended yet."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **others: Any) -> None:
        """Plan the policy for the Trainer's number of steps, and compare it with the checkpoint's."""
        self._model, self._first = attach(model), True
        record = state.stateful_callbacks.get(NAME) if state.global_step else None
        _go_on(model, state.global_step, state.max_steps, record, self.any_policy)
        if state.global_step:
            _encode_again(model, others.get("optimizer"))
            if lost := begins_afresh(model, state.global_step):
                warn(
                    f"the checkpoint has no states of these layers, so they begin afresh: {listed(lost)}. Adapters are "
                    "saved without the base, and its states. A recipe that remembers nothing goes on bit for bit",
                    CheckpointWarning,
                )
        state.stateful_callbacks.setdefault(NAME, self.state())  # absent if the checkpoint was saved without it

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Give each layer its recipe at this step."""
        set_step(model, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Warn after the first step of layers that the model multiplies past."""
        if self._first:
            warn_of_uncalled(model)
        self._first = False

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Give the best model, if it was loaded, the recipes under which it was the best."""
        if not (args.load_best_model_at_end and state.best_global_step):
            return
        if lost := would_forget(model, state.best_global_step - 1):
            warn(
                f"states of layers are not from the best model, which had other recipes: {listed(lost)}. "
                f"lpq.integrations.transformers.resume(model, {state.best_model_checkpoint!r}), and load it again",
                CheckpointWarning,
            )
        set_step(model, state.best_global_step - 1)

    def state(self) -> dict[str, Any]:
        """The state that the Trainer keeps in its checkpoint."""
        if self._model is not None:
            self.policy = policy_of(self._model)
        return {"args": {"any_policy": self.any_policy}, "attributes": {"policy": self.policy}}


def resume(model: nn.Module, checkpoint: str | Path, *, any_policy: bool = False) -> None:
    """Bring the converted model to the step of a Trainer's checkpoint, before that is loaded.

    The step decides the recipe, and the recipe decides which states of the checkpoint layers take. So where a policy
    gives delayed scaling at that step and not at step 0, call it before
    ``trainer.train(resume_from_checkpoint=checkpoint)``.

    Args:
        model: The converted model.
        checkpoint: The directory of the checkpoint.
        any_policy: Let the model have another policy than the checkpoint.
    """
    check_model(model)
    check_flags("resume", CheckpointError, any_policy=any_policy)
    path = place(checkpoint, "checkpoint") / "trainer_state.json"
    if not path.is_file():
        raise CheckpointError(f"{checkpoint} is no checkpoint of a Trainer: there is no {path.name} in it")
    state = read_json(path)
    _go_on(model, 0, state["max_steps"], state["stateful_callbacks"].get(NAME), any_policy)
    set_step(model, state["global_step"])


def _go_on(model: nn.Module, step: int, steps: int, record: Any, any_policy: bool) -> None:
    """Plan the policy for ``steps`` steps, and compare it with the state that the Trainer kept of the callback."""
    record = record[0] if isinstance(record, list) else record
    policy = None if record is None else record["attributes"]["policy"] or {}
    remedy = (
        "Call lpq.integrations.transformers.resume(model, checkpoint) before trainer.train(resume_from_checkpoint=…)"
    )
    go_on(model, step, steps, policy, any_policy=any_policy, remedy=remedy)


def _encode_again(model: nn.Module, optimizer: Any) -> None:
    """Restore weights that are stored quantized: they were loaded from what one of their operands decodes to."""
    masters = unwrapped(optimizer) if optimizer is not None else None
    if isinstance(masters, MasterWeights) and masters.keep:
        masters.encode()
    elif any(isinstance(w, QuantizedTensor) and w.write_count for w in map(local_part, model.parameters())):
        warn(
            "the Trainer saves weights that are stored quantized as decoded values, and encoding these again may give "
            "other bits. With lpq.optim.MasterWeights a run goes on bit for bit, and with lpq.checkpoint",
            CheckpointWarning,
        )


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers.trainer_callback import ExportableState, TrainerCallback

    cls = type(NAME, (_Steps, TrainerCallback, ExportableState), {"__module__": __name__, "__doc__": _Steps.__doc__})
    globals()[name] = cls
    return cls
