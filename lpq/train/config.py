"""The options of a training run: one frozen dataclass, from which command line and file format follow.

A value comes from the command line, else from the configuration file, else from the run that is resumed, else
from the default below. Nothing here imports torch, so that ``lpq train --help`` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from lpq.files.typed import check_table
from lpq.registry import toml
from lpq.registry.errors import suggestion
from lpq.train.errors import TrainError, TrainOptionError

RECIPE = "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"
"""The default recipe: a hybrid."""
WEIGHTS = (None, "high_precision", "quantized")
"""How the weights of converted layers are stored."""
INSTALLED = "installed"
"""Names, in place of a file, what is installed with this Python."""
SCHEDULES = ("cosine", "wsd")
"""How the learning rate goes after its warm-up."""
LARGEST = 2**63
"""A number must be less than this: so PyTorch takes it as a seed, and it is finite."""


def option(default: Any, help: str, least: float | None = None) -> Any:
    """A field with its line of help, and the least value it may have."""
    return field(default=default, metadata={"help": help, "least": least})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of ``lpq train``; ``lpq train --config FILE`` reads the same names from a TOML file."""

    recipe: str = option(RECIPE, "A recipe: a name that `lpq recipes` lists, the grammar, or a TOML file.")
    policy: str | None = option(None, "A policy, in place of --recipe: a name of `lpq recipes`, or a TOML file.")
    baseline: bool = option(True, "Train the same model in bf16 afterwards (in fp32 where bf16 is slow) and compare.")
    second_seed: bool = option(
        True, "Train the baseline with another seed as well: its distance shows what a seed alone changes."
    )
    steps: int = option(200, "Optimizer steps of each run.", least=1)
    batch: int = option(8, "Sequences per step.", least=1)
    seq: int = option(128, "Bytes per sequence.", least=2)
    lr: float = option(3e-3, "Peak learning rate; it warms up, and decays to a tenth.", least=0)
    schedule: str = option(
        "cosine", "How the learning rate decays: cosine, or wsd, which stays at the peak until the last fifth."
    )
    warmup: float = option(0.05, "Part of the steps in which the learning rate warms up.", least=0)
    weight_decay: float = option(0.1, "Weight decay of the matrices.", least=0)
    clip: float = option(1.0, "The norm to which gradients are clipped.", least=0)
    seed: int = option(0, "Seed of the weights, the batches and the stochastic rounding.", least=0)
    layers: int = option(2, "Blocks of the model.", least=1)
    heads: int = option(2, "Attention heads; they divide --width.", least=1)
    width: int = option(128, "Width of the model.", least=1)
    data: tuple[str, ...] = option(
        (),
        "Files or directories to train on (repeatable); installed: sources and documentation of the standard library "
        "and of all installed packages but lpq; default: the sources of Python's standard library.",
    )
    text: int = option(16, "The most MiB of text that are read.", least=1)
    device: str = option("auto", "cpu, cuda, cuda:N, or auto: the GPU if there is one.")
    threads: int = option(1, "CPU threads; 0: as many as PyTorch takes. A small model gains little from more.", least=0)
    weights: str | None = option(
        None,
        "quantized: weights are stored quantized, with fp32 masters in the optimizer. high_precision, the default: "
        "they are not; under torchrun they are gathered quantized all the same.",
    )
    compile: bool = option(False, "Train through torch.compile.")
    record: bool = option(
        False,
        "Record forward and backward in a CUDA graph: the numbers stay, and a small model waits less for the host.",
    )
    out: str | None = option(None, "Directory of the run; default: a new one under runs/, named after the recipe.")
    resume: bool = option(False, "Go on from the last checkpoint of --out, or of the newest run under runs/.")
    validate_every: int = option(0, "Steps between losses on the held-out text; 0: only at the end.", least=0)
    watch: int = option(0, "Steps between statistics of how well the formats fit, for `lpq report`; 0: none.", least=0)
    what_if: str | None = option(None, "A recipe for which --watch takes the same statistics, of the run's tensors.")
    replay: bool = option(
        False, "Replay a step where the loss or the gradient norm leaves its course, and name the layers that did it."
    )
    promote: int = option(
        0, "As --replay, and train these layers in bf16 for this number of steps, from the next on; 0: not.", least=0
    )
    full: bool = option(False, "Print how each layer is converted, as conversion.txt of the run has it.")
    checkpoint_every: int = option(
        50, "Steps between checkpoints; 0: only when the run ends or is interrupted.", least=0
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", tuple(self.data))  # in TOML, JSON and on a command line it is a list
        for f in fields(self):
            value, least = getattr(self, f.name), f.metadata["least"]
            if TYPES[f.name] is bool and not isinstance(value, bool):
                raise TrainOptionError(f"{f.name} = {value!r}: it is True or False")
            if least is not None and not least <= value < LARGEST:
                bound = f"less than {LARGEST}" if value >= least else f"at least {least}"
                raise TrainOptionError(f"{f.name} = {value!r}: it must be {bound}")
        if self.width % (2 * self.heads):
            raise TrainOptionError(
                f"width = {self.width} does not give each of heads = {self.heads} an even number of elements: "
                f"make width a multiple of {2 * self.heads}, or take another number of heads"
            )
        if self.weights not in WEIGHTS:
            raise TrainOptionError(f"weights = {self.weights!r}: {suggestion(self.weights or '', WEIGHTS[1:])}")
        if self.schedule not in SCHEDULES:
            raise TrainOptionError(f"schedule = {self.schedule!r}: {suggestion(self.schedule, SCHEDULES)}")
        if not self.lr > 0:
            raise TrainOptionError("lr = 0 would leave the weights as they are: 0.003 is usual for a small model")
        if not self.clip > 0:
            raise TrainOptionError("clip = 0 would leave no gradient: 1.0 is usual")
        if not self.warmup < 1:
            raise TrainOptionError(f"warmup = {self.warmup!r} leaves no step after it: it is a part of the run below 1")
        if self.record and (self.watch or self.replay or self.promote):
            raise TrainOptionError(
                "record = True: what a graph replays cannot be watched or replayed by layers: leave out --record, or "
                "--watch, --replay and --promote"
            )
        if self.what_if and not self.watch:
            raise TrainOptionError(f"what_if = {self.what_if!r} needs --watch 100; for no question: --what-if ''")
        if self.policy is not None and self.recipe != RECIPE:
            raise TrainOptionError("a policy gives the recipes itself: name a recipe or a policy, not both")

    @property
    def title(self) -> str:
        """A short name for the training: the recipe, or the name of its file or of the policy's file."""
        if self.policy is not None:
            return Path(self.policy).stem
        return Path(self.recipe).stem if self.recipe.endswith(".toml") else self.recipe

    def to_toml(self) -> str:
        """The settings as a configuration file; those that are None are left out."""
        hidden = {"resume", "full", "recipe" if self.policy is not None else "policy"}
        return toml.text_of({k: v for k, v in asdict(self).items() if v is not None and k not in hidden})

    def settings(self) -> dict[str, object]:
        """The settings that decide the resulting numbers; a resumed run must have the same."""
        return {k: v for k, v in asdict(self).items() if k not in FREE}


FREE = frozenset({
    "baseline", "second_seed", "out", "resume", "full", "checkpoint_every", "device", "record", "watch", "what_if",
    "replay",
})  # fmt: skip
"""Options that may differ between a run and its resumption (bitwise the same on the same kind of device)."""

TYPES: Mapping[str, Any] = MappingProxyType(get_type_hints(TrainConfig))
"""The type of each option."""


def read(path: Path) -> dict[str, Any]:
    """The options that the TOML file ``path`` gives."""
    table = toml.read(path, f"the configuration {path}", "options are", TrainError)
    try:
        check_table(table, TYPES)
    except ValueError as error:
        raise TrainOptionError(f"{path}: {error}") from None
    return {key: float(value) if TYPES[key] is float else value for key, value in table.items()}
