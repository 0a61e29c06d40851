"""The kit finds mistakes of formats, each by the test about it, which says what is wrong."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

import hypothesis  # noqa: F401  what a run inside this process may not import a second time
import pytest
import subtle_formats as subtle
from broken_formats import MISTAKES, Plugin
from kit_runs import modules_with

from lpq import registry
from lpq.core import Quantizer
from lpq.testing import conformance  # with all that it imports, for the same reason
from lpq.testing.options import family

pytest_plugins = ["pytester"]


def name_of(quantizer: type[Quantizer]) -> str:
    """Return a format's name here."""
    return f"{'right' if quantizer in subtle.RIGHT else 'subtle'}_{quantizer.__name__.lower()}"


@pytest.fixture
def registered() -> Iterator[None]:
    """All formats. A format that makes a mistake has a plugin of its own, for a format is multiplied with the others of
    its plugin."""
    for quantizer in (*MISTAKES, subtle.OneShape, subtle.SaysThatItLosesTheTiny, subtle.MisspeltCase):
        registry.register(Plugin(quantizer, names="subtle_{}", effective_bits=None), name=name_of(quantizer))
    registry.register(Plugin(*subtle.RIGHT, names="right_{}", effective_bits=None), name="right")
    yield
    registry.refresh()


class Only:
    """Leaves out the tests of which nothing is asked: formats that make a mistake run the test about it alone."""

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if wanted(item.nodeid)]


def wanted(nodeid: str) -> bool:
    """Whether a test is about the mistake of its format, or its format is right."""
    test, format = nodeid.partition("::")[2].split("[", 1)
    name = re.split(r"[(\]-]", format)[0]
    about = {name_of(quantizer): own for quantizer, (own, _) in MISTAKES.items()}
    return about.get(name, test) == test


def reports(pytester: pytest.Pytester, select: str, *quantizers: type[Quantizer]) -> list[pytest.TestReport]:
    """Return the reports on some formats of the tests of the kit that an expression selects."""
    asked = [f"--lpq-format={name_of(quantizer)}" for quantizer in quantizers]
    options = ["--pyargs", *modules_with(select), *asked, "-k", select, "--tb=short"]
    off = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:logging")
    ran = pytester.inline_run(*off, *options, plugins=[Only()])
    made = ran.getreports("pytest_runtest_logreport")
    return [one for one in made if one.when == "call"]


@pytest.mark.usefixtures("registered")
@pytest.mark.slow
def test_each_mistake_is_found_by_the_test_about_it(pytester: pytest.Pytester) -> None:
    """One run for all of them; the right formats beside them pass."""
    tests = {test for test, _ in MISTAKES.values()}
    ran = reports(pytester, " or ".join(tests), *MISTAKES, *subtle.RIGHT)
    failed = [report for report in ran if report.failed]
    missed: dict[str, object] = {}
    for quantizer, (test, words) in MISTAKES.items():
        places = tuple(f"::{test}[{name_of(quantizer)}{end}" for end in "]-(")
        said = [report.longreprtext for report in failed if any(place in report.nodeid for place in places)]
        if not any(fnmatch.fnmatchcase(" ".join(text.split()), f"*{words}*") for text in said):
            missed[quantizer.__name__] = said or f"it passes {test}"
        assert all(f"{test} asks for this: " in text for text in said if "AssertionError" in text)
    assert missed == {}
    for quantizer in subtle.RIGHT:
        name = name_of(quantizer)
        mine = [report for report in ran if f"[{name}]" in report.nodeid or f"[{name}-" in report.nodeid]
        assert len(mine) > len(tests) / 2
        assert [report.nodeid for report in mine if report.failed] == []


@pytest.mark.usefixtures("registered")
def test_what_is_compiled_for_one_shape_is_found() -> None:
    """Called, not run: what a compiler imports may not be imported a second time. The formats that ship are the
    control."""
    with pytest.raises(RuntimeError, match=r"as dynamic but your code specialized it to be a constant"):
        conformance.test_compile_without_a_break(family(name_of(subtle.OneShape)))


@pytest.mark.usefixtures("registered")
def test_one_case_of_a_test_may_be_a_known_failure(pytester: pytest.Pytester) -> None:
    """The other cases must pass, and a case that there is not is named."""
    said, misspelt = name_of(subtle.SaysThatItLosesTheTiny), name_of(subtle.MisspeltCase)
    ran = reports(pytester, "test_error_is_bounded or test_known", subtle.SaysThatItLosesTheTiny, subtle.MisspeltCase)
    mine = {report.nodeid: report for report in ran if said in report.nodeid}
    expected = [nodeid.partition("[")[2] for nodeid, report in mine.items() if hasattr(report, "wasxfail")]
    assert expected == [f"{said}-tiny]"]
    assert sorted(report.outcome for report in mine.values()) == ["passed"] * 4 + ["skipped"]
    (failed,) = [report for report in ran if report.failed]
    assert failed.nodeid.partition("::")[2] == f"test_known_failures_name_tests[{misspelt}]"
    words = "'test_error_is_bounded[tinny]' is no case of test_error_is_bounded: did you mean 'tiny'?"
    assert words in str(failed.longreprtext)


def test_every_assertion_of_the_kit_has_words() -> None:
    """``assert 0.579 < 0.5`` tells nobody anything."""
    kit = Path(conformance.__path__[0])
    files = [*kit.glob("*.py"), kit.parent / "expect.py"]
    assert len(files) > 10
    bare = [
        f"{path.name}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert) and node.msg is None
    ]
    assert bare == []
