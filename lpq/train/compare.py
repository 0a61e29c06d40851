"""``lpq compare``: the same model from the same seeds by each recipe beside bf16, several trainings at the same time.

Where several run at the same time, each is a process of its own, on one GPU or on the CPU; the processes of torchrun
do one at a time each. A training is what ``lpq train`` does with one recipe, so what was cut off goes on from its
checkpoint. One that ended leaves its curve, a small file, and is not repeated.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import lpq
from lpq.cli.runs import RECIPE
from lpq.distributed.ranks import message
from lpq.files.claim import LOCK, Claim, left_behind
from lpq.files.disk import PARTIAL
from lpq.files.errors import CheckpointError
from lpq.kernels.table import allowed_backends
from lpq.registry.errors import LpqError
from lpq.train import beside, data, loop, runs, trainings
from lpq.train.compare_config import CompareConfig, TrainingJob, processors
from lpq.train.errors import Diverged, Stopped, TrainError
from lpq.train.interrupt import Interrupt
from lpq.train.machine import baseline_on, described, fixed_sums, pick_device
from lpq.train.recorded import refuse_record
from lpq.train.taking_turns import Processes
from lpq.train.team import Team
from lpq.train.trainer import Trainer
from lpq.train.trainings import Training

ALONE = Processes()
Show = Callable[[dict[str, Any]], None]
Say = Callable[[str], None]

PATIENCE = 0.2
"""Seconds between two looks at the clock."""
SPARE = 0.1
"""In the last tenth of a time limit no training is begun: it would compile, and stop."""
CLAIM = "comparing"
"""The folder with the lock, beside the curves; it is there while trainings run."""
DIGITS = 5
"""The digits after the point of a loss in a file of curves."""


def run(
    config: CompareConfig, console: Console, began: float | None = None, processes: Processes = ALONE
) -> list[Training]:
    """Do the trainings that are not done yet; return all that ended, also in earlier calls.

    The time limit counts from ``began``, a value of ``time.monotonic()``: by default from now on. ``processes``: those
    that call this together, each of which trains as if it were alone; an error of one is raised on all.
    """
    began = time.monotonic() if began is None else began
    allowed_backends()  # a backend that is none is refused before anything is written
    if processes.many and config.at_once is not None:
        raise TrainError("--at-once is not for torchrun, whose processes do one training each at a time: leave it out")
    device = pick_device(config.training.device)
    if config.training.record:
        refuse_record(Team(device=device))
    for recipe in config.recipes:
        loop.policy_of(replace(config.training, policy=recipe))
    if runs.is_run(config.out):
        raise TrainError(f"{config.out} holds a run of lpq train: name another directory with --out")
    jobs = config.jobs(baseline_on(device))
    text = data.load(config.training.data, config.training.seq, config.training.text)
    curves = trainings.read_all(config.out)
    if config.beside is not None:
        beside.check(config.beside, [*(job.title for job in jobs), *(curve.title for curve in curves)])
    trainings.refuse_others(curves, config.out, config.training)
    trainings.refuse_other_text(curves, text.digest, config.out)
    trainings.refuse_other_baseline(curves, jobs[0].title, config.out)
    policies = {job.title: job.config.policy for job in jobs if job.config.policy is not None}
    rules = {title: lpq.policy(one).to_toml() for title, one in policies.items()}
    trainings.refuse_other_policies(curves, rules)
    jobs = [replace(job, text=text.digest, rules=rules.get(job.title, "")) for job in jobs]
    _make(config.unfinished)
    with nullcontext() if processes.rank else _only(config.out):
        return _run(config, jobs, text, device, console, began, processes)


def _run(
    config: CompareConfig, jobs: Sequence[TrainingJob], text: data.Text, device: torch.device, console: Console,
    began: float, processes: Processes,
) -> list[Training]:  # fmt: skip
    """``run``, once it is known that nothing forbids it."""
    todo = [job for job in jobs if not job.curve.exists()]
    for job in todo:
        if runs.is_run(Path(str(job.config.out))):
            runs.open_directory(replace(job.config, resume=True))
    places = [config.training.device] if processes.many else _places(device, config, len(todo))
    steps, at_once = config.training.steps, len(places) * processes.size
    each = config.training.batch * config.training.seq
    about_all = console if processes.rank == 0 else Console(quiet=True)
    loop.say(
        about_all,
        f"{len(jobs)} trainings of {steps} steps of {each} bytes, {len(jobs) - len(todo)} of them done, {at_once} at a "
        f"time; {text.source}, {len(text.train) / 2**20:.0f} MiB and {len(text.held_out) / 2**20:.1f} MiB held out; "
        f"everything goes to {config.out}/",
    )
    with Interrupt(deaf=processes.many) as interrupt:
        stop = _Stop(interrupt, config.time_limit, began)
        processes.exchange("looked", (), lambda: interrupt.signum)  # none trains while others look what there is to do
        failed = _work(todo, places, stop, console, processes)
        failed = processes.exchange("failed", failed, lambda: interrupt.signum)
    if not any(config.unfinished.glob("*")):
        shutil.rmtree(config.unfinished, ignore_errors=True)
    rest = sum(not job.curve.exists() for job in jobs)
    if failed:
        raise TrainError("; ".join(failed) + ". Trainings that ended are kept, and the same command does the rest")
    if interrupt.signum is not None:
        raise Stopped(f"stopped: {rest} trainings are left, and the same command goes on", interrupt.signum)
    if rest:
        loop.say(about_all, f"the time is up: {rest} trainings are left, and the same command goes on")
    return trainings.read_all(config.out)


@contextmanager
def _only(out: Path) -> Iterator[None]:
    """Be the only command that trains in this folder. When a process ends, however it ends, the folder is free."""
    try:
        claim = Claim.take(out / CLAIM)
    except CheckpointError as error:
        lock = out / f"{CLAIM}{PARTIAL}" / LOCK
        if not lock.is_file() or left_behind(lock.parent):
            raise
        other = lock.read_text(encoding="utf-8").partition("\n")[0] or "another process"
        raise TrainError(
            f"{other} runs lpq compare in {out} at this moment: wait until it ends, or name another --out"
        ) from error
    try:
        yield
    finally:
        claim.release()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainError(f"nothing can be kept in {folder}: {error.strerror or error}; name another --out") from error


def _places(device: torch.device, config: CompareConfig, jobs: int) -> list[str]:
    """The device of each training that runs at the same time."""
    if device.type == "cpu":
        devices, usual = ["cpu"], processors(config.training.threads)
    else:
        several = device.index is None
        devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if several else [str(device)]
        usual = len(devices)
    count = min(config.at_once or usual, max(jobs, 1))
    return list(itertools.islice(itertools.cycle(devices), count))


class _Stop:
    """The signal that came, or the time that is up."""

    def __init__(self, interrupt: Interrupt, limit: float | None, began: float) -> None:
        self.interrupt, self.limit = interrupt, limit if limit is not None else math.inf
        self.began = began

    def __call__(self) -> int:
        """The number of a signal, or 0."""
        return self.interrupt.signum or (signal.SIGALRM if self._passed(self.limit) else 0)

    @property
    def soon(self) -> bool:
        """Whether nothing new should begin."""
        return bool(self()) or self._passed(self.limit * (1 - SPARE))

    def _passed(self, seconds: float) -> bool:
        return time.monotonic() - self.began >= seconds


# ---------------------------------------------------------------------------------------------- all of them


def _work(
    jobs: Sequence[TrainingJob], places: Sequence[str], stop: _Stop, console: Console, processes: Processes
) -> list[str]:
    """Do the trainings in their order, as many at a time as there are places, and of several processes those that this
    one takes; return what failed, in words."""
    failed: list[str] = []

    def fail(words: str) -> None:
        failed.append(words)
        loop.say(console, f"failed: {words}", style="red")

    with _bars(jobs, console) as bar:
        if len(places) == 1:
            say = partial(loop.say, console)
            for job in jobs:
                if stop.soon or not processes.take(job.name):
                    continue
                try:
                    with bar(job) as show:
                        train(replace(job, config=replace(job.config, device=places[0])), stop, say, show)
                except Exception as error:
                    if not processes.many:
                        raise
                    if not isinstance(error, LpqError):
                        traceback.print_exception(error)
                    fail(f"{job.name}: {message(error)}")
            return failed
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        ends = context.Event()
        free: SimpleQueue[str] = SimpleQueue()
        for place in places:
            free.put(place)

        def one(job: TrainingJob) -> None:
            if stop.soon or ends.is_set():
                return
            place = free.get()
            try:
                with bar(job) as show:
                    _in_process(replace(job, config=replace(job.config, device=place)), context, ends, console, show)
            finally:
                free.put(place)

        with ThreadPoolExecutor(len(places)) as pool:
            futures: set[Future[None]] = {pool.submit(one, job) for job in jobs}
            while futures:
                done_futures, futures = wait(futures, PATIENCE, FIRST_COMPLETED)
                for raised in filter(None, (future.exception() for future in done_futures)):
                    fail(str(raised))
                if stop():
                    ends.set()
    return failed


Bar = Callable[[TrainingJob], Any]


@contextmanager
def _bars(jobs: Sequence[TrainingJob], console: Console) -> Iterator[Bar]:
    """Bars for all trainings together and for each that runs; where there is no terminal, a line when one ends."""
    with Progress(*loop.COLUMNS, console=console, disable=not console.is_terminal) as progress:
        whole = progress.add_task("all trainings", total=len(jobs), loss="")

        @contextmanager
        def bar(job: TrainingJob) -> Iterator[Show]:
            task = progress.add_task(job.name, total=job.config.steps, loss="")
            last: dict[str, Any] = {}
            began = time.monotonic()

            def show(record: dict[str, Any]) -> None:
                last.update(record)
                progress.update(task, completed=record["step"], loss=f"loss {record['loss']:.3f}")

            try:
                yield show
            finally:
                progress.remove_task(task)
                progress.update(whole, completed=sum(one.curve.exists() for one in jobs))
                if not console.is_terminal and last:
                    held_out = f", held out {last['held_out_loss']:.4f}" if "held_out_loss" in last else ""
                    took = f"{time.monotonic() - began:.0f} s"
                    steps = f"step {last['step']} of {job.config.steps}"
                    loop.say(console, f"{job.name}: {steps}, loss {last['loss']:.4f}{held_out}, {took}")

        yield bar


# ---------------------------------------------------------------------------------------------- one of them


def train(job: TrainingJob, stop: Callable[[], int], say: Say, show: Show) -> None:
    """Do one training, or the rest of it. It leaves its curve, or a checkpoint if ``stop`` ended it."""
    config = job.config
    device, directory = pick_device(config.device), Path(str(config.out))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    policy = lpq.policy(config.policy) if config.policy is not None else None
    text = data.load(config.data, config.seq, config.text)
    rules = policy.to_toml() if policy is not None else ""
    for changed, what in ((text.digest != job.text, text.source), (rules != job.rules, str(config.policy))):
        if changed:
            raise TrainError(
                f"{job.name}: {what} changed since the comparison began: restore what it was, and the same command "
                "goes on; or give another directory with --out"
            )
    runs.open_directory(replace(config, resume=runs.is_run(directory)))
    folder = directory / (RECIPE if policy is not None else baseline_on(device))
    diverged: str | None = None
    if config.compile:
        torch.compiler.reset()  # graphs of other recipes count towards the most that a block may have
    with fixed_sums(device, config.threads):
        trainer = Trainer(config, text, policy, Team(device=device), probes=False)

        def tell(line: str) -> None:
            say(f"{job.name}: {line}")

        try:
            if loop.train(trainer, folder, stop, tell, lambda trainer: nullcontext(show), keep_end=False):
                return
        except Diverged as error:
            diverged = str(error)
            tell(diverged)
    records = loop.records(folder / runs.METRICS)
    Training(
        title=job.title,
        seed=config.seed,
        policy=trainer.policy_text,
        settings={**trainings.shared(config)},
        source=text.source,
        text=text.digest,
        losses=[round(loss, DIGITS) for loss in trainer.losses],
        held_out=[(r["step"], round(r["held_out_loss"], DIGITS)) for r in records if "held_out_loss" in r],
        diverged=diverged,
        step_seconds=loop.step_seconds(folder / runs.METRICS),
        machine=described(device),
        command=job.command,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    ).write(job.curve.parent)
    shutil.rmtree(directory)


def _in_process(job: TrainingJob, context: Any, ends: Any, console: Console, show: Show) -> None:
    """Do one training in a process of its own, and pass on what it tells."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(job, ends, theirs))
    process.start()
    theirs.close()
    error: str | None = None
    while True:
        try:
            kind, what = ours.recv()
        except EOFError:
            break
        if kind == "step":
            show(what)
        elif kind == "line":
            loop.say(console, what)
        else:
            error = what
    process.join()
    if error is None and process.exitcode:
        error = f"its process ended with status {process.exitcode}"
    if error is not None:
        raise TrainError(f"{job.name}: {error}")


def _child(job: TrainingJob, ends: Any, pipe: Connection) -> None:
    """The process of one training. Its parent decides when it stops; signals of the terminal are for the parent."""
    with Interrupt(deaf=True):
        try:
            train(
                job,
                lambda: signal.SIGTERM if ends.is_set() else 0,
                lambda line: pipe.send(("line", line)),
                lambda record: pipe.send(("step", record)),
            )
        except (BrokenPipeError, ConnectionResetError):
            sys.exit(1)  # the parent is gone
        except LpqError as error:
            pipe.send(("error", str(error)))
