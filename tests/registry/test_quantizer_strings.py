"""Quantizer strings: the grammar, its errors, and the way back."""

from __future__ import annotations

import dataclasses
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpq import registry
from lpq.registry.errors import GrammarError, OptionError, UnknownFormat
from lpq.registry.grammar import Call, parse, split_items


@pytest.mark.parametrize(
    ("text", "value"), [
        ("true", True), ("False", False), ("none", None), ("1024", 1024), ("-3", -3), ("0.5", 0.5), ("1e-3", 1e-3),
        ("inf", math.inf), ("16x16", "16x16"), ("e4m3", "e4m3"), ("mxfp8", "mxfp8"), ("'true'", "true"), ("''", ""),
        ('"a, b=(c)"', "a, b=(c)"), (r'"say \"hi\""', 'say "hi"'), ("nvfp4()", Call("nvfp4")),
        ("nvfp4(rht=true)", Call("nvfp4", (("rht", True),))),
    ]
)  # fmt: skip
def test_values(text: str, value: object) -> None:
    for spaced in (f"a(x={text})", f"  a ( x\t=\n {text} ) "):
        ((_, found),) = parse(spaced).options
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "problem", "position"), [
        ("", "expected the name of a format", 0), ("(a=1)", "expected the name of a format", 0),
        ("16x16", "expected the name of a format", 0), ("nvfp4(block=16x16 rht=true)", "expected ',' or ')'", 18),
        ("nvfp4(rht=true", "expected ',' or ')'", 14), ("nvfp4(rht=true) x", "expected nothing more", 16),
        ("nvfp4(rht)", "expected '=' after 'rht'", 9), ("nvfp4(rht=)", "expected a value", 10),
        ("nvfp4(rht=true,)", "expected 'key=value'", 15), ("nvfp4(rht=true, rht=false)", "'rht' is given twice", 16),
        ("hybrid(row=mxfp8, col=nvfp4(rht='x)", "expected a value", 32),
    ]
)  # fmt: skip
def test_errors_show_where(text: str, problem: str, position: int) -> None:
    with pytest.raises(GrammarError) as caught:
        parse(text)
    assert (caught.value.problem, caught.value.position) == (problem, position)
    first, line, caret = str(caught.value).split("\n")
    assert first.startswith(f"cannot read {text!r}: {problem} at ")
    assert line.strip() == text
    assert caret.index("^") == position + 2


def test_split_items() -> None:
    text = " fprop=mxfp8, dgrad = nvfp4( rht=true, block=16x16 ) , wgrad=bf16 "
    expected = [("fprop", "mxfp8"), ("dgrad", "nvfp4( rht=true, block=16x16 )"), ("wgrad", "bf16")]
    assert split_items(text) == expected
    for wrong in (
        "",
        "fprop",
        "fprop=",
        "fprop=mxfp8 dgrad=bf16",
        "fprop=mxfp8,",
        "fprop=a, fprop=b",
        "fprop=a(b=1",
    ):
        with pytest.raises(GrammarError):
            split_items(wrong)


words = st.text(alphabet="abe4x16_", min_size=1)
names = st.from_regex(r"\A[a-z_][a-z0-9_]{0,8}\Z")
plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), words, st.text(),
    st.sampled_from(["true", "None", "1", "1e5", "-inf", "nan", "a(b=true)", '"', "\\", "'", "a b", "."]),
)  # fmt: skip


def calls(values: st.SearchStrategy[object]) -> st.SearchStrategy[Call]:
    options = st.dictionaries(names, values, min_size=1, max_size=4)
    return st.builds(lambda name, found: Call(name, tuple(found.items())), names, options)


def exact(value: object) -> object:
    """The value with its types, so that True is not 1 and 1 is not 1.0; and -0.0 is not 0.0."""
    if isinstance(value, Call):
        return value.name, [(key, exact(v)) for key, v in value.options]
    return type(value), repr(value)


@given(calls(st.recursive(plain, calls, max_leaves=5)))
def test_what_is_written_is_read_back(call: Call) -> None:
    assert exact(parse(str(call))) == exact(call)


@given(st.text(alphabet="ab1(=,) '\"\\\n.-"))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        call = parse(text)
    except GrammarError:
        return
    assert str(parse(str(call))) == str(call)


def test_quantizer_and_back(site) -> None:
    for text, canonical in {
        "base": "base",
        " base( ) ": "base",
        "base(block='1x16',rht=false)": "base",
        "base(margin=2, rht=True)": "base(rht=true, margin=2)",
        "base(factor=0.5, block='true')": 'base(block="true", factor=0.5)',
        "base(inner=base(rht=true))": 'base(inner="base(rht=true)")',  # as text, for the format
    }.items():
        made = registry.quantizer(text)
        assert registry.spec_string(made) == canonical
        assert registry.quantizer(canonical) == made
    outer = registry.quantizer("base", inner=registry.quantizer("base(rht=true)"))
    assert registry.spec_string(outer) == "base(inner=base(rht=true))"


def test_a_quantizer_is_made_once_of_a_text(site) -> None:
    assert registry.quantizer("base(rht=true)") is registry.quantizer("base(rht=true)")
    before = registry.quantizer("base(rht=true)")
    registry.refresh()
    assert registry.quantizer("base(rht=true)") is not before


def test_options_beside_the_text(site) -> None:
    assert registry.quantizer("base", rht=True) == registry.quantizer("base(rht=true)")
    assert registry.quantizer("base(rht=true)", margin=1) == registry.quantizer("base(rht=true, margin=1)")
    with pytest.raises(OptionError, match="option 'rht' is given twice"):
        registry.quantizer("base(rht=true)", rht=True)


@pytest.mark.parametrize("text", ["fp8(history=0)", "fp8(history=1.5)", "hybrid(row=mxfp8, col=fp8(history=0))"])
def test_an_option_is_of_the_format_and_not_of_its_class(text: str) -> None:
    with pytest.raises(OptionError, match=r"^fp8: option 'history' must be .*, not"):
        registry.quantizer(text)
    with pytest.raises(OptionError, match=r"^FP8Quantizer: option 'history' must be"):  # made without its name
        registry.quantizer_class("fp8")(history=0)


def test_a_quantizer_is_returned_as_it_is(site) -> None:
    made = registry.quantizer("base", margin=3)
    assert registry.quantizer(made) is made
    with pytest.raises(OptionError, match=r"dataclasses\.replace"):
        registry.quantizer(made, rht=True)
    with pytest.raises(OptionError, match="not 7"):
        registry.quantizer(7)


def test_format_of_a_class(site) -> None:
    cls = registry.quantizer_class("base")
    assert registry.format_of(cls) is registry.format("base")
    assert registry.storage_class("base") is sys.modules["base_quantizer"].FakeStorage

    @dataclasses.dataclass(frozen=True)
    class Derived(cls):
        pass

    with pytest.raises(UnknownFormat, match=r"Derived is the quantizer of no format here.*lpq\.registry\.register"):
        registry.spec_string(Derived())


def test_a_class_named_by_another_path(site) -> None:
    """The import string may lead to a re-export."""
    source = site.format("acme").replace("acme_quantizer", "acme_api")
    api = "import base_quantizer\nclass Inner(base_quantizer.FakeQuantizer): ...\nFakeQuantizer = Inner\n"
    site.install("acme", "1", {"acme": "acme_plugin"}, {"acme_plugin": source, "acme_api": api})
    assert registry.spec_string(registry.quantizer("acme(rht=true)")) == "acme(rht=true)"


def test_values_that_no_text_can_hold(site) -> None:
    with pytest.raises(OptionError, match=r"\(16, 16\) is a tuple"):
        registry.spec_string(registry.quantizer("base", block=(16, 16)))
