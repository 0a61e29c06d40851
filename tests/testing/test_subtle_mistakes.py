"""The kit finds mistakes that show for some matrices only, each by the test about it, which says what is wrong."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

import hypothesis  # noqa: F401  what a run inside this process may not import a second time
import pytest
import subtle_formats as subtle
import subtle_matrices as matrices
import subtle_rotations as rotations

from lpq import registry
from lpq.core import Quantizer
from lpq.testing import conformance  # with all that it imports, for the same reason
from lpq.testing.options import family

pytest_plugins = ["pytester"]

PARTS = "test_parts_are_encoded_as_in_the_whole"
PURE = "test_encode_is_pure"
BACK = "test_values_come_back"
STRIDES = "test_strides_do_not_matter"
SAME_NUMBERS = "test_the_same_numbers_give_the_same_bytes"
PRODUCTS = "test_products_are_those_of_decoded_operands"
MISTAKES: dict[type[Quantizer], tuple[str, str]] = {
    subtle.SharesRows: (PARTS, "rows *, of the * of a row operand *: statistic 'amax' *differ"),
    subtle.SharesTiles: (PARTS, "of the 13440 of a row operand *: statistic 'amax' * whatever the size*differ"),
    subtle.SharesSevens: (PARTS, "rows *, of the * of a row operand *: statistic 'amax' *differ"),
    subtle.SharesMany: (PARTS, "rows *, of the * of a row operand *: statistic 'amax' *differ"),
    subtle.MeasuresByNines: (
        PARTS,
        "columns *, of the * of a col operand *: statistic 'amax' *differ",
    ),
    subtle.GrowsBySevens: (PARTS, "let no value share one beyond its block*differ"),
    subtle.SharesBlocks: (PARTS, "columns *, *buffer 'data': * elements differ"),
    subtle.IgnoresItsPlace: (PARTS, "(take scales from stats, * buffer 'data': * elements differ"),
    subtle.HidesFarNaN: (
        "test_non_finite_is_never_silently_finite",
        "nan at [[]0, 128[]] of *comes back as 0; it must",
    ),
    subtle.TransposeHidesNaN: (
        "test_non_finite_is_never_silently_finite",
        "*, after transposed(); it must come back as",
    ),
    subtle.TransposesRows: (
        "test_transposed_is_right_for_every_matrix",
        "of buffers that are transposed views, *buffer 'data': * elements differ",
    ),
    subtle.WritesWhereNaN: (
        "test_encode_is_pure",
        "a NaN in torch.bfloat16: encode changed its input; compute with a copy",
    ),
    subtle.ClampsItsStatistics: (
        "test_encode_is_pure",
        "a matrix *: encode writes to the statistic 'amax', here",
    ),
    subtle.LosesTheTiny: ("test_error_is_bounded", "8.* bits an element allow 0.06*: of 9.31e-10 times normal values"),
    subtle.ClipsTheTop: (
        "test_large_values_overflow_or_survive",
        "of values near 3.39e+38 the relative RMS error is",
    ),
    subtle.ForgetsTheWide: (
        "test_ragged_edges_do_no_harm",
        "column 1024 of a matrix [[]5, 1025[]] *: encode the whole",
    ),
    subtle.ForgetsTheRest: ("test_ragged_edges_do_no_harm", "column * of a matrix *: encode the whole"),
    subtle.Fp16ByBf16: (
        "test_the_same_numbers_give_the_same_bytes",
        "in torch.float16, *, beside the same numbers in torch.f",
    ),
    subtle.RoundsTiesUp: (
        "test_ties_go_either_way",
        "ties above zero are rounded away from zero, the others towards it",
    ),
    subtle.RoundsTwice: (
        "test_ties_go_either_way",
        "beside the middle of * and *, comes back as *: do not round x to a shorter dtype",
    ),
    subtle.RaisedByZeros: (
        "test_parts_of_a_master_are_cast_as_the_whole",
        "the larger statistic 'amax', which zeros may not raise*differ",
    ),
    subtle.NeverMoves: (
        "test_state_follows_the_tensor",
        "NeverMoves.recall gives the same statistics as before, after 8",
    ),
    subtle.Wraps: (
        "test_values_beyond_what_is_remembered_saturate",
        "beyond the * that its state remembers, comes back as",
    ),
    subtle.Drifts: (
        "test_stochastic_rounding_is_unbiased",
        "the mean of 64 roundings lies +0.* upward; at most 0.1 of it",
    ),
    subtle.CutsTheLargest: (
        "test_the_mean_of_many_roundings_is_the_matrix",
        "leave room for scales that are rounded down, so that no element is cut",
    ),
    subtle.SameBits: (
        "test_directions_draw_bits_of_their_own",
        "that of the same matrix, correlate by 1.00; they must be",
    ),
    matrices.KeepsMemory: (
        PURE,
        "[[]601, 1103[]] *: the buffer 'data' changed when another matrix was encoded; make it in",
    ),
    matrices.KeepsStatistics: (PURE, "[[]601, 1103[]] *: the statistic 'amax' changed when another matrix was encoded"),
    matrices.KeepsDecoded: (PURE, "[[]601, 1103[]] *: what decode returned changed when another matrix was encoded"),
    matrices.TurnsSquares: (
        BACK,
        "a matrix [[]256, 256[]] *, has the relative error *treat each size, dtype and place alike",
    ),
    matrices.TurnsTiles: (BACK, "a matrix [[]256, 256[]] *, has the relative error *treat each size"),
    matrices.ForgetsTheTall: (BACK, "a matrix [[]65601, 9[]] *: row * has the relative error 1.000"),
    matrices.ForgetsLastRows: (BACK, "a matrix [[]601, 1103[]] *"),
    matrices.ScalesByStride: (STRIDES, "encoding the same values from a view (transposed), beside a copy of it"),
    matrices.ReadsRows: (STRIDES, "encoding the same values from a view (transposed), beside a copy of it"),
    matrices.ReadsColumns: (
        STRIDES,
        "encoding the same values from a view (every other row and column), beside a copy",
    ),
    matrices.ForgetsTheExpanded: (STRIDES, "encoding an expanded view (one number, expanded), beside a copy of it"),
    matrices.ShrinksFarRows: (PARTS, "decoded alone and in the whole (decode each element by its block alone)"),
    matrices.DecodesRows: (STRIDES, "decoding buffers that are transposed views"),
    matrices.FlushesHalves: (SAME_NUMBERS, "in torch.float16, values near *, beside the same numbers in torch.float32"),
    matrices.MissesACorner: (
        BACK,
        "in torch.bfloat16, *an outlier in the last row and column*measure the whole matrix",
    ),
    matrices.TakesTheDefault: (
        "test_the_default_dtype_does_not_matter",
        "torch's default dtype bf16 (give each new tensor",
    ),
    subtle.NeverWraps: ("test_state_follows_the_tensor", "the same statistics as before, after 35 steps with a tensor"),
    subtle.NeverForgets: (
        "test_a_spike_is_forgotten",
        "8 steps after one whose tensor was a thousand times as large, recall still gives",
    ),
    subtle.LosesTheSmall: (
        "test_small_values_are_kept_on_average",
        "is off by 1.00 of it; at most 0.15 is chance: round up with the probability",
    ),
    rotations.ForgetsTheOption: (
        PRODUCTS,
        "(flip=true) is off by *: let rotation_options name each option that changes",
    ),
    rotations.Signed: (PRODUCTS, "(steps=2) is off by 2.*: let rotation_options name each option that changes it"),
}


@pytest.fixture
def registered() -> Iterator[None]:
    formats = (*MISTAKES, subtle.OneShape, subtle.SaysThatItLosesTheTiny, subtle.MisspeltCase)
    registry.register(subtle.Plugin(*formats), name="subtle")
    registry.register(subtle.Plugin(*subtle.RIGHT), name="right")
    yield
    registry.refresh()


class Only:
    """Leaves out the tests of which nothing is asked: formats that make a mistake run the test about it alone."""

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if wanted(item.nodeid)]


def wanted(nodeid: str) -> bool:
    """Whether a test is that about the mistake of its format, or its format is right."""
    test, format = nodeid.partition("::")[2].split("[", 1)
    name = re.split(r"[(\]-]", format)[0]
    about = {subtle.name_of(quantizer): own for quantizer, (own, _) in MISTAKES.items()}
    return about.get(name, test) == test


def reports(pytester: pytest.Pytester, select: str, *quantizers: type[Quantizer]) -> list[pytest.TestReport]:
    """Return the reports on some formats of those tests of the kit that an expression selects."""
    asked = [f"--lpq-format={subtle.name_of(quantizer)}" for quantizer in quantizers]
    options = ["--pyargs", "lpq.testing.conformance", *asked, "-k", select, "--tb=short"]
    ran = pytester.inline_run("-p", "no:cacheprovider", "-p", "no:xdist", *options, plugins=[Only()])
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
        name = subtle.name_of(quantizer)
        said = [report.longreprtext for report in failed if f"::{test}[" in report.nodeid and name in report.nodeid]
        if not any(fnmatch.fnmatchcase(" ".join(text.split()), f"*{words}*") for text in said):
            missed[quantizer.__name__] = said or f"it passes {test}"
        assert all(f"{test} asks for this: " in text for text in said)
    assert missed == {}
    for quantizer in subtle.RIGHT:
        name = f"{subtle.name_of(quantizer)}"
        mine = [report for report in ran if f"[{name}]" in report.nodeid or f"[{name}-" in report.nodeid]
        assert len(mine) > len(tests) / 2
        assert [report.nodeid for report in mine if report.failed] == []


@pytest.mark.usefixtures("registered")
def test_what_is_compiled_for_one_shape_is_found() -> None:
    """Called, not run: what a compiler imports may not be imported a second time. The formats that ship are the
    control."""
    with pytest.raises(RuntimeError, match=r"as dynamic but your code specialized it to be a constant"):
        conformance.test_compile_without_a_break(family(subtle.name_of(subtle.OneShape)))


@pytest.mark.usefixtures("registered")
def test_one_case_of_a_test_may_be_a_known_failure(pytester: pytest.Pytester) -> None:
    """The other cases must pass, and a case that there is not is named."""
    said, misspelt = subtle.SaysThatItLosesTheTiny, subtle.MisspeltCase
    ran = reports(pytester, "test_error_is_bounded or test_known", said, misspelt)
    mine = {report.nodeid: report for report in ran if subtle.name_of(said) in report.nodeid}
    expected = [nodeid.partition("[")[2] for nodeid, report in mine.items() if hasattr(report, "wasxfail")]
    assert expected == [f"{subtle.name_of(said)}-tiny]"]
    assert sorted(report.outcome for report in mine.values()) == ["passed"] * 4 + ["skipped"]
    failed = [report for report in ran if report.failed]
    assert [report.nodeid.partition("::")[2] for report in failed] == [
        f"test_known_failures_name_tests[{subtle.name_of(misspelt)}]"
    ]
    assert "'test_error_is_bounded[tinny]' is no case of test_error_is_bounded: did you mean 'tiny'?" in str(
        failed[0].longreprtext
    )


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
