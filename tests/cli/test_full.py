"""``--full``: nothing is grouped, counted or cut that a command otherwise puts together."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from lpq import registry

REASON = "runs on cuda, not on cpu"


def test_doctor_gives_each_operation_a_row_and_each_kernel_its_reason(lpq: Callable) -> None:
    found = json.loads(lpq("doctor", "--device", "cpu", "--json").out)
    served = [*found["kernels"], *found["pairs"]]
    short, full = (lpq("doctor", "--device", "cpu", *more).out for more in ((), ("--full",)))
    reasons = [f"{entry['impl']}: {entry['reason'].partition(' (')[0]}" for s in served for entry in s["why_not"]]
    assert len(reasons) > 50
    for reason in set(reasons):
        assert full.count(reason) == reasons.count(reason)
        assert reason not in short
    rows = [line.split() for line in full.splitlines()]
    for operation in ("measure", "gemm", "grouped_gemm"):
        assert sum(operation in row for row in rows) == sum(s["op"] == operation for s in served)
    assert "\nremember: the statistics of a step" in full


@pytest.mark.parametrize(("command", "rows"), [(("explain", "fp8-current"), 3), (("doctor", "fp8"), 1)], ids=str)
def test_steps_that_run_alike_have_rows_of_their_own(lpq: Callable, command: tuple[str, ...], rows: int) -> None:
    short, full = (lpq(*command, "--device", "cpu", *more).out for more in ((), ("--full",)))
    kernel = "cuda lpq_fp8.cuda:quantize"
    assert (short.count(f"{kernel}, "), short.count(f"{kernel}: {REASON}")) == (1, 0)
    assert (full.count(f"{kernel}, "), full.count(f"{kernel}: {REASON}")) == (0, rows)


def test_plugins_are_listed_with_what_they_bring(lpq: Callable) -> None:
    short, full = (lpq("plugins", *more).out for more in ((), ("--full",)))
    for plugin in registry.plugins():
        for name in (*plugin.recipes, *(f"{k.op}: {k.backend} {k.impl}" for k in plugin.kernels)):
            assert name in full
    assert "fp8-row-bf16-wgrad" not in short
