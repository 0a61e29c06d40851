"""Runs the tests with frameworks that ``make install`` does not bring, in environments of their own; notes the result.

``make test-loops`` runs this. The environments lie in build/, and have the packages of .venv below their own. verl has
one to itself, for it loads no model beside TRL 1, and so has DeepSpeed, which other frameworks take up where it is
installed. ``python tests/integrations/loops.py verl`` runs this one, and keeps what is noted of the others.
torchtitan, axolotl, verl and DeepSpeed are installed without what they ask for, which is CUDA's and pins of other
libraries; what their tested parts import is named here. ``loops.json`` has the outcome of each test, and pages are
compared with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).with_name("loops.json")


@dataclass(frozen=True)
class Environment:
    """Packages with what they ask for, packages without it, what those import, and the tests."""

    whole: tuple[str, ...]
    alone: tuple[str, ...]
    imports: tuple[str, ...]
    tests: tuple[str, ...]


ENVIRONMENTS = {
    "loops": Environment(
        ("trl==1.16.0", "datasets==5.2.0"), ("torchtitan==0.3.0", "axolotl==0.19.0"),
        ("spmd_types", "tyro", "addict", "torchdata"), ("test_trl", "test_axolotl", "test_titan_override"),
    ),
    "verl": Environment(
        (), ("verl==0.9.1",),
        ("ray", "tensordict<=0.10", "codetiming", "datasets", "dill", "pandas", "omegaconf", "torchdata"),
        ("test_verl",),
    ),
    "deepspeed": Environment(
        (), ("deepspeed==0.19.8",),
        ("einops", "hjson", "msgpack", "ninja", "psutil", "py-cpuinfo", "pydantic"), ("test_deepspeed",),
    ),
}  # fmt: skip
NAMED = tuple(spec for one in ENVIRONMENTS.values() for spec in (*one.whole, *one.alone))
TESTS = tuple(test for one in ENVIRONMENTS.values() for test in one.tests)


def make(name: str) -> Path:
    """The python of an environment, which is made once."""
    wanted, place = ENVIRONMENTS[name], ROOT / "build" / name
    python = place / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        own = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
        (own / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*install, *wanted.whole, *wanted.imports], check=True)
    subprocess.run([*install, "--no-deps", *wanted.alone], check=True)
    return python


def run(python: Path, tests: tuple[str, ...]) -> dict[str, str]:
    """The outcome of each test by its name."""
    report = python.parents[1] / "report.xml"
    files = [str(Path(__file__).with_name(f"{name}.py")) for name in tests]
    where = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, ROOT.glob("plugins/*")), os.environ.get("PYTHONPATH", "")]),
    }
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *files]
    subprocess.run([str(word) for word in command], check=False, cwd=ROOT, env=where)
    outcome: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcome[f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"] = min(kinds, default="passed")
    return outcome


def versions(python: Path, names: Iterable[str]) -> dict[str, str]:
    ask = (
        "import json, sys\n"
        "from importlib import metadata\n"
        "print(json.dumps({name: metadata.version(name) for name in sys.argv[1:]}))"
    )
    told = subprocess.run([python, "-c", ask, *names], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(told.stdout)
    return found


def main() -> None:
    kept: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    for name in sys.argv[1:] or ENVIRONMENTS:
        wanted, python = ENVIRONMENTS[name], make(name)
        packages = [spec.partition("==")[0] for spec in (*wanted.whole, *wanted.alone)]
        kept[name] = {
            "date": date.today().isoformat(),
            "versions": versions(python, [*packages, "torch", "transformers"]),
            "tests": run(python, wanted.tests),
        }
        RESULT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(set(one["tests"].values()) != {"passed"} for one in kept.values()))


if __name__ == "__main__":
    main()
