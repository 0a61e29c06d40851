"""The kit reduces the statistics of a format as ranks do: counts by sum, and a second round by what the first is."""

from __future__ import annotations

import counted_format
import hypothesis  # noqa: F401  what a run inside this process may not import a second time
import pytest

from lpq import registry
from lpq.testing import conformance  # noqa: F401  with all that it imports, for the same reason

pytest_plugins = ["pytester"]


def test_the_kit_reduces_counts_and_rounds(pytester: pytest.Pytester) -> None:
    counted_format.register()
    tests = "test_parts_are_encoded or test_ranks_encode or test_declarations or pure"
    options = ["--pyargs", "lpq.testing.conformance", "--lpq-format=counted", "-k", tests]
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", *options)
    registry.refresh()
    assert result.ret == pytest.ExitCode.OK
    assert result.parseoutcomes()["passed"] >= 6
