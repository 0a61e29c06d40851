"""The conformance kit under pytest, and what it says of kernels; mistakes of formats are in ``test_mistakes.py``."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator

import broken_formats as broken
import broken_kernels
import hypothesis  # noqa: F401  what a run inside this process may not import a second time
import pytest
import torch
from broken_kernels import cpu_kernel
from kit_runs import modules_with

import lpq.nn
from lpq import registry
from lpq.registry import KernelSpec
from lpq.testing import kernel_checks
from lpq.testing.calls import on
from lpq.testing.conformance import test_import_strings_of_kernels as check_import_strings
from lpq.testing.conformance import test_kernels_equal_the_reference as check_kernels
from lpq.testing.expect import relative_error
from lpq.testing.kernel_checks import check_of, compared
from lpq.testing.operands import encode
from lpq.testing.options import family

pytest_plugins = ["pytester"]

Run = Callable[[broken.Plugin, str], pytest.RunResult]
IN_PROCESS = ("-p", "no:cacheprovider", "-p", "no:xdist")
ABSENT = {"requires": ("a_library_that_is_not_there",)}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    registry.refresh()


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Run those tests of the kit that an expression selects on a format."""

    def check(plugin: broken.Plugin, select: str) -> pytest.RunResult:
        registry.register(plugin, name="broken")
        options = ["--pyargs", *modules_with(select), "--lpq-format=broken", "-k", select, "-rA", "--tb=short"]
        return pytester.runpytest_inprocess(*IN_PROCESS, *options)

    return check


RUNS: dict[str, tuple[broken.Plugin, str, dict[str, int], str]] = {
    "a known failure is expected and listed": (
        broken.Plugin(broken.NoZero), "test_zeros_stay or test_known", {"passed": 1, "xfailed": 1},
        "XFAIL*test_zeros_stay_zeros*this grid has no zero",
    ),
    "it may depend on options": (
        broken.Plugin(broken.MaybeNoZero), "test_zeros_stay or test_known", {"passed": 3, "xfailed": 1},
        "XFAIL*broken(zero=false)*without zero=true this grid has no zero",
    ),
    "it must fail": (broken.Plugin(broken.Pessimist), "test_zeros_stay", {"failed": 1}, "XPASS(strict)*it is said"),
    "it must be a test": (
        broken.Plugin(broken.Misspelt), "test_known", {"failed": 1},
        "'test_zeroes_stay_zeros' is no test of the kit: did you mean 'test_zeros_*",
    ),
    "three bits in a byte with the bound that they keep": (
        broken.Plugin(broken.HonestThreeBits),
        "test_error_is_bounded or test_ragged_edges or test_large_values or test_what_it_represents",
        {"passed": 10}, "",
    ),
    "a transpose that is not there": (
        broken.Plugin(broken.SaysTransposable), "test_transposed", {"errors": 2},
        "broken is declared transposable, and Int8Storage has no transposed(). Remedy: define Int8Storage.tr",
    ),
    "wrong bits": (
        broken.Plugin(broken.Int8, effective_bits=4), "test_effective_bits", {"failed": 1},
        "the spec has effective_bits=4; the layout takes 8.008 bits an element",
    ),
    "a kernel that cannot run": (
        broken.Plugin(broken.Int8, kernels=(cpu_kernel("right_kernel", **ABSENT),)), "test_kernels_equal",
        {"skipped": 1}, "right_kernel: needs a_library_that_is_not_there, which is not installed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_a_run_ends_as_it_must(case: str, run: Run) -> None:
    plugin, select, outcomes, words = RUNS[case]
    result = run(plugin, select)
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines([f"*{words}*"])


def test_operands_are_encoded_where_the_matrix_is() -> None:
    """Random bits too, or no kernel of a GPU could be compared."""
    quantizer = lpq.quantizer("nvfp4(stochastic=true)")
    made = encode(quantizer, torch.empty(32, 32, device="meta"))
    assert {t.device.type for t in made.tensors()} == {"meta"}


def test_what_a_kernel_is_called_with_keeps_its_strides_and_its_place() -> None:
    """On a device, too: ``to`` closes the gaps of a slice, and the case would be another one."""
    x = torch.randn(40, 100)
    for given in (x[1:34, 3:83], x[:20].t(), x[:0], x[3, 3], x):
        (moved,), (operand, _) = on("meta", [given]), on("meta", (encode(lpq.quantizer("fp8"), x), 3))
        for one, other in ((moved, given), (operand.data, encode(lpq.quantizer("fp8"), x).data)):
            assert one.is_meta
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            assert one.storage_offset() == other.storage_offset()
    assert x[1:34, 3:83].to("meta").stride() != x[1:34, 3:83].stride()


# ---------------------------------------------------------------------------------------------- kernels


def said_of(*kernels: KernelSpec, quantizer: type = broken.Int8, check: Callable[..., None] = check_kernels) -> str:
    """The words of a test of the kit on a format with these kernels on the CPU: none where all is right."""
    registry.register(broken.Plugin(quantizer, kernels=kernels), name="broken")
    of_format = family("broken")
    try:
        for kernel in compared(of_format.default) if check is check_kernels else ():
            check(of_format, kernel)
        if check is not check_kernels:
            check(of_format)
    except (Exception, pytest.skip.Exception) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def assert_says(text: str, words: str) -> None:
    assert fnmatch.fnmatchcase(text, f"*{words}*"), text


@pytest.mark.parametrize("name", broken_kernels.MISTAKES)
def test_a_kernel_that_is_right_for_most_only_is_found(name: str) -> None:
    """Its outputs are poisoned, so that one which leaves a row unwritten is found as well."""
    op, words = broken_kernels.MISTAKES[name]
    assert_says(said_of(cpu_kernel(name, op)), words)


@pytest.mark.parametrize("op", ["decode", "quantize", "gemm", "exact"])
def test_a_kernel_that_is_right_for_all_passes(op: str) -> None:
    """The control; one that serves some shapes only is compared there."""
    assert said_of(cpu_kernel("right_kernel" if op == "decode" else f"right_{op}", op)) == ""
    assert op != "exact" or said_of(cpu_kernel("choosy_exact", op)) == ""


def test_a_kernel_that_transposes_leaves_rows_next_to_each_other() -> None:
    """Though the reference may return views."""
    side, x = lpq.quantizer("fp8"), torch.randn(32, 48)
    right, turned = (cpu_kernel(name, "transpose") for name in ("transposing_kernel", "turned_transpose"))
    assert check_of(right).compare(right, side, None, x, "cpu", "normal values")
    with pytest.raises(AssertionError, match="has strides"):
        check_of(turned).compare(turned, side, None, x, "cpu", "normal values")


def test_a_kernel_that_rounds_measures_what_it_rounded() -> None:
    assert said_of(cpu_kernel("rounding_quantize", "quantize", rounds=True)) == ""
    said = said_of(cpu_kernel("half_rounding_quantize", "quantize", rounds=True))
    assert_says(said, "rounded to torch.bfloat16, its statistics asked for, output * differ")


def test_one_launch_for_several_matrices_is_compared_for_each() -> None:
    def said(name: str) -> str:
        return said_of(cpu_kernel("right_quantize", "quantize", several=f"broken_kernels:{name}_several"))

    assert said("right") == ""
    assert_says(
        said("forgetful"), "the matrix of [[]1, 1[]] among several, rounded to torch.bfloat16, output 0: * differ"
    )
    assert_says(
        said("precise"), "the matrix of [[]256, 512[]] among several, rounded to torch.bfloat16, output * differ"
    )


IDLE: dict[str, tuple[type, str, str]] = {
    "exact": (broken.Int8, "idle_exact", "it has no exact form of any operand that it was given"),
    "exact_tile": (broken.Int8, "idle_tile", "nothing was made by it of any matrix, though it accepts these operands"),
    "tile": (broken.Int8, "idle_tile", "no other built-in format has an operand to make beside its own"),
    "transpose": (broken.Int8, "transposing_kernel", "no quantizer that was tried has operands for it"),
    "measure": (broken.Unscaled, "idle_measure", "it accepts these operands, and made nothing of them"),
}
"""Kernels of which nothing can be compared, though none says why not, and what is said of each."""


@pytest.mark.parametrize("op", IDLE)
def test_a_kernel_of_which_nothing_is_compared_has_not_passed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is skipped, in words."""
    why_not = "lpq.operations.fused_pair.why_not"
    monkeypatch.setattr(why_not, lambda row, col: "not on a CPU")  # it asks which GPU there is
    quantizer, name, words = IDLE[op]
    idle = cpu_kernel(name, op)
    assert_says(said_of(idle, quantizer=quantizer), f"Skipped: broken_kernels:{name}: {words}")


def test_kernels_in_triton_are_compared_where_triton_interprets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where nothing can tell one of them from other functions. Not by the variable: what imports Triton
    meanwhile would be interpreted in all tests that follow."""
    wrong, right = (
        dataclasses.replace(cpu_kernel(name), backend="triton", device="cuda", min_sm=75)
        for name in ("wrong_kernel", "right_kernel")
    )
    monkeypatch.setattr(kernel_checks, "triton_interprets", lambda: False)
    assert_says(said_of(wrong), "Skipped: there is no CUDA device here")
    monkeypatch.setattr(kernel_checks, "triton_interprets", lambda: True)
    assert_says(said_of(wrong), "triton kernel broken_kernels:wrong_kernel on*differ")
    assert said_of(right) == ""


STRINGS: list[tuple[dict[str, object], str]] = [
    ({"impl": "broken_kernels:rihgt"}, "'broken_kernels:rihgt' cannot be imported: *rihgt"),
    ({"impl": "kernels_of_nobody:right"}, "'kernels_of_nobody:right' cannot be imported: *kernels_of_nobody"),
    ({"impl": "broken_kernels:__name__"}, "'broken_kernels:__name__', which is 'broken_kernels' and cannot be called"),
    ({"op": "transpose"}, "'broken_kernels:right_kernel': it cannot be called as Transpose, with (operand): "),
    ({"op": "quantize", "rounds": True}, "'broken_kernels:right_kernel': it cannot be called as Quantize, with ("),
    (
        {"op": "gemm", "impl": "broken_kernels:unbiased_gemm", "bind": "broken_kernels:nothing"},
        "'broken_kernels:nothing' cannot be imported: *nothing",
    ),
]  # fmt: skip


def test_a_kernel_that_is_not_where_its_spec_says_is_found_without_its_hardware() -> None:
    there = dataclasses.replace(cpu_kernel("right_kernel"), device="cuda", **ABSENT)
    for fields, words in STRINGS:
        assert_says(said_of(dataclasses.replace(there, **fields), check=check_import_strings), words)
    needy = dataclasses.replace(there, impl="a_library_that_is_not_there.kernels:decode")
    assert said_of(there, needy, check=check_import_strings) == ""


# ---------------------------------------------------------------------------------------------- others


def test_a_broken_format_of_somebody_else_is_met_by_none(run: Run, pytester: pytest.Pytester) -> None:
    """Neither one whose module is no Python nor one that encodes to what it does not declare."""
    pytester.makepyfile(no_python="def (")
    pytester.syspathinsert()
    registry.register(broken.Plugin(broken.Int8, names="sad", quantizer="no_python:Sad"), name="sad")
    registry.register(broken.Plugin(broken.WrongDtype, names="wrong"), name="wrong")
    assert {"sad", "wrong"} <= set(registry.formats())
    result = run(broken.Plugin(broken.Int8), "test_column_operand_from or test_each_side")
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=10)


def test_the_kit_asks_for_a_format(pytester: pytest.Pytester) -> None:
    assert lpq.nn  # imported here, not inside the run
    kit = ["--pyargs", "lpq.testing.conformance.test_layout", *IN_PROCESS]
    result = pytester.runpytest_inprocess(*kit)
    result.stdout.fnmatch_lines(["*the conformance kit must know what to test: --lpq-format FORMAT*"])
    result = pytester.runpytest_inprocess(*kit, "--lpq-format", "mxfp9")
    result.stdout.fnmatch_lines(["*'mxfp9'*did you mean 'mxfp8'*"])


def test_what_finds_most_runs_first_and_what_compiles_last(pytester: pytest.Pytester) -> None:
    """In the kit itself and in a module that takes it in, whose own tests keep their places."""
    pytester.makepyfile(
        test_mine="def test_a(): pass\nfrom lpq.testing.conformance import *\nlpq_formats = ['mxfp8()']\n"
        "def test_z(): pass\n"
    )
    for asked in (["--pyargs", "lpq.testing.conformance", "--lpq-format=mxfp8()"], ["test_mine.py"]):
        ran = pytester.runpytest_inprocess(*IN_PROCESS, "--collect-only", "-q", *asked)
        tests = [line.partition("::")[2].partition("[")[0] for line in ran.outlines if "::" in line]
        own = [test for test in tests if test in ("test_a", "test_z")]
        assert own == (["test_a", "test_z"] if asked == ["test_mine.py"] else [])
        kit = [test for test in tests if test not in own]
        assert kit[0] == "test_encode_is_pure"
        assert kit.index("test_error_is_bounded") < kit.index("test_views_stay_quantized")
        assert set(kit[-2:]) == {"test_compiled_layer_is_the_layer", "test_compile_without_a_break"}


def test_no_warning_of_torchs_own_fails_a_format(pytester: pytest.Pytester) -> None:
    """A plugin's author may have pytest take warnings as errors."""
    kit = ("--pyargs", "lpq.testing.conformance.test_linear", "--lpq-format=mxfp8()", "-k", "compiled")
    pytester.runpytest_inprocess(*IN_PROCESS, "-W", "error", *kit).assert_outcomes(passed=1, deselected=8)


def test_two_gradients_of_zeros_are_equal() -> None:
    """As those of a format that remembers nothing yet may be; what is zero on one side alone is not equal."""
    zeros, ones = torch.zeros(3, 4), torch.ones(3, 4)
    assert relative_error(zeros, zeros) == 0.0
    assert relative_error(ones, zeros) == float("inf")
    assert relative_error(zeros, ones) == 1.0
    assert not relative_error(zeros, ones * float("nan")) < 1.0


def test_other_tests_are_left_alone(pytester: pytest.Pytester) -> None:
    """A test of somebody else may have arguments of the same names."""
    pytester.makepyfile("""
        import pytest

        @pytest.fixture
        def quantizer():
            return 3

        def test_mine(quantizer):
            assert quantizer == 3
    """)
    pytester.runpytest_inprocess("-p", "no:xdist").assert_outcomes(passed=1)
