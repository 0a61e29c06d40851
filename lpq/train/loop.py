"""The main job: train by recipe, train the bf16 baseline from the same seed and from another, and compare."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import lpq
from lpq.cli.runs import NUMERICS, RECIPE
from lpq.files.disk import json_of
from lpq.files.outputs import writable
from lpq.files.typed import check_table
from lpq.kernels.table import allowed_backends
from lpq.nn.conversion_plan import ConversionPlan, changes_of
from lpq.nn.names import first_few
from lpq.nn.plan import memories
from lpq.recipes import Policy
from lpq.recipes.policy_sources import refuse_rules
from lpq.registry.showing import printable
from lpq.train import data, gpu_size, report, runs
from lpq.train.config import TrainConfig
from lpq.train.errors import GOES_ON, Stopped, TrainError, TrainOptionError
from lpq.train.interrupt import Interrupt
from lpq.train.machine import baseline_on, fast_bf16, fixed_sums, pick_device
from lpq.train.measure import served_by
from lpq.train.model import GPT, GPTShape
from lpq.train.recorded import refuse_record
from lpq.train.report import Outcome, Summary
from lpq.train.team import Team
from lpq.train.trainer import Trainer

LINES = 10
"""About how many lines report on a training where no progress bar can be shown."""
RECORD = {"step": int, "seconds": float, "held_out_loss": float}
"""The values of a step's record that are read again."""
COLUMNS = (
    TextColumn("{task.description}", markup=False),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("{task.fields[loss]}"),
    TimeRemainingColumn(),
)


def run(config: TrainConfig, console: Console | None = None) -> Summary:
    """Do the run that ``config`` describes, or the rest of it; the results also lie in its directory.

    Where there is a process group, its processes train one sharded model together, and the first one alone prints and
    writes. ``lpq train`` makes the group that torchrun means; see ``lpq.train.launch``.
    """
    allowed_backends()  # a backend that is none is refused before anything is written
    device = pick_device(config.device)
    team = Team(device=device)
    team.check_batch(config.batch)
    if config.record:
        refuse_record(team)
    console = (console or Console()) if team.is_first else Console(quiet=True)
    policy = policy_of(config)
    text = data.load(config.data, config.seq, config.text)
    with ExitStack() as stack:
        directory = team.first(lambda: stack.enter_context(runs.opened(config)))
        return beside_baseline(config, policy, text, team, directory, console)


def policy_of(config: TrainConfig) -> Policy:
    """The policy of a run: the one that it names, or its recipe for all layers; refused if it trains none or cannot."""
    if config.policy is None:
        refuse_rules(config.recipe, f"give it as --policy {config.recipe}")
    policy = lpq.policy(lpq.recipe(config.recipe) if config.policy is None else config.policy)
    with torch.device("meta"):
        model = GPT(GPTShape(config.layers, config.heads, config.width))
    _, converted, others = changes_of(model, ConversionPlan.of(model, policy, config.steps))
    if not converted:
        why = first_few([f"{entry.name}: {entry.note}" for entry in others if entry.kind == "Linear"], "; ")
        raise TrainOptionError(
            f"{config.policy or config.recipe} converts no layer of a model of layers = {config.layers} and width = "
            f"{config.width}, and would train as bf16 does: {why}. Change the model or the rules, or name another one"
        )
    if static := [m.name for rule in policy.rules if rule.recipe for m in memories(rule.recipe) if not m.moves]:
        raise TrainOptionError(
            f"{config.title} has static scales ({static[0]}): train by one that measures them, then run lpq calibrate"
        )
    return policy


def beside_baseline(
    config: TrainConfig, policy: Policy, text: data.Text, team: Team, directory: Path, console: Console
) -> Summary:
    """Train by ``policy`` and then without one, by one seed and by two, and close with the results of all."""
    device = team.device
    where = f"{team.size} ranks, {device.type}" if team.many else str(device)
    say(console, f"{config.title}: {config.steps} steps on {where}, {text.source}; everything goes to {directory}/")
    if remark := gpu_size.note(config, device):
        say(console, remark)
    jobs: dict[str, tuple[str, TrainConfig, Policy | None]] = {RECIPE: (config.title, config, policy)}
    if config.baseline:
        baseline = baseline_on(device)
        jobs[baseline] = (baseline, config, None)
        if config.second_seed:
            other = replace(config, seed=config.seed ^ 1)
            jobs[f"{baseline}{runs.SECOND}"] = (f"{baseline}, seed {other.seed}", other, None)
    if not fast_bf16(device):
        console.print(
            "This processor has no instructions for bf16, in which PyTorch is many times slower on it than in fp32: a "
            "matrix is rounded to bf16 where the recipe says so, and all else is in fp32."
        )
    outcomes = []
    with Interrupt(deaf=team.many) as interrupt, fixed_sums(device, config.threads):
        for name, (title, its_config, its_policy) in jobs.items():
            trainer = Trainer(its_config, text, its_policy, team)
            if its_policy is policy:
                team.first(partial(tell_conversion, trainer, directory, console))
            tell = partial(say, console, title=title, style="yellow", soft_wrap=True)
            bar = partial(progress_of, title, console)
            if signum := train(trainer, directory / name, lambda: interrupt.signum or 0, tell, bar):
                raise Stopped(
                    f"stopped after step {trainer.step} of {config.steps} ({title}), which is saved; "
                    f"go on with: {again(team)} --resume --out {shlex.quote(str(directory))}",
                    signum,
                )
            seconds = team.first(partial(step_seconds, directory / name / runs.METRICS))
            outcomes.append(Outcome.of(title, trainer, seconds, served_by(trainer.model, device)))
    summary = Summary(config, where, directory, tuple(outcomes))
    return report.close(summary, console, on_cpu=device.type == "cpu") if team.is_first else summary


def tell_conversion(trainer: Trainer, directory: Path, console: Console) -> None:
    """Print how many layers the policy reaches, and which rules never hold; all the rest is in ``conversion.txt``."""
    conversion = lpq.report(trainer.model, full=True)
    with writable(directory / runs.CONVERSION, GOES_ON) as file:
        file.write_text(f"{conversion}\n", encoding="utf-8")
    converted, rest = len(conversion.converted), len(conversion.left)
    if trainer.config.full:
        console.print(str(conversion), soft_wrap=True, markup=False, highlight=False)
        return
    console.print(f"{converted} layers converted, {rest} left alone: see {runs.CONVERSION}")
    console.print(str(conversion.coverage), soft_wrap=True)
    for number, why in conversion.never_holding:
        console.print(f"rule {number} of the policy never holds: {why}", style="yellow")


def train(
    trainer: Trainer,
    directory: Path,
    stop: Callable[[], int],
    say: Callable[[str], None],
    bar: Callable[[Trainer], AbstractContextManager[Callable[[dict[str, Any]], None]]],
    *,
    keep_end: bool = True,
) -> int:
    """Take ``trainer`` from its last checkpoint in ``directory``, if there is one, to the last step; return 0.

    Before each step ``stop`` is asked; what it returns, if not 0, ends the training there, saved, and is returned.
    Without ``keep_end`` the state after the last step is not saved.
    """
    config, team = trainer.config, trainer.team
    saved = -1
    if trainer.resume(directory, say):
        saved = trainer.step
        say(f"resumed after step {trainer.step}")
    path, noted = directory / runs.METRICS, watching(trainer, directory / NUMERICS)
    team.first(lambda: keep(path, trainer.step))
    with noted as note, bar(trainer) as show:
        while not (signum := team.largest(stop())) and trainer.step < config.steps:
            record = trainer.advance()
            if trainer.findings is not None:
                say(trainer.findings)
            if config.validate_every and (trainer.step % config.validate_every == 0 or trainer.step == config.steps):
                record["held_out_loss"] = trainer.held_out_loss()
            if team.is_first:
                add_record(path, record)
            show(record)
            if config.checkpoint_every and trainer.step % config.checkpoint_every == 0 and trainer.step < config.steps:
                note()
                saved = trainer.save(directory)
        if trainer.step != saved and (keep_end or trainer.step < config.steps):
            trainer.save(directory)
    return signum


@contextmanager
def watching(trainer: Trainer, path: Path) -> Iterator[Callable[[], None]]:
    """Watch the numerics of a run, if it is to be. They are written whenever the function is called, and at the end,
    also of a run that fails."""
    watch = trainer.begin_watch()
    note: Callable[[], None] = (lambda: None) if watch is None else partial(watch.write, path)
    trainer.team.first(lambda: note() if path.is_file() else None)  # a resumed run's broken file is refused now
    try:
        yield note
    finally:
        note()


@contextmanager
def progress_of(title: str, console: Console, trainer: Trainer) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show how far ``trainer`` is: by a bar, or by some lines where there is no terminal."""
    steps = trainer.config.steps
    every = math.ceil(steps / LINES)
    with Progress(*COLUMNS, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(title, total=steps, completed=trainer.step, loss="")

        def show(record: dict[str, Any]) -> None:
            step, loss = record["step"], f"loss {record['loss']:.3f}"
            progress.update(bar, completed=step, loss=loss)
            if not console.is_terminal and (step % every == 0 or step == steps):
                say(console, f"step {step} of {steps}, {loss}", title=title)

        yield show


def say(console: Console, text: str, *, title: str = "", **how: Any) -> None:
    """Print text that may come from files and options: to rich a name in brackets would be a style. ``title``: of the
    training that it is about."""
    console.print(printable(f"{title}: {text}" if title else text), markup=False, **how)


def again(team: Team) -> str:
    """The command that was given, without its options."""
    return f"torchrun --nproc-per-node {team.size} -m lpq train" if team.many else "python -m lpq train"


def keep(path: Path, steps: int) -> None:
    """Create the file for the lines of the steps, with the lines of the ``steps`` steps that a resumed run keeps."""
    with writable(path, GOES_ON):
        path.touch()
        lines = path.read_bytes().splitlines(keepends=True)
        os.truncate(path, sum(map(len, lines[:steps])))  # kept lines are never written again, so no kill can lose them
    records(path)  # a file that is broken is refused before the first step, and not after the last


def add_record(path: Path, record: dict[str, Any]) -> None:
    """Write the line of a step behind the lines that were kept."""
    with writable(path, GOES_ON), path.open("a", encoding="utf-8") as file:
        print(json.dumps(record), file=file)


def records(path: Path) -> list[dict[str, Any]]:
    """The records of all steps."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            check_table(record := json_of(line), RECORD, ("step", "seconds"), others=True)
        except ValueError as error:
            broken = f"{path}, line {number}, is broken ({error})"
            raise TrainError(f"{broken}: restore it, or train anew in another --out") from error
        found.append(record)
    return found


def step_seconds(path: Path) -> float:
    """The median time of the steps whose records a file has."""
    return float(median([record["seconds"] for record in records(path)] or [math.nan]))
