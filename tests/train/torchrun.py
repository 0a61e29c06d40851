"""Starting ``lpq train`` with torchrun or as torchrun would, with a fault built into one rank where a test wants one.

It and each process that it starts take seconds to import torch. So one test really starts it; what wants ranks, as a
script of the documentation does, forks them, and what wants torchrun's agent beside them forks that as well.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import uuid

from forking import Ended, Place, fork, run
from pool import context
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

SCRIPT = """
import os, signal, time
from lpq.__main__ import main
from lpq.train import report
from lpq.train.trainer import Trainer

RANK = int(os.environ["RANK"])
AGENT = int(os.environ.get("AGENT", "0"))
advance = Trainer.advance

def faulty(self):
    {fault}
    return advance(self)

Trainer.advance = faulty
report.draw = lambda *args: "no plot"  # whose library would be imported by each
main()
"""


def faulty(fault: str) -> str:
    return SCRIPT.replace("{fault}", textwrap.indent(textwrap.dedent(fault), "    ").strip())


def torchrun(ranks: int, *options: object) -> Ended:
    """``torchrun --nproc-per-node RANKS -m lpq train OPTIONS``."""
    torch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*torch, "-m", "lpq", "train", *map(str, options)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


def forked(ranks: int, *options: object, fault: str = "") -> Ended:
    """The same as far as a rank can tell, in processes that were forked; the status is the last rank's.

    ``fault`` runs before each step.
    """
    return run_forked(ranks, ["lpq", "train", *map(str, options)], faulty(fault or "pass"))


def under_agent(ranks: int, *options: object, fault: str) -> Ended:
    """As ``forked``, and torchrun's agent watches the ranks: the process ``AGENT``, whose status is returned."""
    return fork(1, _agent, ranks, ["lpq", "train", *map(str, options)], faulty(fault))


def run_forked(ranks: int, arguments: list[str], script: str) -> Ended:
    """Run the text of a script so, in the caller's folder and with its environment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    return fork(ranks, _rank, ranks, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, arguments, script)


def _rank(rank: int, place: Place, ranks: int, where: dict[str, str], arguments: list[str], script: str) -> None:
    place.enter(**where, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    run(arguments, script)


def _agent(_: int, place: Place, ranks: int, arguments: list[str], script: str) -> None:
    place.enter()
    config = LaunchConfig(
        1, 1, ranks, run_id=uuid.uuid4().hex, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
        start_method=context().get_start_method(),
    )  # fmt: skip
    elastic_launch(config, _watched)(place, os.getpid(), arguments, script)


def _watched(place: Place, agent: int, arguments: list[str], script: str) -> None:
    """Run as a rank, which finds its number where the agent put it."""
    place.enter(AGENT=agent)
    run(arguments, script)
