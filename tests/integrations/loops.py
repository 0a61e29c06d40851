"""Runs the tests with frameworks that ``make install`` does not bring, in an environment of its own; notes the result.

``make test-loops`` runs this. The environment lies in build/loops, and has the packages of .venv below its own.
torchtitan and axolotl are installed without what they ask for, which is CUDA's and pins of other libraries; what their
tested parts import is named here. ``loops.json`` has the outcome of each test, and pages are compared with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "loops"
RESULT = Path(__file__).with_name("loops.json")
WHOLE = ("trl==1.16.0", "datasets==5.2.0")
ALONE = ("torchtitan==0.3.0", "axolotl==0.19.0")
THEIR_IMPORTS = ("spmd_types", "tyro", "addict", "torchdata")
TESTS = ("test_trl", "test_axolotl", "test_titan_override")


def make() -> Path:
    """The python of the environment, which is made once."""
    python = PLACE / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", PLACE], check=True)
        own = Path(sysconfig.get_path("purelib", vars={"base": str(PLACE), "platbase": str(PLACE)}))
        (own / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*install, *WHOLE, *THEIR_IMPORTS], check=True)
    subprocess.run([*install, "--no-deps", *ALONE], check=True)
    return python


def run(python: Path) -> dict[str, str]:
    """The outcome of each test by its name."""
    report = PLACE / "report.xml"
    files = [str(Path(__file__).with_name(f"{name}.py")) for name in TESTS]
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


def main() -> None:
    python = make()
    outcome = run(python)
    names = [spec.partition("==")[0] for spec in (*WHOLE, *ALONE)] + ["torch", "transformers"]
    ask = (
        "import json, sys\n"
        "from importlib import metadata\n"
        "print(json.dumps({name: metadata.version(name) for name in sys.argv[1:]}))"
    )
    versions = json.loads(
        subprocess.run([python, "-c", ask, *names], check=True, capture_output=True, text=True).stdout
    )
    result = {"date": date.today().isoformat(), "versions": versions, "tests": outcome}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(set(outcome.values()) != {"passed"})


if __name__ == "__main__":
    main()
