"""Pages about other loops say what ``make test-loops`` showed."""

from __future__ import annotations

import json
import re

import loops


def test_every_test_of_other_loops_passed_with_the_versions_of_the_page() -> None:
    result = json.loads(loops.RESULT.read_text())
    assert {name.partition("::")[0] for name in result["tests"]} == set(loops.TESTS)
    assert set(result["tests"].values()) == {"passed"}
    named = dict(spec.split("==") for spec in (*loops.WHOLE, *loops.ALONE))
    assert {name: result["versions"][name] for name in named} == named
    page = (loops.ROOT / "docs" / "other-loops.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) (\d[\d.]+) \| `test_\w+\.py` ", page, re.MULTILINE))
    assert rows == {name: version for name, version in named.items() if name != "datasets"}


def test_the_result_has_the_tests_that_are_there() -> None:
    result = json.loads(loops.RESULT.read_text())
    run = {name.partition("[")[0] for name in result["tests"]}
    here = loops.RESULT.parent
    there = {
        f"{stem}::{name}"
        for stem in loops.TESTS
        for name in re.findall(r"^def (test_\w+)", (here / f"{stem}.py").read_text(), re.MULTILINE)
    }
    assert run == there
