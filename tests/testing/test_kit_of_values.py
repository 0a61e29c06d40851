"""Formats whose buffers hold several numbers for each block pass the conformance kit."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis  # noqa: F401  what a run inside this process may not import a second time
import pytest
import value_formats

from lpq import registry
from lpq.testing import conformance  # noqa: F401  with all that it imports, for the same reason

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    value_formats.register()
    yield
    registry.refresh()


@pytest.mark.starts
def test_they_pass_the_kit(pytester: pytest.Pytester) -> None:
    formats = ["--lpq-format=values_codebook", "--lpq-format=values_eight"]
    ran = pytester.inline_run(
        "-p", "no:cacheprovider", "-p", "no:xdist", "--pyargs", "lpq.testing.conformance", *formats,
        "--tb=short",
    )  # fmt: skip
    made = [report for report in ran.getreports("pytest_runtest_logreport") if report.when == "call"]
    assert [report.nodeid for report in made if report.failed] == []
    assert sum(report.passed for report in made) > 200
