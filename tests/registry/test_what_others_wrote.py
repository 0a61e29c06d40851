"""Words from files, callers and packages' metadata are shown, and never obeyed, in a message of a few lines."""

from __future__ import annotations

import pytest

from lpq import registry
from lpq.registry.errors import GrammarError, LpqError, OptionError, PluginError, UnknownFormat
from lpq.registry.grammar import LONGEST, parse, split_items
from lpq.registry.loader import HERE, PluginSource
from lpq.registry.showing import DISTRIBUTION, brief, pip, printable

HOSTILE = ("acme; rm -rf ~", "--index-url=http://evil acme", "-r x", "acme evil", "git+https://evil/x", "a\nb", "", "é")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_command_has_only_names_that_were_checked(name: str) -> None:
    assert DISTRIBUTION.fullmatch(name) is None
    assert pip("install", [name], "find it") == "find it"
    assert pip("uninstall", ["acme", name], "find it") == "find it"
    source = PluginSource("acme", name, "1.0", "acme_module", lambda: None)
    missing = ModuleNotFoundError("gone", name=name)
    for error in (source.import_error("acme_module", missing), source.import_error("acme_module", ValueError("no"))):
        assert "pip" not in error.remedy
    assert "pip" in PluginSource("acme", "acme-lpq", "1.0", "m", lambda: None).other_version
    assert PluginSource("acme", HERE, "", "m", lambda: None).other_version == "fix it and register it again"


def test_each_of_several_commands_is_one() -> None:
    assert pip("uninstall", ["acme-one", "Acme_2.x"], "") == "pip uninstall acme-one or pip uninstall Acme_2.x"


def test_nothing_in_a_message_steers_the_terminal() -> None:
    text = "\x1b]0;owned\x07 \x1b[2J a\u202eb\r\nnext\tline é → 数"
    shown = str(LpqError(text))
    assert shown == printable(text) == r"\x1b]0;owned\x07 \x1b[2J a\u202eb\r" + "\nnext\tline é → 数"
    error = PluginError("ac\x1bme", "d\x07", "1\x9b", "cause\x1b", "remedy\x1b")
    assert all(c.isprintable() for c in str(error))
    with pytest.raises(GrammarError) as caught:
        parse("mxfp8(\x1b[2J")
    assert all(c.isprintable() or c == "\n" for c in str(caught.value))


@pytest.mark.parametrize(
    "text", [
        "mxfp8(" + "a=mxfp8(" * 2000, "mxfp8(" + "a=" * 200_000, "m" * 1_000_000, "mxfp8(dtype=" + "9" * 5000 + ")",
        "mxfp8(dtype=" + "x" * 400 + ")", 'mxfp8(dtype="' + "x" * 9000 + '")', "hybrid(row=" * 17 + "mxfp8" + ")" * 17,
        "m" * 300,
    ], ids=len
)  # fmt: skip
def test_a_text_of_any_depth_or_length_is_refused_in_words(text: str) -> None:
    with pytest.raises((OptionError, UnknownFormat)) as caught:
        registry.quantizer(text)
    assert len(str(caught.value)) < 2000
    assert "RecursionError" not in str(caught.value)


def test_what_is_as_long_as_allowed_is_read() -> None:
    items = ", ".join(f"key{i}={'x' * 250}" for i in range(38))
    assert len(items) < LONGEST
    assert len(split_items(items)) == 38
    assert len(parse(f"a({items})").options) == 38
    deep = "a(b=" * 15 + "c" + ")" * 15
    assert str(parse(deep)) == deep


def test_a_value_of_any_depth_is_shown_in_brief() -> None:
    deep: object = "x"
    for _ in range(100_000):
        deep = [deep]
    assert len(brief(deep)) < 100
    with pytest.raises(OptionError, match="a quantizer is wanted") as caught:
        registry.quantizer(deep)
    assert len(str(caught.value)) < 300
