"""Pages about other loops say what ``make test-loops`` showed."""

from __future__ import annotations

import json
import re

import loops

RESULT = json.loads(loops.RESULT.read_text(encoding="utf-8"))
DONE = {test: outcome for one in RESULT.values() for test, outcome in one["tests"].items()}


def test_every_test_of_other_loops_passed_with_the_versions_of_the_page() -> None:
    assert RESULT.keys() == loops.ENVIRONMENTS.keys()
    assert {name.partition("::")[0] for name in DONE} == set(loops.TESTS)
    assert set(DONE.values()) == {"passed"}
    named = dict(spec.split("==") for spec in loops.NAMED)
    versions = {name: version for one in RESULT.values() for name, version in one["versions"].items()}
    assert {name: versions[name] for name in named} == named
    page = (loops.ROOT / "docs" / "other-loops.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) (\d[\d.]+) \| `test_\w+\.py` ", page, re.MULTILINE))
    assert rows == {name: version for name, version in named.items() if name != "datasets"}


def test_the_result_has_the_tests_that_are_there() -> None:
    run = {name.partition("[")[0] for name in DONE}
    here = loops.RESULT.parent
    there = {
        f"{stem}::{name}"
        for stem in loops.TESTS
        for name in re.findall(r"^def (test_\w+)", (here / f"{stem}.py").read_text(), re.MULTILINE)
    }
    assert run == there
