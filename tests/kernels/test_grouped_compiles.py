"""The grouped product of FP8 compiles for Hopper as it is launched, and keeps its sums in registers."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lpq_fp8 import groups_hopper
from test_csrc_compiles import Macros, run_nvcc

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, which says where values lie")

SUMS = 4 * 64
"""The bytes of a thread's sums of 64 rows."""


def every() -> Iterator[Macros]:
    """Each two macros that go together, in one set at least."""
    for tall, columns, blocks in itertools.product((128, 256), (False, True), groups_hopper.BLOCKS.values()):
        if blocks != 1 or tall == 128:
            yield groups_hopper.macros(tall, columns, blocks, a_e5m2=tall == 128, b_e5m2=tall == 256 and columns)


@pytest.mark.starts
@pytest.mark.parametrize("macros", sorted(set(every())), ids=" ".join)
def test_sums_are_kept_in_registers(macros: Macros, tmp_path: Path) -> None:
    source = groups_hopper.KERNELS[128].source
    done = run_nvcc(source, macros, "sm_90a", tmp_path / "out.cubin", "-Xptxas", "-v")
    assert done.returncode == 0, done.stderr
    (frame,) = re.findall(r"(\d+) bytes stack frame", done.stderr)
    assert int(frame) < SUMS, done.stderr
    assert "serialized" not in done.stderr, "a product waits for the one before it"
