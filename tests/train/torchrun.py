"""Starting ``lpq train`` with torchrun or as torchrun would, with a fault built into one rank where a test wants one.

Really started are the tests of what torchrun itself does with the processes. It and each of them take seconds to import
torch; what only wants ranks, as a script of the documentation does, forks them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

from ranks import processes

SCRIPT = """
import os, signal, time
from lpq.__main__ import main
from lpq.train.trainer import Trainer

RANK = int(os.environ["RANK"])
advance = Trainer.advance

def faulty(self):
    {fault}
    return advance(self)

Trainer.advance = faulty
main()
"""


@dataclass(frozen=True)
class Ended:
    """How it ended."""

    status: int
    out: str
    err: str
    statuses: tuple[int, ...] = ()
    """The exit status of each rank, where they were forked."""


def _faulty(fault: str) -> str:
    return SCRIPT.replace("{fault}", textwrap.indent(textwrap.dedent(fault), "    ").strip())


def torchrun(ranks: int, *options: object, fault: str = "", folder: Path | None = None) -> Ended:
    """``torchrun --nproc-per-node RANKS -m lpq train OPTIONS``; ``fault`` runs before each step."""
    if fault:
        assert folder is not None
        script = folder / "faulty.py"
        script.write_text(_faulty(fault))
        job = [str(script)]
    else:
        job = ["-m", "lpq"]
    torch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*torch, *job, "train", *map(str, options)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


def forked(ranks: int, *options: object, fault: str = "") -> Ended:
    """The same as far as a rank can tell, in processes that were forked; the status is the last rank's."""
    return run_forked(ranks, ["lpq", "train", *map(str, options)], _faulty(fault or "pass"))


def run_forked(ranks: int, arguments: list[str], script: str) -> Ended:
    """Run the text of a script so, in the caller's folder and with its environment."""
    with socket.socket() as found, tempfile.TemporaryDirectory() as folder:
        found.bind(("127.0.0.1", 0))
        where = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
        found.close()
        here = os.getcwd(), [*sys.path]
        started = processes(_rank, ranks, ranks, folder, where, here, arguments, script, join=False)
        for process in started.processes:
            process.join(120)
            process.kill()
            process.join()
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
        statuses = tuple(process.exitcode for process in started.processes)
        return Ended(statuses[-1], out, err, statuses)


def _rank(
    rank: int, ranks: int, folder: str, where: dict[str, str], here: tuple[str, list[str]], arguments: list[str],
    script: str,
) -> None:  # fmt: skip
    one = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "COLUMNS": 200}
    os.environ.update(where, OMP_NUM_THREADS="1", **{name: str(value) for name, value in one.items()})
    for name, stream in (("out", 1), ("err", 2)):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(here[0])
    sys.path[:], sys.argv = here[1], arguments
    exec(compile(script, "faulty.py", "exec"), {"__name__": "__main__"})
