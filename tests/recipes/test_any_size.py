"""Patterns, and recipes and policies of any size and depth, and files that are none: fast, or refused in words."""

from __future__ import annotations

import os
import time
from fnmatch import fnmatchcase
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lpq
from lpq.recipes import RecipeError, globs, rules
from lpq.recipes.globs import covers, literal, matches
from lpq.registry import registry
from lpq.registry.errors import LpqError
from lpq.train.config import read
from lpq.train.errors import TrainError

NAMES = ["".join(letters) for length in range(6) for letters in product("ab.", repeat=length)]
PATTERNS = st.lists(st.sampled_from(["a", "b", ".", "*", "?", "[ab]", "[!a]"]), max_size=5).map("".join)


def test_a_star_goes_through_dots() -> None:
    assert matches("layers.*", "layers.0.mlp.up")
    assert matches("*", "")
    assert matches("layers.[01].*", "layers.1.up")
    assert not matches("layers", "layers.0")
    assert not matches("Layers.*", "layers.0")


@given(PATTERNS, PATTERNS)
def test_covering_is_never_claimed_wrongly(a: str, b: str) -> None:
    if covers(a, b):
        assert all(matches(a, name) for name in NAMES if matches(b, name))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("*", "lm_head"), ("*", "*"), ("*", ""), ("layers.*", "layers.0.*"), ("*.mlp.*", "layers.*.mlp.up"),
        ("*head", "lm_head"), ("layers.?.up", "layers.[01].up"), ("layers.[01].up", "layers.1.up"),
        ("a**", "a*"), ("*a*", "*ba*"), ("lm_head", "lm_head"), ("[!a]", "b"), ("a[", "a["),
    ],
)  # fmt: skip
def test_covering_is_seen(a: str, b: str) -> None:
    assert covers(a, b)


@pytest.mark.parametrize(
    ("a", "b"), [
        ("lm_head", "*"), ("?", "*"), ("layers.0.*", "layers.*"), ("[ab]", "?"), ("a*", "*a"), ("", "a"), ("a", ""),
    ]
)  # fmt: skip
def test_not_covering_is_seen(a: str, b: str) -> None:
    assert not covers(a, b)


# ------------------------------------------------------------------------------------------ any size


def test_two_thousand_rules_take_no_time() -> None:
    """They took as many comparisons as there are pairs, each of a fifth of a millisecond."""
    patterns = [f"*.layers.{i}.*" for i in range(1000)] + [f"layers.{i}.*_proj" for i in range(1000)]
    given = [{"match": pattern, "recipe": "mxfp8"} for pattern in patterns]
    before = time.process_time()
    policy = lpq.policy({"rules": given})
    names = [f"model.layers.{i}.mlp" for i in range(100)]
    assert len(policy.unmatched(names)) == 1900
    assert policy.unreached(names) == ()
    assert all(policy.schedule(name).at(0) is not None for name in names)
    assert time.process_time() - before < 6
    with pytest.raises(RecipeError, match=r"rule 8 \('\*\.layers\.7\.\*'\) hides rule 2001 \('m\.layers\.7\.mlp'\)"):
        lpq.policy({"rules": [*given, {"match": "m.layers.7.mlp", "recipe": "mxfp8"}]})


def test_a_rule_for_each_layer_of_many_experts() -> None:
    """Each pattern was compared with each, and each rule made its recipe: 20 seconds."""
    patterns = [f"model.layers.{i // 200}.experts.{i % 200}.up" for i in range(10_000)]
    patterns += [f"*.layers.{i // 200}.*.{i % 200}.down" for i in range(10_000)]
    before = time.process_time()
    lpq.policy({"rules": [{"match": pattern, "recipe": "mxfp8"} for pattern in patterns]})
    assert time.process_time() - before < 4


def test_the_search_for_rules_that_hide_others_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = [f"*{i:03}*.gate_proj.weight" for i in range(300)]
    compared: list[str] = []
    monkeypatch.setattr(rules, "covers", lambda a, b: compared.append(a) or covers(a, b))
    monkeypatch.setattr(rules, "COMPARED", 100)
    policy = lpq.policy({"rules": [{"match": pattern, "recipe": "mxfp8"} for pattern in [*patterns, patterns[0]]]})
    assert len(compared) == 100
    assert 301 in policy.unreached(["000.gate_proj.weight"])  # as the report says then


def test_few_texts_are_kept() -> None:
    before = _kept()  # by tests before this one
    for history in range(1, 700):
        lpq.quantizer(f"fp8(scaling=delayed, history={history})")
    assert max(size - before.get(function, 0) for function, size in _kept().items()) <= registry.FEW


def _kept() -> dict[Any, int]:
    """How many answers of each function are kept."""
    found = registry._REMEMBERED.items()
    return {function: kept.cache_info().currsize for function, kept in found if hasattr(kept, "cache_info")}


@pytest.mark.parametrize(
    ("a", "b", "covered"),
    [
        ("a[bc]d*", "a[bc]de*", True), ("*[ab]*", "xay", True), ("*b]", "x[ab]", False), ("a", "[a]", False),
        ("[[]*", "[", True), ("*", "*", True), ("?", "*", False), ("a*b*c", "axbxc", True), ("*.q", "*.q.*", False),
        ("layers.1*", "layers.10.*", True), ("[a", "[a", True), ("*ab*", "a?b", False),
    ],
)  # fmt: skip
def test_quick_looks_change_no_answer(a: str, b: str, covered: bool) -> None:
    assert covers(a, b) is covered


def test_names_are_matched_as_before() -> None:
    assert matches("a[bc]d*", "abde")
    assert matches("[[]x", "[x")
    assert not matches("a?c", "ac")
    assert matches("*", "")


def test_patterns_that_match_nothing_are_not_compared_with_each_name(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = [*(f"*.{i}.up*_{i}_*" for i in range(500)), "*"]
    policy = lpq.policy({"rules": [{"match": pattern, "recipe": "mxfp8"} for pattern in patterns]})
    names = [f"model.layers.{i}.mlp.up_proj" for i in range(100)]
    compared: list[str] = []
    asked: list[str] = []
    monkeypatch.setattr(globs, "literal", lambda pattern: asked.append(pattern) or literal(pattern))
    monkeypatch.setattr(globs, "fnmatchcase", lambda name, glob: compared.append(name) or fnmatchcase(name, glob))
    assert policy.unmatched(names) == tuple(patterns[:-1])
    assert asked == patterns, "a piece is looked for once for each pattern"
    assert compared == names, "by the last pattern, which has no piece"


@pytest.mark.parametrize("apart", [False, True])
def test_names_of_all_layers_are_compared_with_no_other(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a policy has them for files in which some layers are left out. Each name was compared with each."""
    layers = [f"layers.{i}.mlp.up" for i in range(300)]
    compared: list[str] = []
    for module in (globs, rules):
        monkeypatch.setattr(module, "matches", lambda pattern, name: compared.append(name) or matches(pattern, name))
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(16, 16)})}) for _ in layers)
    model.head = nn.Linear(16, 8)
    named = [[name] for name in layers] if apart else [layers]
    lpq.convert(model, {"rules": [*({"match": one, "recipe": "mxfp8"} for one in named)]})
    assert [entry.name for entry in lpq.report(model).converted] == layers
    assert compared == []
    other = {"rules": [{"match": [*layers[1:], "*.0.mlp.[u]p"], "recipe": "mxfp8"}]}
    assert len(lpq.report(lpq.convert(model, other)).converted) == len(layers)
    assert compared != []


@pytest.mark.parametrize("order", [*permutations(["a.*", "a.b", "*", "c"])])
def test_the_first_rule_wins_whether_its_pattern_is_a_name_or_not(order: tuple[str, ...]) -> None:
    given = zip(order, ["mxfp8", "nvfp4", "fp8-row", "mxfp4"], (1, 2, 3, 4), strict=True)  # none hides a later one
    policy = lpq.policy({"rules": [{"match": match, "recipe": r, "until": until} for match, r, until in given]})
    for name in ("a.b", "a.c", "c", "d"):
        own = [rule for rule in policy.rules if rule.matches(name)]
        assert [*policy.rules_for(name)] == own != []
        assert policy.schedule(name).pieces == (*((rule.until, rule.recipe) for rule in own), (None, None))


def test_a_long_name_is_compared_with_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of ten million letters took 18 seconds, to be told to be too long."""
    monkeypatch.setattr("difflib.get_close_matches", None)
    with pytest.raises(LpqError, match="there is no recipe, policy or format"):
        lpq.recipe("x" * 5000)


def nested(depth: int) -> Any:
    inner: Any = "mxfp8"
    for _ in range(depth):
        inner = {"fprop": inner}
    return inner


@pytest.mark.parametrize(
    "source",
    [
        "fprop=" + "hybrid(row=" * 5000, "x" * 1_000_000, "fprop=" + "x" * 1_000_000, nested(50_000), [nested(50_000)],
        "\n" + "a." * 5000 + "b = 1", "\nfprop = " + "[" * 50_000, {"x" * 100_000: "mxfp8"}, {"fprop": 10**5000},
        {"rules": nested(50_000)}, {"rules": [nested(50_000)]}, {"rules": [{"match": nested(5000), "recipe": "mxfp8"}]},
        {"rules": [{"match": "*" * 2000, "recipe": "mxfp8"}]}, {"rules": [{"match": "*", "recipe": nested(50_000)}]},
        {"rules": [{"match": "*", "recipe": "mxfp8", "until": "9" * 100_000}]}, "\0.toml", "x" * 5000 + ".toml",
    ],
    ids=lambda source: type(source).__name__,
)  # fmt: skip
def test_what_is_too_deep_or_too_long_is_refused_in_words(source: Any) -> None:
    for make in (lpq.recipe, lpq.policy):
        with pytest.raises(LpqError) as caught:
            make(source)
        assert len(str(caught.value)) < 11_000
        assert "Recursion" not in str(caught.value)


def test_what_is_no_ordinary_file_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    (tmp_path / "folder.toml").mkdir()
    with (tmp_path / "huge.toml").open("wb") as file:
        file.truncate(1 << 33)
    (tmp_path / "deep.toml").write_text("a = " + "[" * 50_000)
    words = {
        "pipe": "it is a pipe or a device", "zero": "it is a pipe or a device", "folder": "Is a directory",
        "huge": "it has more than 4 MiB", "deep": "nested deeper",
    }  # fmt: skip
    for name, why in words.items():
        path = tmp_path / f"{name}.toml"
        for make in (lpq.recipe, lpq.policy):
            with pytest.raises(RecipeError, match=why):
                make(path)
        with pytest.raises(TrainError, match=why):
            read(path)
    monkeypatch.chdir(tmp_path)
    Path("fine.toml").write_text("\ufefffprop = 'mxfp8'\ndgrad = 'mxfp8'\nwgrad = 'mxfp8'\n", encoding="utf-8")
    assert lpq.recipe("fine.toml").name == "fine"
