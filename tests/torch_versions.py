"""Run the suite with several versions of torch, each in an environment of its own.

``python tests/torch_versions.py 2.11 2.13 2.14`` makes ``.venv/torch-2.11`` and so on, once each, runs the whole suite,
since each torch brings another Triton and another compiler as well, and ends with a line for each version. Arguments
behind ``--`` go to pytest, as ``-- tests/nn -x``. A version that cannot be installed is a failure. ``--record`` notes
the results in ``tests/torch_versions.json``, each with its date.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import venv
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_suffix(".json")
INDEX = "https://download.pytorch.org/whl/cpu"
WHOLE = ("tests",)


def environment(version: str, index: str) -> Path | None:
    """The Python of an environment with this torch, which is made if it is not there; None: it cannot be installed."""
    folder = ROOT / ".venv" / f"torch-{version}"
    python, ready = folder / "bin/python", folder / ".ready"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        torch = f"torch=={version}.*"
        steps = (
            ["--upgrade", "pip>=25.1"],
            [torch, "--index-url", index],
            [torch, "--editable", ".", "--group", "dev"],
        )
        if any(subprocess.run([*pip, *step], cwd=ROOT).returncode for step in steps):
            return None
        ready.touch()
    return python


def suite(python: Path, workers: int, arguments: list[str]) -> tuple[int, str]:
    """The exit status of the tests, and pytest's last line."""
    lean = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    command = [python, "-m", "pytest", "-q", "-n", str(workers), "--dist", "worksteal", *(arguments or WHOLE)]
    done = subprocess.run(command, cwd=ROOT, env=lean, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout)
    return done.returncode, done.stdout.strip().rpartition("\n")[2]


def record(version: str, python: Path, tests: Sequence[str], line: str) -> None:
    """Note what pytest's last line says, of which torch."""
    ask = "import torch, platform; print(torch.__version__, platform.python_version())"
    exact, runs_on = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.split()
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    kept[version] = {
        "torch": exact, "python": runs_on, "date": date.today().isoformat(), "machine": platform.machine(),
        "tests": tests, "result": line,
    }  # fmt: skip
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="+", help="as 2.13")
    parser.add_argument("--index", default=INDEX, help="the package index that has torch (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help=f"note the results in {RESULTS.name}")
    given, rest = sys.argv[1:], []
    if "--" in given:
        given, rest = given[: given.index("--")], given[given.index("--") + 1 :]
    options = parser.parse_args(given)
    failed, lines = 0, []
    for version in options.versions:
        python = environment(version, options.index)
        status, line = (1, "it cannot be installed") if python is None else suite(python, options.workers, rest)
        failed |= status != 0
        if options.record and python is not None:
            record(version, python, rest or WHOLE, line)
        lines.append(f"torch {version}: {line}")
    print("\n".join(lines))
    return failed


if __name__ == "__main__":
    sys.exit(main())
