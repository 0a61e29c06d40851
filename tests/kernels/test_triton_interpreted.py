"""The Triton kernels equal the references bit for bit, as far as a CPU can tell: run by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

triton = pytest.importorskip("triton", reason="needs Triton, which lpq installs where there is a wheel of it")
OLD = pytest.mark.skipif(
    Version(triton.__version__) < Version("3.9"),
    reason="the interpreter of Triton before 3.9 cannot run a loop up to a tensor with NumPy 2.4",
)

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(("interpreted.py", "interpreted_quickly.py", "interpreted_sources.py"), id="interpreted.py"),
        pytest.param(("interpreted_norms.py",), id="interpreted_norms.py", marks=OLD),
    ],
)
def test_in_a_process_with_the_interpreter(cases: tuple[str, ...]) -> None:
    files = [str(HERE / name) for name in cases]
    command = [sys.executable, "-m", "pytest", *files, "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
