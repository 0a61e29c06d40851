"""Which commit of lpq is tested."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def commit(root: Path) -> str:
    """Return the hash of ``HEAD``, with ``-dirty`` behind it if files differ from it.

    A copy without ``.git`` cannot tell: ``LPQ_COMMIT`` says it there, and otherwise it is ``unknown``.
    """
    if (root / ".git").exists():  # and not a repository that the copy happens to lie in
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        try:
            done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        except OSError:
            pass  # no git
        else:
            if done.returncode == 0:
                return done.stdout.strip()
    return os.environ.get("LPQ_COMMIT") or "unknown"
