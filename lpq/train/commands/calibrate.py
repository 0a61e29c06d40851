"""``lpq calibrate``: make the scales of a checkpoint static, and list how noisy each layer is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from lpq.cli.export import Source, Target
from lpq.cli.runs import checkpoint_in
from lpq.files.claim import LOCK
from lpq.files.disk import PARTIAL
from lpq.files.outputs import check_writable
from lpq.registry.errors import LpqError, OptionError, suggestion, words

METHODS = ("max", "percentile", "mse", "four_over_six")
HELD_OUT = 4
"""The number of batches on which the noise of layers is measured."""

Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="Text files or directories (repeatable); with --model one file of batches that torch.save wrote. Default: "
        "the text of the run's training.",
    ),
]
Made = Annotated[
    str,
    typer.Option("--model", help="package.module:function that makes the model, for what `lpq train` did not train."),
]
Method = Annotated[str, typer.Option("--method", help=f"How scales are found: {', '.join(METHODS)}.")]
Samples = Annotated[int, typer.Option("--samples", min=1, help="How many samples go through the model.")]
Percentile = Annotated[
    float | None,
    typer.Option("--percentile", min=50, max=100, help="The percentage of --method percentile.", show_default="99.9"),
]
State = Annotated[
    Path | None, typer.Option("--state", help="A file that keeps the statistics, for a later call to go on from.")
]


class _Job(NamedTuple):
    """A model, and the batches that go through it."""

    model: Any
    batches: Sequence[Any]
    held_out: Sequence[Any]
    forward: Callable[[Any, Any], object]


def calibrate(
    checkpoint: Source,
    directory: Target,
    data: Data = None,
    model: Made = "",
    method: Method = "max",
    samples: Samples = 512,
    percentile: Percentile = None,
    state: State = None,
) -> None:
    """Make the scales of a checkpoint static, write it anew, and list its layers, the noisiest first.

    `lpq export` then writes the scales for inference engines.
    """
    if method not in METHODS:
        raise OptionError(f"there is no method {method!r}: {suggestion(method, METHODS)}")
    if percentile is not None and method != "percentile":
        raise OptionError(f"--percentile {percentile:g} needs --method percentile: add it, or leave --percentile out")
    import lpq
    from lpq import calibration
    from lpq.nn.names import plain_name
    from lpq.registry.tables import table

    checkpoint = checkpoint_in(checkpoint)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise lpq.checkpoint.CheckpointError(f"{directory} is there already: give another directory, or remove it")
    check_writable(f"{directory}{PARTIAL}/{LOCK}", "choose another directory")
    info = lpq.checkpoint.info(checkpoint)
    if info.policy is None:
        raise OptionError(f"{checkpoint} is of a model that was not converted: there is no scale to calibrate")
    job = _of_function(checkpoint, info, model, data or ()) if model else _of_run(checkpoint, info, data, samples)
    options: dict[str, Any] = {"method": method, "samples": samples, "state": state}
    if percentile is not None:
        options["percentile"] = percentile
    record = lpq.calibrate(job.model, job.batches, forward=job.forward, **options)
    lpq.checkpoint.save(job.model, directory)
    typer.echo(f"{directory}: {record}")
    recipes: dict[str, Any] = {plain_name(n): getattr(m, "recipe", None) for n, m in job.model.named_modules()}
    rows = []
    for noise in calibration.layer_noise(job.model, job.held_out, forward=job.forward):
        x, w = (quantizer.side("row") for quantizer in (recipes[noise.layer].x, recipes[noise.layer].w))
        rows.append((noise.layer, f"{noise.output:.1f}", f"{noise.weight:.1f}", f"{x} · {w}"))
    table("Signal to noise, in dB", ("layer", "output", "weight", "fprop"), rows)


def _of_run(path: Path, info: Any, data: Sequence[str] | None, samples: int) -> _Job:
    """The model that ``lpq train`` trained, and batches of its text."""
    import torch

    from lpq.train.commands.trained import loaded, trained
    from lpq.train.data import load
    from lpq.train.machine import fast_bf16

    config, plain = trained(path, info, "name the function that makes its model, --model package.module:f")
    model = loaded(plain, path, info)
    text = load(tuple(data) if data else config.data, config.seq, config.text)
    count = -(-samples // config.batch)
    fast = fast_bf16(torch.device("cpu"))

    def forward(model: Any, tokens: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            model(tokens)

    return _Job(
        model,
        [text.batch(config.seed, step, config.batch, config.seq)[0] for step in range(count)],
        [text.held_out_batch(i, config.batch, config.seq)[0] for i in range(HELD_OUT)],
        forward,
    )


def _of_function(path: Path, info: Any, name: str, data: Sequence[str]) -> _Job:
    """A model that a function makes, and the batches of a file."""
    from lpq.calibration.collecting import through
    from lpq.checkpoint import pickles
    from lpq.cli.models import by_function
    from lpq.train.commands.trained import loaded

    if len(data) != 1:
        raise OptionError("--model needs --data FILE once: a list of batches that torch.save wrote")
    model = loaded(by_function(name, "--model"), path, info)
    try:
        batches = pickles.load(Path(data[0]))
    except LpqError as error:
        raise OptionError(f"--data {data[0]} cannot be read as batches that torch.save wrote: {error}") from error
    if not isinstance(batches, list):
        raise OptionError(f"--data {data[0]} holds a {type(batches).__name__}, and a list of batches is wanted")

    def forward(model: Any, batch: Any) -> object:
        try:
            return through(model, batch)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise OptionError(f"the model does not take a batch of --data {data[0]}: {words(error)}") from error

    return _Job(model, batches, batches[:HELD_OUT], forward)
