"""FP8: its bytes against the golden file and an independent implementation, its options, its state."""

from __future__ import annotations

import itertools
import math

import fp8_oracle as oracle
import numpy as np
import pytest
import torch
from nasty import DTYPES, GOLDEN, normal, values
from support.comparing import equal_operands
from torch._subclasses.fake_tensor import FakeTensorMode

import lpq
from lpq.core import transpose
from lpq.registry.errors import OptionError

SCALINGS = {
    "scaling=current": (None, None), "scaling=delayed": (None, None), "scaling=row": (1, None),
    "scaling=block": (1, 128), "scaling=block, block=128x128": (128, 128),
}  # fmt: skip
ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
every_scaling = pytest.mark.parametrize("scaling", SCALINGS)
every_element = pytest.mark.parametrize("element", ELEMENTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def quantizer(scaling: str, **options: object):
    return lpq.quantizer(f"fp8({scaling})", **options)


# ------------------------------------------------------------------------------ golden bytes

ENCODINGS = {
    **{
        f"fp8_current_{element}{suffix}": f"fp8(dtype={element}, pow2={pow2})"
        for element in ELEMENTS
        for suffix, pow2 in (("", "false"), ("_pow2", "true"))
    },
    **{f"fp8_block_{block}": f"fp8(scaling=block, block={block})" for block in ("1x128", "128x128")},
}


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_golden_bytes(golden, name: str, encoding: str) -> None:
    expected = golden.buffers(name, encoding)
    row = lpq.quantizer(ENCODINGS[encoding]).quantize(golden.inputs[name]).row
    assert list(expected) == list(row.buffers()) == ["data", "scale"]
    assert torch.equal(row.data.view(torch.uint8), expected["data"])
    assert torch.equal(row.scale.view(torch.int32), expected["scale"].view(torch.int32))


def test_the_golden_file_has_nothing_else_of_this_format(golden) -> None:
    assert set(golden.inputs) == set(GOLDEN)
    assert {key.split("/")[1] for key in golden if "/fp8" in key} == set(ENCODINGS)


@pytest.mark.parametrize(("encoding", "other"), [*itertools.pairwise(ENCODINGS)])
def test_golden_bytes_tell_the_options_apart(golden, encoding: str, other: str) -> None:
    row = lpq.quantizer(ENCODINGS[other]).quantize(golden.inputs["normal"]).row
    assert not torch.equal(row.data.view(torch.uint8), golden.buffers("normal", encoding)["data"])


# ------------------------------------------------------------------------------ the definition


@pytest.mark.parametrize("scaling", [scaling for scaling in SCALINGS if scaling != "scaling=delayed"])
@every_element
@every_dtype
def test_bytes_equal_an_independent_implementation(scaling: str, element: str, dtype: torch.dtype) -> None:
    """With powers of two for scales and without in turn."""
    pow2 = (DTYPES.index(dtype) + [*ELEMENTS].index(element)) % 2 == 1
    q = quantizer(scaling, dtype=element, pow2=pow2)
    for name, x in values(dtype).items():
        row = q.quantize(x).row
        block = tuple(step or size for step, size in zip(SCALINGS[scaling], x.shape, strict=True))
        codes, scales = oracle.encode(
            x.float().numpy(), block, element, pow2=pow2,
            when_infinite=torch.finfo(dtype).max if "block" in scaling else oracle.FLT_MAX,
        )  # fmt: skip
        assert np.array_equal(row.data.view(torch.uint8).numpy(), codes), name
        assert row.scale.shape == (scales.shape if SCALINGS[scaling][0] else ()), name
        assert np.array_equal(row.scale.numpy().reshape(scales.shape), scales), name
        rows, cols = (np.arange(size) // step for size, step in zip(x.shape, block, strict=True))
        with np.errstate(over="ignore"):
            decoded = oracle.decode(codes, element) * scales[rows][:, cols]
        assert np.array_equal(row.decode().numpy(), decoded, equal_nan=True), name


@every_element
@pytest.mark.parametrize("pow2", [False, True])
def test_every_amax_has_the_right_scale(element: str, pow2: bool) -> None:
    exponents = torch.arange(-149.0, 128.0)
    amaxes = torch.cat([torch.exp2(exponents) * m for m in (1, 1.0000001, 1.3166, 1.3217, 1.75, 1.9999999)])
    amaxes = torch.cat([amaxes, torch.tensor([torch.finfo(torch.float32).max, 1e-45, 0.0])])
    row = lpq.quantizer("fp8", scaling="row", dtype=element, pow2=pow2).quantize(amaxes[:, None]).row
    scales = [oracle.encode_scale(amax, element, pow2=pow2, when_infinite=oracle.FLT_MAX) for amax in amaxes.numpy()]
    assert np.array_equal(row.scale.numpy()[:, 0], np.float32(1) / np.array(scales))
    assert row.scale.isfinite().all()
    assert (row.scale > 0).all()


# ------------------------------------------------------------------------------ layouts and laws


@every_scaling
def test_scales_of_tensors_and_of_squares_make_it_transposable(scaling: str) -> None:
    assert quantizer(scaling).transposable == (SCALINGS[scaling] in ((None, None), (128, 128)))


def test_the_transpose_of_one_column_owns_its_bytes() -> None:
    t = lpq.quantizer("fp8").quantize(normal(5, 1))
    held = [b.untyped_storage().data_ptr() for s in (t.row, t.col) for b in s.tensors()]
    assert len(set(held)) == 4


# ------------------------------------------------------------------------------ delayed scaling


def simulated(amaxes: list[float], history: int, margin: int, algo: str) -> list[np.float32]:
    """The amax that scales each step, by hand: 0 at first, then from what earlier steps measured."""
    used, remembered, scaling_amax = [], [], np.float32(0)
    for amax in amaxes:
        used.append(scaling_amax)
        remembered = [np.float32(amax), *remembered][:history]
        with np.errstate(over="ignore", under="ignore"):
            recent = max(remembered) if algo == "max" else remembered[0]
            wanted = np.float32(recent * np.float32(2.0**margin))
        if any(math.isnan(a) for a in (remembered if algo == "max" else remembered[:1])):
            wanted = np.float32(np.nan)
        if np.isfinite(wanted) and wanted > 0:
            scaling_amax = wanted
    return used


SEQUENCES = {
    "growing": [1.0, 2.0, 5.0, 9.0, 20.0], "falling": [64.0, 30.0, 7.0, 2.0, 1.0, 0.5, 0.25],
    "zeros": [0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 2.0], "overflow": [3.0, math.inf, 2.0, 1.0, 1.0, 1.0, 1.0],
    "nan": [3.0, math.nan, 2.0, 1.0, 1.0, 1.0, 1.0], "extremes": [1e38, 1e-45, 3e38, 1e-38],
}  # fmt: skip


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize(("history", "margin"), [(1, 2), (3, 0), (1024, -1)])
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_delayed_scaling_follows_its_history(algo: str, history: int, margin: int, sequence: str) -> None:
    q = lpq.quantizer("fp8", scaling="delayed", history=history, margin=margin, algo=algo)
    state = q.new_state()
    held = {name: t.data_ptr() for name, t in state.items()}
    assert {name: tuple(t.shape) for name, t in state.items()} == {"amax_history": (history,), "amax": ()}
    measured = SEQUENCES[sequence]
    for step, used in enumerate(simulated(measured, history, margin, algo)):
        amax = measured[step]
        x = torch.tensor([[0.0, -amax, amax / 2]])
        t = q.quantize(x, state=state)
        scale = np.float32(1) / oracle.encode_scale(used, "e4m3", pow2=False, when_infinite=oracle.FLT_MAX)
        assert t.row.scale.numpy() == scale
        assert equal_operands(transpose(t.row), t.col)
        newest_first = np.array(measured[step::-1], dtype=np.float32)[:history]
        remembered = state["amax_history"].numpy()[: len(newest_first)]
        assert np.array_equal(remembered, newest_first, equal_nan=True)
    assert {name: t.data_ptr() for name, t in state.items()} == held, "it is written in place"


def test_without_a_state_delayed_is_current() -> None:
    x = normal(16, 48)
    assert equal_operands(lpq.quantizer("fp8(scaling=delayed)").quantize(x).row, lpq.quantizer("fp8").quantize(x).row)


def test_remembering_needs_no_values() -> None:
    q = lpq.quantizer("fp8(scaling=delayed)")
    meta = q.new_state("meta")
    q.remember(meta, {"amax": torch.empty((), device="meta")})
    with FakeTensorMode():
        state = q.new_state()
        t = q.quantize(torch.empty(8, 8), state=state)
        assert (t.row.scale.shape, state["amax"].shape) == ((), ())


def test_only_delayed_scaling_has_state() -> None:
    assert [s for s in SCALINGS if quantizer(s).new_state()] == ["scaling=delayed"]


# ------------------------------------------------------------------------------ options and recipes


def test_every_option_has_the_documented_default() -> None:
    explicit = "fp8(scaling=current, dtype=e4m3, block=1x128, history=1024, margin=0, algo=max)"
    assert lpq.quantizer(explicit) == lpq.quantizer("fp8")
    assert str(lpq.quantizer(explicit)) == "fp8"
    options = "dtype=e5m2, pow2=false, block=128x128, history=8, margin=1, algo=most_recent"
    everything = f"fp8(scaling=block, {options})"
    assert str(lpq.quantizer(everything)) == everything


@every_scaling
def test_scales_are_powers_of_two_by_default_in_blocks_only(scaling: str) -> None:
    x = normal(256, 256)
    by_default, asked, declined = (quantizer(scaling, pow2=p).quantize(x).row for p in (None, True, False))
    assert (asked.scale.frexp().mantissa == 0.5).all()
    assert (declined.scale.frexp().mantissa != 0.5).all()
    assert equal_operands(by_default, asked if "block" in scaling else declined)


def test_an_option_that_the_scaling_does_not_use_changes_nothing() -> None:
    x = normal(130, 140)
    unused = {"block": "128x128", "history": 3, "margin": 5, "algo": "most_recent"}
    for scaling in ("current", "row"):
        assert equal_operands(
            lpq.quantizer("fp8", scaling=scaling, **unused).quantize(x).row,
            lpq.quantizer("fp8", scaling=scaling).quantize(x).row,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaling": "rows"}, "'scaling' must be 'current' or 'delayed' or 'row' or 'block', not 'rows'"),
        ({"dtype": "e3m4"}, "'dtype' must be 'e4m3' or 'e5m2', not 'e3m4'"),
        ({"pow2": "yes"}, "'pow2' must be true or false or none, not 'yes'"),
        ({"block": "16x16"}, "'block' must be '1x128' or '128x128', not '16x16'"),
        ({"history": 0}, "'history' must be at least 1, not 0"),
        ({"history": 1.5}, "'history' must be a whole number, not 1.5"),
        ({"margin": 128}, "'margin' must be from -127 to 127, not 128"),
        ({"algo": "mean"}, "'algo' must be 'max' or 'most_recent', not 'mean'"),
        ({"scale": "row"}, "fp8 has no option 'scale': did you mean 'scaling'"),
    ],
)
def test_wrong_options_are_refused_in_words(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        lpq.quantizer("fp8", **options)


RECIPES = {
    "fp8-current": ("fp8", "fp8", "fp8(dtype=e5m2)"),
    "fp8-delayed": ("fp8(scaling=delayed)", "fp8(scaling=delayed)", "fp8(scaling=delayed, dtype=e5m2)"),
    "fp8-row": ("fp8(scaling=row)",) * 3,
    "fp8-block": ("fp8(scaling=block)", "fp8(scaling=block, block=128x128)", "fp8(scaling=block)"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str) -> None:
    recipe = lpq.recipe(name)
    assert (str(recipe.x), str(recipe.w), str(recipe.dy)) == RECIPES[name]
    assert recipe.name == name
