"""The kit finds mistakes: a format that makes one fails the test about it, which says what is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import broken_formats as broken
import hypothesis  # noqa: F401  what a run inside this process may not import a second time
import pytest
import torch

import lpq.nn
from lpq import registry
from lpq.core import Quantizer
from lpq.registry import KernelSpec
from lpq.testing import conformance
from lpq.testing.calls import on
from lpq.testing.conformance import test_kernels as kernels_of_a_format
from lpq.testing.expect import relative_error
from lpq.testing.kernel_checks import compare
from lpq.testing.operands import encode

pytest_plugins = ["pytester"]

Run = Callable[[broken.Plugin, str], pytest.RunResult]

MISTAKES: dict[type[Quantizer], tuple[str, str]] = {
    broken.WrongDtype: (
        "test_encode_fills_the_declared_buffers",
        "WrongDtype.encode returned data as torch.int16; Int8Storage.layout declares torch.int8, block (1, 1)",
    ),
    broken.WrongShape: (
        "test_encode_fills_the_declared_buffers",
        "encode returned scale of shape [[]*[]] for [[]*[]]; Int8Storage.layout declares *, so [[]*, 1[]]",
    ),
    broken.MissingBuffer: (
        "test_encode_fills_the_declared_buffers",
        "MissingBuffer.encode set [[]'data', 'scales'[]]; Int8Storage.layout declares [[]'data', 'scale'[]]",
    ),
    broken.ReturnsNothing: (
        "test_encode_fills_the_declared_buffers",
        "ReturnsNothing.encode returned NoneType and no storage. Remedy: return Int8Storage(data=…, scale=…)",
    ),
    broken.MeasuresNothing: (
        "test_encode_is_pure",
        "MeasuresNothing.measure returned no 'amax', which stats declares. Remedy: return a dict of all of them",
    ),
    broken.SaysThatItIsTheLargest: (
        "test_a_declared_amax_is_one",
        "SaysThatItIsTheLargest.stats declares amax with largest=True, and measure returned another value",
    ),
    broken.Dithers: ("test_encode_is_pure", "encoding the same matrix a second time, the buffer 'data'"),
    broken.ChangesItsInput: ("test_encode_is_pure", "encode changed its input"),
    broken.RankLocal: ("test_parts_are_encoded_as_in_the_whole", "with statistics reduced over parts"),
    broken.HidesNaN: ("test_non_finite_is_never_silently_finite", "comes back as"),
    broken.LosesTheScale: ("test_error_is_bounded", "the relative RMS error of normal values is"),
    broken.ThreeBits: ("test_error_is_bounded", "of normal values is 0.*; 8.* bits an element allow 0.06"),
    broken.BoundedButLost: ("test_error_is_bounded", "of normal values is 0.*; its error_bound is 0.3500"),
    broken.BoundlessThreeBits: ("test_error_is_bounded", "its error_bound is 2.0000, which holds for values that were"),
    broken.LosesTheTop: ("test_large_values_overflow", "of values near 4.25e+37 the relative RMS error is 1.0000; 8"),
    broken.TransposesByReshape: (
        "test_transposed_is_the_operand_of_the_transpose",
        "TensorStorage.transposed of",
    ),
}


@pytest.fixture
def run(pytester: pytest.Pytester) -> Iterator[Run]:
    """Run those tests of the kit that an expression selects on a format."""

    def check(plugin: broken.Plugin, select: str) -> pytest.RunResult:
        registry.register(plugin, name="broken")
        wanted = select.split(" or ")  # only their files are collected
        files = {getattr(conformance, t).__module__ for t in conformance.__all__ if any(word in t for word in wanted)}
        options = ["--pyargs", *sorted(files), "--lpq-format=broken", "-k", select, "-rA", "--tb=short"]
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", *options)

    yield check
    registry.refresh()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda cls: cls.__name__)
def test_a_mistake_is_found_and_named(run: Run, mistake: type[Quantizer]) -> None:
    test, message = MISTAKES[mistake]
    storage = broken.TensorStorage if mistake is broken.TransposesByReshape else broken.Int8Storage
    result = run(broken.Plugin(mistake, storage), test)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"*{message}*"])


def test_the_same_tests_pass_on_a_right_format(run: Run) -> None:
    """The negative control: INT8 as it should be fails none of them."""
    result = run(broken.Plugin(broken.Int8), " or ".join({test for test, _ in MISTAKES.values()}))
    assert result.ret == pytest.ExitCode.OK
    assert result.parseoutcomes()["passed"] >= len(MISTAKES)


def test_a_transpose_that_is_not_there_is_found_before_any_test(run: Run) -> None:
    result = run(broken.Plugin(broken.SaysTransposable), "test_transposed")
    words = "broken is declared transposable, and Int8Storage has no transposed(). Remedy: define Int8Storage.tr"
    result.stdout.fnmatch_lines([f"*{words}*"])


def test_wrong_bits_are_found(run: Run) -> None:
    result = run(broken.Plugin(broken.Int8, effective_bits=4), "test_effective_bits")
    result.stdout.fnmatch_lines(["*the spec has effective_bits=4; the layout takes 8.008 bits an element*"])


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


def test_a_kernel_that_transposes_leaves_rows_next_to_each_other() -> None:
    """Though the reference may return views."""
    side, x = lpq.quantizer("fp8"), torch.randn(32, 48)
    right, turned = (
        KernelSpec(op="transpose", impl=f"broken_formats:{name}", backend="torch", device="cpu")
        for name in ("transposing_kernel", "turned_transpose")
    )
    assert compare(right, side, None, x, "cpu")
    with pytest.raises(AssertionError, match="has strides"):
        compare(turned, side, None, x, "cpu")


def test_kernels_are_compared_with_poisoned_outputs(run: Run) -> None:
    """A kernel that leaves a row unwritten is found; one that is right passes, one that cannot run is skipped."""
    wrong = run(broken.Plugin(broken.Int8, kernels=(broken.cpu_kernel("wrong_kernel"),)), "test_kernels_equal")
    wrong.stdout.fnmatch_lines(["*torch kernel broken_formats:wrong_kernel on broken*elements differ*"])
    for name, words in (("turned_kernel", "has strides"), ("keeping_kernel", "shares memory with another")):
        wrong = run(broken.Plugin(broken.Int8, kernels=(broken.cpu_kernel(name),)), "test_kernels_equal")
        wrong.stdout.fnmatch_lines([f"*{name} on broken*{words}*"])
    right = run(broken.Plugin(broken.Int8, kernels=(broken.cpu_kernel("right_kernel"),)), "test_kernels_equal")
    right.assert_outcomes(passed=1, skipped=1)
    absent = broken.cpu_kernel("right_kernel", requires=("a_library_that_is_not_there",))
    skipped = run(broken.Plugin(broken.Int8, kernels=(absent,)), "test_kernels_equal")
    skipped.assert_outcomes(skipped=2)
    skipped.stdout.fnmatch_lines(["*right_kernel: needs a_library_that_is_not_there, which is not installed*"])


WRONG = {
    "hasty_kernel": ("decode", "a part of an operand*elements differ"),
    "writing_kernel": ("decode", "it changed what it was given"),
    "narrow_kernel": ("decode", "normal values, to torch.float32, output 0: * elements differ"),
    "own_dtype_kernel": ("decode", "to torch.float32, output 0: it is torch.bfloat16 and must be torch.float32"),
    "dense_kernel": ("decode", "[[]5, 77[]] torch.bfloat16, normal values*elements differ"),
    "losing_kernel": ("decode", "one inf*elements differ"),
    "clipping_kernel": ("decode", "numbers of all sizes*elements differ"),
    "forgetful_quantize": ("quantize", "it returned 4 tensors and must return 6"),
    "deaf_quantize": ("quantize", "those of another matrix given, output * elements differ"),
    "demanding_quantize": ("quantize", "IndexError*"),
    "seeded_quantize": ("quantize", "'NoneType' object has no attribute 'data_ptr'"),
    "flat_quantize": ("quantize", "a transposed matrix*elements differ"),
    "unbiased_gemm": ("gemm", "normal values, as torch.float32, bias True, fast_accumulate True: it is not the same"),
    "half_biased_gemm": ("gemm", "bias True, fast_accumulate False: it is not the same, by"),
    "wide_gemm": ("gemm", "it is torch.float32 and must be torch.bfloat16"),
    "swapped_gemm": ("gemm", "[[]512, 256[]], not [[]256, 512[]]"),
    "hasty_gemm": ("gemm", "[[]64, 0[]] torch.bfloat16, normal values*: it must be zero"),
    "rounded_gemm": ("gemm", "as torch.float32, bias False, fast_accumulate False: it is not the same, by"),
    "losing_exact": ("exact", "one inf: what is not finite in one is finite in the other"),
}
"""Kernels that are right for most of what they are called with, for what operation, and what is said of each."""


@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_is_right_for_most_only_is_found(run: Run, name: str) -> None:
    op, words = WRONG[name]
    result = run(broken.Plugin(broken.Int8, kernels=(broken.cpu_kernel(name, op),)), "test_kernels_equal")
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines([f"*{words}*"])


def test_a_kernel_that_rounds_measures_what_it_rounded(run: Run) -> None:
    for name, failed in (("rounding_quantize", 0), ("half_rounding_quantize", 1)):
        kernel = broken.cpu_kernel(name, "quantize", rounds=True)
        result = run(broken.Plugin(broken.Int8, kernels=(kernel,)), "test_kernels_equal")
        result.assert_outcomes(passed=1 - failed, failed=failed, skipped=1)
        if failed:
            result.stdout.fnmatch_lines(["*rounded to torch.bfloat16, its statistics asked for, output * differ*"])


def test_a_kernel_that_is_passed_over_beside_one_that_serves_is_told(run: Run) -> None:
    absent = broken.cpu_kernel("wrong_kernel", requires=("a_library_that_is_not_there",))
    result = run(broken.Plugin(broken.Int8, kernels=(broken.cpu_kernel("right_kernel"), absent)), "test_kernels_equal")
    result.assert_outcomes(passed=1, skipped=1, warnings=1)
    words = "not compared with the reference: broken_formats:wrong_kernel: needs a_library_that_is_not_there"
    result.stdout.fnmatch_lines([f"*{words}*"])


IDLE: dict[str, tuple[type[Quantizer], str, str]] = {
    "exact": (broken.Int8, "idle_exact", "it has no exact form of any operand that it was given"),
    "exact_tile": (broken.Int8, "idle_tile", "nothing was made by it of any matrix, though it accepts these operands"),
    "tile": (broken.Int8, "idle_tile", "no other built-in format has an operand to make beside its own"),
    "transpose": (broken.Int8, "transposing_kernel", "no quantizer that was tried has operands for it"),
    "measure": (broken.Unscaled, "idle_measure", "it accepts these operands, and made nothing of them"),
}
"""Kernels of which nothing can be compared, though none says why not, and what is said of each."""


@pytest.mark.parametrize("op", IDLE)
def test_a_kernel_of_which_nothing_is_compared_has_not_passed(
    run: Run, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it is skipped, and beside one that is compared it is told."""
    monkeypatch.setattr(
        "lpq.operations.fused_pair.why_not", lambda row, col: "not on a CPU"
    )  # it asks which GPU there is
    quantizer, name, words = IDLE[op]
    idle = broken.cpu_kernel(name, op)
    alone = run(broken.Plugin(quantizer, kernels=(idle,)), "test_kernels_equal")
    alone.assert_outcomes(skipped=2)
    alone.stdout.fnmatch_lines([f"*{name}: {words}*"])
    beside = run(broken.Plugin(quantizer, kernels=(broken.cpu_kernel("right_kernel"), idle)), "test_kernels_equal")
    beside.assert_outcomes(passed=1, skipped=1, warnings=1)
    beside.stdout.fnmatch_lines([f"*not compared with the reference: broken_formats:{name}: {words}*"])


def test_a_kernel_that_serves_some_shapes_only_is_compared_there(run: Run) -> None:
    kernel = broken.cpu_kernel("choosy_exact", "exact")
    run(broken.Plugin(broken.Int8, kernels=(kernel,)), "test_kernels_equal").assert_outcomes(passed=1, skipped=1)


@pytest.mark.parametrize("op", ["decode", "quantize", "gemm", "exact"])
def test_a_kernel_that_is_right_for_all_passes(run: Run, op: str) -> None:
    """The control."""
    name = "right_kernel" if op == "decode" else f"right_{op}"
    result = run(broken.Plugin(broken.Int8, kernels=(broken.cpu_kernel(name, op),)), "test_kernels_equal")
    result.assert_outcomes(passed=1, skipped=1)


def test_kernels_in_triton_are_compared_where_triton_interprets_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where nothing can tell one of them from other functions."""
    options = {"backend": "triton", "device": "cuda", "min_sm": 75}
    wrong, right = (
        broken.Plugin(broken.Int8, kernels=(dataclasses.replace(broken.cpu_kernel(name), **options),))
        for name in ("wrong_kernel", "right_kernel")
    )
    monkeypatch.setattr(kernels_of_a_format, "triton_interprets", lambda: False)
    run(wrong, "test_kernels_equal").assert_outcomes(skipped=2)
    # Not by the variable: what imports Triton meanwhile would be interpreted in all tests that follow.
    monkeypatch.setattr(kernels_of_a_format, "triton_interprets", lambda: True)
    run(wrong, "test_kernels_equal").stdout.fnmatch_lines(["*triton kernel broken_formats:wrong_kernel on*differ*"])
    run(right, "test_kernels_equal").assert_outcomes(passed=1, skipped=1)


def test_a_kernel_that_is_not_where_its_spec_says_is_found_without_its_hardware(run: Run) -> None:
    absent = {"device": "cuda", "requires": ("a_library_that_is_not_there",)}
    for impl, words in (
        ("broken_formats:rihgt_kernel", "'broken_formats:rihgt_kernel' cannot be imported: *rihgt_kernel*"),
        ("broken_kernels:right_kernel", "'broken_kernels:right_kernel' cannot be imported: *broken_kernels*"),
        ("broken_formats:__name__", "'broken_formats:__name__', which is 'broken_formats' and cannot be called*"),
    ):
        kernel = dataclasses.replace(broken.cpu_kernel("right_kernel"), impl=impl, **absent)
        wrong = run(broken.Plugin(broken.Int8, kernels=(kernel,)), "test_import_strings")
        wrong.assert_outcomes(failed=1)
        wrong.stdout.fnmatch_lines([f"*{words}"])
    for fields, words in (
        (
            {"op": "transpose"},
            "'broken_formats:right_kernel': it cannot be called as Transpose, with (operand): *",
        ),
        (
            {"rounds": True, "op": "quantize"},
            "'broken_formats:right_kernel': it cannot be called as Quantize, with (*",
        ),
        ({"op": "gemm", "bind": "broken_formats:nothing"}, "'broken_formats:nothing' cannot be imported: *nothing*"),
    ):
        impl = "broken_formats:unbiased_gemm" if fields["op"] == "gemm" else "broken_formats:right_kernel"
        kernel = dataclasses.replace(broken.cpu_kernel("right_kernel"), impl=impl, **(absent | fields))
        wrong = run(broken.Plugin(broken.Int8, kernels=(kernel,)), "test_import_strings")
        wrong.stdout.fnmatch_lines([f"*{words}"])
        wrong.assert_outcomes(failed=1)
    there = dataclasses.replace(broken.cpu_kernel("right_kernel"), **absent)
    needy = dataclasses.replace(there, impl="a_library_that_is_not_there.kernels:decode")
    run(broken.Plugin(broken.Int8, kernels=(there, needy)), "test_import_strings").assert_outcomes(passed=1)


def test_known_failures_are_expected_and_listed(run: Run) -> None:
    result = run(broken.Plugin(broken.NoZero), "test_zeros_stay or test_known")
    result.assert_outcomes(passed=1, xfailed=1)
    result.stdout.fnmatch_lines(["*XFAIL*test_zeros_stay_zeros*this grid has no zero*"])


def test_an_error_bound_of_its_own(run: Run) -> None:
    """Three bits in a byte, with the bound that they keep, pass everything that is about errors."""
    tests = ["test_error_is_bounded", "test_ragged_edges", "test_large_values", "test_what_it_represents"]
    result = run(broken.Plugin(broken.HonestThreeBits), " or ".join(tests))
    result.assert_outcomes(passed=10)


def test_known_failures_may_depend_on_options(run: Run) -> None:
    result = run(broken.Plugin(broken.MaybeNoZero), "test_zeros_stay or test_known")
    result.assert_outcomes(passed=3, xfailed=1)
    result.stdout.fnmatch_lines(["*XFAIL*broken(zero=false)*without zero=true this grid has no zero*"])


def test_a_broken_format_of_somebody_else_is_met_by_none(run: Run, pytester: pytest.Pytester) -> None:
    """Neither one whose module is no Python nor one that encodes to what it does not declare."""
    pytester.makepyfile(no_python="def (")
    pytester.syspathinsert()
    sad, wrong = broken.Plugin(broken.Int8), broken.Plugin(broken.WrongDtype)
    sad.spec = dataclasses.replace(sad.spec, name="sad", quantizer="no_python:Sad")
    wrong.spec = dataclasses.replace(wrong.spec, name="wrong")
    for plugin in (sad, wrong):
        registry.register(plugin, name=plugin.spec.name)
    assert {"sad", "wrong"} <= set(registry.formats())
    result = run(broken.Plugin(broken.Int8), "test_column_operand_from or test_each_side")
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=8)


def test_a_known_failure_must_fail(run: Run) -> None:
    result = run(broken.Plugin(broken.Pessimist), "test_zeros_stay")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*it is said*"])


def test_a_known_failure_must_be_a_test(run: Run) -> None:
    result = run(broken.Plugin(broken.Misspelt), "test_known")
    result.stdout.fnmatch_lines(["*'test_zeroes_stay_zeros' is no test of the kit: did you mean 'test_zeros_*"])


def test_the_kit_asks_for_a_format(pytester: pytest.Pytester) -> None:
    assert lpq.nn  # imported here, not inside the run
    kit = ["--pyargs", "lpq.testing.conformance.test_layout", "-p", "no:cacheprovider", "-p", "no:xdist"]
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
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "--collect-only", "-q"]
    for asked in (["--pyargs", "lpq.testing.conformance", "--lpq-format=mxfp8()"], ["test_mine.py"]):
        ran = pytester.runpytest_inprocess(*options, *asked)
        tests = [line.partition("::")[2].partition("[")[0] for line in ran.outlines if "::" in line]
        own = [test for test in tests if test in ("test_a", "test_z")]
        assert own == (["test_a", "test_z"] if asked == ["test_mine.py"] else [])
        kit = [test for test in tests if test not in own]
        assert kit[0] == "test_error_is_bounded"
        assert kit.index("test_encode_is_pure") < kit.index("test_views_stay_quantized")
        assert set(kit[-2:]) == {"test_compiled_layer_is_the_layer", "test_compile_without_a_break"}


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
