"""Really starting ``lpq train`` with torchrun, with a fault built into one rank where a test asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

SCRIPT = """
import os, signal, time
from lpq.cli import main
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
    """How torchrun ended."""

    status: int
    out: str
    err: str


def torchrun(ranks: int, *options: object, fault: str = "", folder: Path | None = None) -> Ended:
    """``torchrun --nproc-per-node RANKS -m lpq train OPTIONS``; ``fault`` runs before each step."""
    if fault:
        assert folder is not None
        script = folder / "faulty.py"
        script.write_text(SCRIPT.replace("{fault}", textwrap.indent(textwrap.dedent(fault), "    ").strip()))
        job = [str(script)]
    else:
        job = ["-m", "lpq"]
    torch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*torch, *job, "train", *map(str, options)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)
