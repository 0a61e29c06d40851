"""Lightning, imported when it is used: a precision plugin that converts the model, and a callback for its Trainer."""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lpq
from lpq.integrations.going_on import CALLBACK, go_on, policy_of, warn_of_uncalled
from lpq.nn import set_step
from lpq.nn.first_argument import check_flags
from lpq.observe import Numerics, numerics

__all__ = ["LpqCallback", "LpqPrecision"]

if TYPE_CHECKING:
    LpqCallback: type[Any]
    LpqPrecision: type[Any]
DELEGATED = ("tensor_init_context", "module_init_context", "forward_context", "convert_input", "convert_output")
KEY = "lpq_policy"
"""The key of the policy in a checkpoint of Lightning."""


class _Precision:
    """Converts the module by a policy, beside what one of Lightning's own precisions does."""

    def __init__(self, policy: Any, *, precision: str = "32-true", device: str = "cuda", **options: Any) -> None:
        """``precision``: Lightning's for parameters, inputs and what is not converted: ``32-true``, ``bf16-true`` or
        ``bf16-mixed``, which is autocast on a type of ``device``. ``options`` go to ``lpq.convert``."""
        from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision

        own: dict[str, Any] = {
            "32-true": Precision,
            "bf16-true": lambda: HalfPrecision("bf16-true"),
            "bf16-mixed": lambda: MixedPrecision("bf16-mixed", device),
        }
        if precision not in own:
            raise ValueError(f"LpqPrecision: precision={precision!r} is none of {', '.join(own)}")
        self.own = own[precision]()
        self.precision, self.policy, self.options = precision, policy, options
        for name in DELEGATED:
            setattr(self, name, getattr(self.own, name))
        self._converted: nn.Module | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the module once. Call it in ``configure_model`` before ``fully_shard``."""
        if module is not self._converted:
            self._converted = lpq.convert(self.own.convert_module(module), self.policy, **self.options)
        return self._converted


class _Callback:
    """Sets a model to the step of the Trainer, keeps its policy in checkpoints, and watches ``numerics``."""

    def __init__(self, *, any_policy: bool = False, report: bool = True, watch: int = 0, **options: Any) -> None:
        """``any_policy``: go on under another policy than the checkpoint's. ``report``: print ``lpq.report``.
        ``watch``: write ``numerics.jsonl`` every ``watch`` steps; ``options`` go to ``lpq.observe.numerics``."""
        check_flags(CALLBACK, any_policy=any_policy, report=report)
        self.any_policy, self.report, self.watch, self.options = any_policy, report, watch, options
        self.numerics: Numerics | None = None
        self._folder = Path()
        """Where its statistics go."""
        self._saved_policy: dict[str, Any] | None = None
        self._step: ExitStack | None = None
        self._hook: Any = None
        self._first = True
        """Whether no batch of this run has ended yet."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have the plugin convert the model before a checkpoint is loaded, since layers load their states."""
        from lightning.pytorch.utilities.model_helpers import is_overridden

        self._saved_policy, plugin = None, trainer.precision_plugin
        if isinstance(plugin, _Precision) and not is_overridden("configure_model", pl_module):
            plugin.convert_module(pl_module)
        if not trainer.strategy.restore_checkpoint_after_setup:
            self._hook = pl_module.register_load_state_dict_pre_hook(lambda *_: self._bring(trainer, pl_module))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self._hook is None:  # what a strategy loads after this must be in the model by now
            self._bring(trainer, pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _bring(self, trainer: Any, model: nn.Module) -> None:
        """Bring the model to the step of the checkpoint that is loaded: the recipe decides which states it takes. One
        that cannot be read here is left to ``on_train_start``, which refuses to lose a state."""
        path = Path(trainer.ckpt_path or "none")
        try:
            path = path / "meta.pt" if path.is_dir() else path
            saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, UnpicklingError):
            return
        if (policy := saved.get(KEY)) is not None:
            steps = next((c["steps"] for c in policy["conversions"].values() if isinstance(c["steps"], int)), None)
            go_on(model, 0, steps, policy, any_policy=self.any_policy, remedy="")
            set_step(model, saved["global_step"])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Plan the policy for the Trainer's number of steps, and compare it with the checkpoint's."""
        steps = trainer.estimated_stepping_batches if pl_module.automatic_optimization else None
        steps = steps if isinstance(steps, int) and steps > 0 else None
        remedy = "Set trainer.ckpt_path = checkpoint before trainer.fit(model), or call lpq.set_step(model, step)"
        go_on(pl_module, trainer.global_step, steps, self._saved_policy, any_policy=self.any_policy, remedy=remedy)
        if self.watch > 0:
            run = trainer.strategy.model  # the module itself, or what keeps its replicas equal
            own = {"process_group": run.process_group} if isinstance(run, DistributedDataParallel) else {}
            self.numerics = numerics(pl_module, every=self.watch, step=trainer.global_step, **{**own, **self.options})
            self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # rank 0 sends it to all, who are here
        self._first = True
        if self.report and trainer.is_global_zero:
            print(lpq.report(pl_module))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Give each layer its recipe at this step."""
        set_step(pl_module, trainer.global_step)
        if self.numerics is not None and self._step is None:
            self._step = ExitStack()
            self._step.enter_context(self.numerics.step())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._first:
            warn_of_uncalled(pl_module)
        self._first = False
        if self.numerics is not None and self.numerics.number < trainer.global_step:
            self._close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()
        self._write(trainer)

    def _write(self, trainer: Any) -> None:
        if self.numerics is not None and trainer.is_global_zero:
            self.numerics.write(self._folder / "numerics.jsonl")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(exception)

    def _close(self, exception: BaseException | None = None) -> None:
        if self._step is not None:
            self._step.__exit__(type(exception) if exception else None, exception, None)
        self._step = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        checkpoint[KEY] = policy_of(pl_module)
        self._write(trainer)  # as the run may be killed

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._saved_policy = checkpoint.get(KEY)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    pytorch: Any = import_module("lightning.pytorch")
    own, base = (_Callback, pytorch.Callback) if name == CALLBACK else (_Precision, pytorch.plugins.Precision)
    cls = type(name, (own, base), {"__module__": __name__, "__doc__": own.__doc__})
    globals()[name] = cls
    return cls
