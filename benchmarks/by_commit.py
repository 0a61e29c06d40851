"""The time of a step by each of several commits of lpq, in one run on two GPUs.

    python -m benchmarks.by_commit COMMIT...            where there is git
    python -m benchmarks.by_commit pack FILE COMMIT...  commits in a file, for a machine without git
    python -m benchmarks.by_commit FILE --out FOLDER    measure those

COMMIT=WORDS tells in WORDS what a commit has that those before it lack; its subject stands there otherwise. Each commit
has two processes, one for each GPU, which live as long as the run and take turns; ``by_commit_ranks`` says what they
do. A measurement that fails or takes too long is lost for its commit alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import environment, stored
from benchmarks.by_commit_ranks import RANKS
from benchmarks.rows import Row

STEM = "by_commit"
PACKED = ("lpq", "plugins", "csrc", "pyproject.toml", "tests/imitated_gpu.py")
ROOT = Path(__file__).parents[1]
TURNS = (("plain small", "grouped small"), ("plain wide", "grouped wide"), ("unit",), ("pair replicated",),
         ("pair sequences",))  # fmt: skip
"""The measurements of one go: rank 0 takes plain layers while rank 1 takes groups."""
MADE = ("plain small", "plain wide", "unit", "pair replicated", "pair sequences", "grouped small", "grouped wide")
"""In the order in which they are made."""
MAKING, SAMPLING, IMITATED = 60.0, 12.0, 90.0
"""The most seconds to make what a measurement needs, as when kernels are compiled, and to sample."""
GRACE = 4.0
"""Seconds for the other rank, once one has raised."""
ABREAST = 6
"""Commits that compile at the same time."""
TIMES = ("host_us", "gpu_us", "wall_us")


class Lost(Exception):
    """The processes of a commit ended, or were ended."""


class Pair:
    """The two processes of one commit, and what they are asked."""

    def __init__(self, commit: str, tree: Path, work: Path, imitate: bool) -> None:
        self.commit, self.work = commit, work
        self.job = {"tree": str(tree), "imitate": imitate, "info": str(work / "info" / commit)}
        self.failures: dict[str, str] = {}
        self.made: set[str] = set()
        self.tries = 0
        self.processes: list[subprocess.Popen[bytes]] = []

    def spawn(self) -> None:
        """Start the processes."""
        self.tries += 1
        self.made.clear()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        quiet = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
        usual = quiet | {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LPQ_KERNELS")}
        self.processes, self.text = [], [b""] * RANKS
        for rank in range(RANKS):
            variables = usual | {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = [sys.executable, "-m", "benchmarks.by_commit_ranks", json.dumps(self.job), str(rank)]
            with (self.work / f"{self.commit}-{self.tries}.log.{rank}").open("ab") as log:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=variables, stderr=log, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    start_new_session=True, bufsize=0,
                )  # fmt: skip
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            self.processes.append(process)

    def ask(self, seconds: float, *what: object) -> None:
        """Write a command to both."""
        self.asked, self.limit, self.first = time.monotonic(), seconds, 0.0
        self.answers: list[Row | None] = [None] * RANKS
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write((json.dumps(what) + "\n").encode())

    def poll(self) -> list[Row] | None:
        """The answers of the ranks once all are there. Raises Lost if they will not come; the pair is ended then."""
        now = time.monotonic()
        for rank, process in enumerate(self.processes):
            assert process.stdout is not None
            while more := process.stdout.read(1 << 16):  # None where there is nothing yet
                self.text[rank] += more
            if self.answers[rank] is None and b"\n" in self.text[rank]:
                line, _, self.text[rank] = self.text[rank].partition(b"\n")
                self.answers[rank] = answer = json.loads(line)
                if "error" in answer:
                    self.first = self.first or now
        answers = [answer for answer in self.answers if answer is not None]
        if len(answers) == RANKS:
            return answers
        why = None
        if any(process.poll() is not None for process in self.processes):
            why = "a process ended"
        elif now - self.asked > self.limit:
            why = f"no end within {self.limit:.0f} s"
        elif self.first and now - self.first > GRACE:
            why = "the other rank waits"
        if why:
            self.end()
            raise Lost(_error(answers) or why)
        return None

    def wait(self) -> list[Row]:
        """The answers of the ranks."""
        while (answers := self.poll()) is None:
            time.sleep(0.01)
        return answers

    def end(self) -> None:
        """End both processes."""
        for process in self.processes:
            with process, contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self.processes = []

    def prepared(self, seconds: float) -> Iterator[None]:
        """Start the processes and make all that has not failed; a generator that yields while there is no answer."""
        while self.tries < 3:
            self.spawn()
            at = "start"
            try:
                for at in ("start", *MADE):
                    if at in self.failures:
                        continue
                    self.ask(seconds, *(["start"] if at == "start" else ["make", at]))
                    while (answers := self.poll()) is None:
                        yield
                    words = _error(answers)
                    if words and at == "start":
                        self.end()
                        raise Lost(words)
                    if words:
                        self.failures[at] = words
                    elif at != "start":
                        self.made.add(at)
                return
            except Lost as lost:
                if at == "start" and self.tries == 1:
                    continue  # as where another process took the port
                self.failures[at] = str(lost)
                if at == "start":
                    return


def _error(answers: Sequence[Row]) -> str | None:
    return next((answer["error"] for answer in answers if "error" in answer), None)


def pack(file: Path, commits: Sequence[str]) -> None:
    """Write what is measured of each commit, and the list of commits, into a file."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout

    told = []
    with tarfile.open(file, "w:gz") as packed:
        for text in commits:
            name, _, words = text.partition("=")
            commit = git("rev-parse", "--short=8", f"{name}^{{commit}}").decode().strip()
            told.append({"commit": commit, "new": words or git("log", "-1", "--format=%s", commit).decode().strip()})
            with tarfile.open(fileobj=io.BytesIO(git("archive", f"--prefix={commit}/", commit, *PACKED))) as tree:
                for member in tree:
                    packed.addfile(member, tree.extractfile(member) if member.isreg() else None)
        content = json.dumps(told).encode()
        about = tarfile.TarInfo("commits.json")
        about.size = len(content)
        packed.addfile(about, io.BytesIO(content))


def measure(trees: Path, work: Path, options: argparse.Namespace) -> Iterator[Row]:
    """The result after each pass, and in the end the whole; failures stand in it."""
    began = time.monotonic()
    commits: list[Row] = json.loads((trees / "commits.json").read_text())
    pairs = [Pair(one["commit"], trees / one["commit"], work, options.imitate) for one in commits]
    taken: list[Row] = []

    def left() -> float:
        return float(options.seconds) - (time.monotonic() - began)

    def tell(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    def result() -> Row:
        failures = [{"commit": p.commit, "measured": at, "failure": w} for p in pairs for at, w in p.failures.items()]
        return {"ranks": RANKS, "rounds": options.rounds, "commits": commits, "failures": failures,
                "results": compact(taken)}  # fmt: skip

    try:
        waiting, making = [*pairs], dict[str, tuple[Pair, Iterator[None]]]()
        while (waiting or making) and left() > 30:
            while waiting and len(making) < ABREAST:
                pair = waiting.pop(0)
                making[pair.commit] = pair, pair.prepared(MAKING)
            for pair, steps in [*making.values()]:
                try:
                    next(steps)
                except StopIteration:
                    del making[pair.commit]
                    tell(f"{pair.commit} has {len(pair.made)} measurements" + "".join(
                        f"; {at}: {words[:150]}" for at, words in pair.failures.items()
                    ))  # fmt: skip
            time.sleep(0.02)
        for pair, _ in making.values():
            pair.failures.setdefault("start", "not ready when measuring began")
            pair.end()
        for number in range(1, options.passes + 1):
            order = pairs if number % 2 else pairs[::-1]
            for names in TURNS:
                for pair in order:
                    todo = [name for name in names if name in pair.made and name not in pair.failures]
                    if not todo or not pair.processes or left() < 4:
                        continue
                    try:
                        pair.ask(IMITATED if options.imitate else SAMPLING, "sample", todo, options.rounds)
                        for rank, answer in enumerate(pair.wait()):
                            place = {"commit": pair.commit, "pass": number, "rank": rank}
                            taken += [place | row for row in answer.get("results", ())]
                            if "error" in answer:
                                pair.failures[todo[0]] = answer["error"]
                    except Lost as lost:
                        tell(f"pass {number} {pair.commit} {todo[0]}: {lost}")
                        pair.failures[todo[0]] = str(lost)
                        if pair.tries < 3 and left() > 45:
                            for _ in pair.prepared(SAMPLING):
                                time.sleep(0.02)
            tell(f"pass {number}")
            yield result()
    finally:
        for pair in pairs:
            pair.end()


def compact(taken: Sequence[Row]) -> list[Row]:
    """A row for each commit, measurement and recipe: calls of lpq and how often the GPU waited too short for the host;
    and, by the ranks that measured it, the medians of each pass in microseconds."""
    rows: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for one in taken:
        rows[one["commit"], one["measured"], one["recipe"]].append(one)
    made = []
    for at, of in rows.items():
        row: Row = dict(zip(("commit", "measured", "recipe"), at, strict=True))
        row |= {"calls": of[0]["calls"], "late": sum(one["late"] for one in of)}
        ranks = sorted({one["rank"] for one in of})
        row |= {key: [[round(one[key], 2) for one in of if one["rank"] == rank] for rank in ranks] for key in TIMES}
        made.append(row)
    return made


def save(folder: Path, record: Row, result: Row) -> Row:
    """Write the result with the record of its machine, each of its rows on a line."""
    whole = {"part": STEM, "environment": record, **result}
    text = json.dumps(whole | {"results": []}, indent=1)
    rows = ",\n  ".join(json.dumps(row) for row in result["results"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{STEM}.json").write_text(text.replace('"results": []', f'"results": [\n  {rows}\n ]') + "\n")
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack commits, or measure them."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.by_commit", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("what", nargs="+", metavar="FILE | COMMIT | pack FILE COMMIT")
    parser.add_argument("--out", type=Path, default=stored.FOLDER, help="where the results go; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=225, help="after which no more is measured; default: 225")
    parser.add_argument("--rounds", type=int, default=4, help="samples of each recipe in a pass; default: 4")
    parser.add_argument("--passes", type=int, default=6, help="at most; there are fewer where time is over")
    parser.add_argument("--imitate", action="store_true", help="on a CPU that passes for a GPU that does nothing")
    options = parser.parse_args(arguments)
    if options.what[0] == "pack":
        pack(Path(options.what[1]), options.what[2:])
        return 0
    if not options.imitate and (lack := environment.lacking(RANKS)) is not None:
        print(f"benchmarks: {lack}", file=sys.stderr)
        return 2
    whole: Row = {}
    with tempfile.TemporaryDirectory() as folder:
        trees, work = Path(folder, "trees"), Path(folder, "work")
        work.mkdir()
        file = Path(options.what[0])
        if not file.is_file():
            file = work / "commits.tar.gz"
            pack(file, options.what)
        with tarfile.open(file) as packed:
            packed.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 has none
            packed.extractall(trees)
        told = ["FILE" if argument == str(file) else argument for argument in arguments]
        record = environment.record(told, program="benchmarks.by_commit") | {"devices": RANKS, "peers": {}}
        for result in measure(trees, work, options):
            whole = save(options.out, record, result)
        for failure in whole["failures"]:
            print(f"failed: {failure['commit']} {failure['measured']}: {failure['failure']}", file=sys.stderr)
            for path in work.glob(f"{failure['commit']}-*.log.*"):
                shutil.copy(path, options.out)
    stored.show(whole)
    return 0


if __name__ == "__main__":
    sys.exit(main())
