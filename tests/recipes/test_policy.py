"""Policies: which recipe a layer has at which step, how they are kept, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
import tomllib
import warnings
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lpq
from lpq.recipes import Policy, Recipe, RecipeError, Rule
from lpq.registry import shipped
from lpq.registry.errors import UnknownRecipe

MXFP8, NVFP4, BF16 = (lpq.recipe(name) for name in ("mxfp8", "nvfp4", "bf16"))
PAPER = {
    "rules": [
        {"match": ["lm_head", "embed*"], "recipe": "skip"},
        {"match": "layers.0.*", "recipe": "mxfp8"},
        {"match": "*", "recipe": "nvfp4", "until": 0.85},
        {"match": "*", "recipe": "bf16"},
    ]
}


def policy(*rules: tuple[object, ...]) -> Policy:
    return Policy(tuple(Rule(*rule) for rule in rules))


# ---------------------------------------------------------------------------------- which recipe, when


def test_the_first_match_wins_by_layer_and_step() -> None:
    paper = lpq.policy(PAPER)
    assert paper.schedule("lm_head", 100).pieces == ((None, None),)
    assert paper.schedule("layers.0.up", 100).pieces == ((None, MXFP8),)
    assert paper.schedule("layers.1.up", 100).pieces == ((85, NVFP4), (None, BF16))
    schedule = paper.schedule("layers.1.up", 100)
    assert [schedule.at(step) for step in (0, 84, 85, 10**9)] == [NVFP4, NVFP4, BF16, BF16]


HALVES = ((("a*",), MXFP8, 10), (("*b",), NVFP4, 5), (("ab",), MXFP8, 20), (("*b", "c"), None, 30))


@pytest.mark.parametrize(
    ("rules", "layer", "pieces"),
    [
        (((("*",), MXFP8, 10),), "up", ((10, MXFP8), (None, None))),  # after its last rule a layer is left alone
        (((("up",), MXFP8),), "down", ((None, None),)),
        (((("*",), None, 3), (("*",), NVFP4)), "up", ((3, None), (None, NVFP4))),  # and may be so first
        (HALVES, "ab", ((20, MXFP8), (None, None))),  # pieces that say nothing are left out
        (HALVES, "b", ((5, NVFP4), (None, None))),
        (((("*",), None, 4),), "a", ((None, None),)),
    ],
)
def test_the_pieces_of_a_schedule(rules: Any, layer: str, pieces: Any) -> None:
    assert policy(*rules).schedule(layer).pieces == pieces


@pytest.mark.parametrize(
    ("until", "steps", "end"), [
        (0.85, 100, 85), (0.55, 100, 55), (0.57, 100, 57), (0.1, 3, 1), (1 / 3, 300, 100), (1.0, 7, 7), (7, 3, 7),
    ]
)  # fmt: skip
def test_where_a_rule_ends(until: float, steps: int, end: int) -> None:
    assert policy((("*",), MXFP8, until)).schedule("up", steps).pieces[0][0] == end


def test_a_step_needs_no_length_and_a_fraction_does() -> None:
    assert policy((("*",), MXFP8, 10)).schedule("up").at(9) == MXFP8
    mixed = policy((("up",), NVFP4), (("*",), MXFP8, 0.5))
    assert mixed.schedule("up").at(0) == NVFP4
    with pytest.raises(RecipeError, match=r"rule 2: until = 0\.5 is a fraction.*lpq\.convert\(model, policy, steps="):
        mixed.schedule("down")


NAMES = st.sampled_from(["a", "b", "ab", "ba", "a.b", ""])
RULES = st.builds(
    Rule,
    st.lists(st.sampled_from(["a", "b", "a*", "*b", "?", "*"]), min_size=1, max_size=2).map(tuple),
    st.sampled_from([None, MXFP8, NVFP4, BF16]),
    st.none() | st.integers(1, 12) | st.floats(0, 1, exclude_min=True),
)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Rules, less those that would be hidden."""
    rules: tuple[Rule, ...] = ()
    for rule in draw(st.lists(RULES, min_size=1, max_size=5)):
        try:
            rules = Policy((*rules, rule)).rules
        except RecipeError:
            continue
    return Policy(rules)


@given(policies(), NAMES, st.integers(1, 15))
def test_a_schedule_is_the_first_rule_that_matches_and_has_not_ended(policy: Policy, name: str, steps: int) -> None:
    schedule = policy.schedule(name, steps)
    assert schedule.pieces[-1][0] is None
    ends = [until for until, _ in schedule.pieces[:-1]]
    assert ends == sorted(set(ends))
    assert all(a[1] != b[1] for a, b in zip(schedule.pieces, schedule.pieces[1:], strict=False))
    for step in range(steps + 3):
        holding = [r for r in policy.rules if r.matches(name) and ((end := r.end(steps)) is None or step < end)]
        assert schedule.at(step) == (holding[0].recipe if holding else None)


@given(policies())
def test_no_rule_that_could_be_told_is_hidden(policy: Policy) -> None:
    for i, rule in enumerate(policy.rules):
        for other in policy.rules[:i]:
            assert not (other.until is None and "*" in other.match), rule


def test_what_matches_nothing_is_reported() -> None:
    names = ["embed", "layers.0.up", "layers.1.up"]
    assert lpq.policy(PAPER).unmatched(names) == ("lm_head",)
    assert policy((("a", "b"), MXFP8, 5), (("a",), NVFP4)).unmatched(iter(names)) == ("a", "b")
    assert policy((("*",), MXFP8)).unmatched([""]) == ()
    assert policy((("*",), MXFP8)).unmatched([]) == ("*",)


def test_the_rules_of_a_layer_can_be_asked_for() -> None:
    paper = lpq.policy(PAPER)
    assert paper.rules_for("lm_head") == (paper.rules[0], paper.rules[2], paper.rules[3])
    assert policy((("a",), MXFP8)).rules_for("b") == ()


def test_a_schedule_reads_as_a_sentence() -> None:
    paper = lpq.policy(PAPER)
    assert str(paper.schedule("layers.1.up", 100)) == "nvfp4 until step 85, then bf16"
    assert str(paper.schedule("lm_head", 100)) == "left alone"
    assert hash(paper.schedule("lm_head", 100)) == hash(paper.schedule("embed", 100))


# ---------------------------------------------------------------------------------- what makes one


def test_a_recipe_is_a_policy_for_every_layer() -> None:
    every = {"fprop": "mxfp8", "dgrad": "mxfp8", "wgrad": "mxfp8"}
    for source in ("mxfp8", MXFP8, lpq.quantizer("mxfp8"), every):
        assert lpq.policy(source) == Policy((Rule(("*",), MXFP8),), leave=("lm_head", "gate", "router"))
        assert lpq.policy(source, include="all") == Policy((Rule(("*",), MXFP8),), least=0)
    made = lpq.policy(PAPER)
    assert lpq.policy(made) is made


def test_files_of_rules_and_files_of_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text('fprop = "mxfp8"\ndgrad = "mxfp8"\nwgrad = "mxfp8"\n')
    path = tmp_path / "policy.toml"
    path.write_text(
        '[[rules]]\nmatch = "lm_head"\nrecipe = "skip"\n\n'
        '[[rules]]\nmatch = ["a*", "b"]\nuntil = 10\nrecipe = "mine.toml"\n\n'
        '[[rules]]\nmatch = "*"\n[rules.recipe]\nfprop = "bf16"\ndgrad = "bf16"\nwgrad = "bf16"\n'
    )
    expected = policy((("lm_head",), None), (("a*", "b"), MXFP8, 10), (("*",), BF16))
    assert lpq.policy(path) == lpq.policy(str(path)) == expected
    assert lpq.policy(path).rules[1].recipe.name == "mine"
    monkeypatch.chdir(tmp_path)
    assert lpq.policy("policy.toml") == expected
    assert lpq.policy("mine.toml") == lpq.policy(MXFP8)
    path.write_text(path.read_text(), encoding="utf-8-sig")  # which begins with a byte order mark
    assert lpq.policy(path) == expected
    with pytest.raises(RecipeError, match=r"nowhere\.toml cannot be read: No such file"):
        lpq.policy("nowhere.toml")


def test_mappings_may_hold_objects() -> None:
    rule = Rule(("lm_head",), None)
    made = lpq.policy({"rules": [rule, {"match": ("a", "b"), "recipe": None}, {"match": "*", "recipe": MXFP8}]})
    assert made == policy((("lm_head",), None), (("a", "b"), None), (("*",), MXFP8))


# ---------------------------------------------------------------------------------- keeping it


@given(policies())
def test_every_way_of_keeping_a_policy_gives_it_back(tmp_path_factory: pytest.TempPathFactory, policy: Policy) -> None:
    path = tmp_path_factory.mktemp("policy") / "kept.toml"
    path.write_text(policy.to_toml(), encoding="utf-8")
    file = io.BytesIO()
    torch.save(policy.to_dict(), file)
    file.seek(0)
    sources = path, torch.load(file, weights_only=True), policy.to_dict()
    for kept in (*map(lpq.policy, sources), pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
        assert kept == policy
        assert hash(kept) == hash(policy)
        assert [type(r.until) for r in kept.rules] == [type(r.until) for r in policy.rules]
        assert kept.to_toml() == policy.to_toml()


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1).map(tuple))
def test_any_pattern_survives_toml(patterns: tuple[str, ...]) -> None:
    text = policy((patterns, None)).to_toml()
    assert lpq.policy(tomllib.loads(text)) == policy((patterns, None))


def test_the_toml_is_what_a_person_would_write() -> None:
    rules = policy((("lm_head",), None), (("*",), lpq.recipe("mxfp8"), 0.85), (("*",), lpq.recipe("mxfp8(dtype=e5m2)")))
    assert rules.to_toml() == (
        '[[rules]]\nmatch = ["lm_head"]\nrecipe = "skip"\n\n'
        '[[rules]]\nmatch = ["*"]\nuntil = 0.85\nrecipe = "mxfp8()"\n\n'
        '[[rules]]\nmatch = ["*"]\nrecipe = "mxfp8(dtype=e5m2)"\n'
    )


def test_a_policy_is_frozen() -> None:
    rules = policy((("*",), MXFP8))
    for what, name in ((rules, "rules"), (rules.rules[0], "until"), (rules.schedule("a"), "pieces")):
        with pytest.raises(FrozenInstanceError):
            setattr(what, name, ())


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (
            ((("*",), MXFP8), (("lm_head",), None)),
            ["rule 1 ('*') hides rule 2 ('lm_head')", "put rule 2 before rule 1"],
        ),
        (((("a",), None), (("layers.*",), MXFP8), (("b", "layers.0.*"), BF16)), ["rule 2 ('layers.*') hides rule 3"]),
        (((("*",), MXFP8, 0.5), (("a",), BF16, 0.25)), ["rule 1 ('*') hides rule 2 ('a')"]),
        (((("*",), MXFP8, 10), (("*",), BF16, 10)), ["rule 1 ('*') hides rule 2 ('*')"]),
        (((("*",), MXFP8), (("a",), BF16, 5)), ["rule 1 ('*') hides rule 2 ('a')"]),
    ],
)
def test_a_hidden_rule_is_refused(rules: tuple[tuple[object, ...], ...], words: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        policy(*rules)
    assert all(word in str(error.value) for word in words)


def test_rules_that_overlap_without_hiding_are_not_refused() -> None:
    for first, second, name, steps in (
        ((("layers.*",), MXFP8), (("*",), BF16), "head", None),
        ((("*",), MXFP8, 0.5), (("*",), BF16), "a", 10),
        ((("*",), MXFP8, 5), (("a",), BF16, 6), "a", None),
        ((("*",), MXFP8, 0.5), (("a",), BF16, 6), "a", 10),
        ((("a*",), MXFP8), (("*a",), BF16), "ba", None),
    ):
        # Both rules have a layer and a step of their own.
        assert policy(first, second).unreached(["layers.0", "a", "ab", name], steps) == ()
    assert policy((("*", "lm_head"), MXFP8)).unmatched(["lm_head"]) == ()


@pytest.mark.parametrize("until", [0, -1, 0.0, -0.5, 1.5, 5.0, float("nan"), float("inf"), True, "0.5"])
def test_an_impossible_end_is_refused(until: object) -> None:
    with pytest.raises(RecipeError, match=r"until must be a step .* or a fraction of the run"):
        Rule(("*",), MXFP8, until)


def test_wrong_types_are_refused_in_words() -> None:
    for match in ("*", ["*"], (), ("*", 3)):
        with pytest.raises(RecipeError, match="match must be a tuple of one or more patterns"):
            Rule(match, MXFP8)
    with pytest.raises(RecipeError, match=r"recipe must be a Recipe or None, not 'mxfp8': lpq\.policy takes names"):
        Rule(("*",), "mxfp8")
    for rules in ((), [Rule(("*",), MXFP8)], ("mxfp8",)):
        with pytest.raises(RecipeError, match="a policy's rules must be a tuple of one or more Rules"):
            Policy(rules)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[rules]]\nmatch = "a"\nrecipe = "mxfp8"\n[[rules]]\nmatch = "*"\nrecipe = "mxfp8"\nuntill = 3',
         ["rule 2: unknown key 'untill': did you mean 'until'?"]),
        ('[[rule]]\nmatch = "*"\nrecipe = "mxfp8"', ["unknown key 'rule': did you mean 'rules'?"]),
        ('name = "x"\n[[rules]]\nmatch = "*"\nrecipe = "mxfp8"', ["unknown key 'name': choose from least, leave, "]),
        ('[[rules]]\nmatch = "*"', ["rule 1: it has no recipe: 'skip' leaves a layer alone"]),
        ('[[rules]]\nrecipe = "mxfp8"', ["rule 1: it has no match: '*' is every layer"]),
        ('[[rules]]\nmatch = []\nrecipe = "mxfp8"', ["rule 1: match must be a tuple of one or more"]),
        ('[[rules]]\nmatch = 3\nrecipe = "mxfp8"', ["rule 1: match must be", "not 3"]),
        ('[[rules]]\nmatch = "*"\nrecipe = "mxfp8"\nuntil = 1.5', ["rule 1: until must be", "not 1.5"]),
        ('[[rules]]\nmatch = "*"\nrecipe = "mxfp9"', ["rule 1: recipe: ", "'mxfp9'", "did you mean 'mxfp8'"]),
        ('[[rules]]\nmatch = "*"\nrecipe = "none.toml"', ["rule 1: recipe: ", "none.toml cannot be read"]),
        ('[[rules]]\nmatch = "*"\nrecipe = "nvfp4(rht=true)"', ["rule 1: recipe: dgrad cannot multiply"]),
        ('[[rules]]\nmatch = "*"\nrecipe = "fprop=mxfp8"', ["rule 1: recipe: nothing is said of dgrad"]),
        ('[[rules]]\nmatch = "*"\n[rules.recipe]\nfprob = "mxfp8"', ["rule 1: recipe: unknown key 'fprob'"]),
        ('[[rules]]\nmatch = "*"\nrecipe = "bf16"\n[[rules]]\nmatch = "a"\nrecipe = "skip"', ["hides rule"]),
        ("rules = []", ["a policy's rules must be a tuple of one or more Rules"]),
        ('rules = "mxfp8"', ["rules must be a list of rules, not 'mxfp8'"]),
        ("rules = [3]", ["rule 1: a rule is a table with match, recipe, until, blocks, not 3"]),
        ("rules = [", ["is not TOML"]),
        ('fprop = "mxfp8"', ["nothing is said of dgrad and wgrad"]),
    ],
)  # fmt: skip
def test_mistakes_in_a_file_are_told_with_their_place(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        lpq.policy(path)
    assert str(error.value).startswith(str(path))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("skip", "'skip' is no recipe: in a rule of a policy it leaves layers alone"),
        ([{"match": "*", "recipe": "mxfp8"}], r"rules go into a table: \{'rules': \[…\]\}, and this is \["),
        ({"match": "*", "recipe": "mxfp8"}, r"a rule goes into a list: \{'rules': \[\{'match': …, 'recipe': …\}\]\}"),
        ({"match": ["*"], "recipe": "mxfp8"}, r"a rule goes into a list: \{'rules': \[\{'match': …, 'recipe': …\}\]\}"),
    ],
    ids=str,
)
def test_what_is_nearly_a_policy_is_told(source: object, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        lpq.policy(source)


def test_recipe_takes_no_policy() -> None:
    with pytest.raises(RecipeError, match=r"lpq\.policy takes it"):
        lpq.recipe(lpq.policy(PAPER).to_dict())
    assert isinstance(lpq.recipe("mxfp8"), Recipe)


def test_text_of_toml_is_read() -> None:
    policy = lpq.policy(PAPER)
    assert lpq.policy(policy.to_toml()) == policy
    assert lpq.recipe(NVFP4.to_toml()) == NVFP4
    assert lpq.policy(NVFP4.to_toml()) == lpq.policy("nvfp4")
    assert lpq.recipe("fprop=mxfp8,\n dgrad=mxfp8,\n wgrad=mxfp8") == MXFP8
    with pytest.raises(RecipeError, match=r"this text is not TOML: .* line 2"):
        lpq.policy("[[rules]]\nmatch = *\n")


# ------------------------------------------------------------------------------ blocks


def in_blocks(blocks: str, count: int) -> list[int]:
    """The blocks of ``count`` that a rule is for."""
    made = lpq.policy({"rules": [{"match": "*", "blocks": blocks, "recipe": "mxfp8"}]})
    names = ["embed", *(f"model.layers.{i}.mlp.experts.{j}.up" for i in range(count) for j in range(3)), "norm"]
    placed = made.placed(names)
    assert not any(placed.rules_for(name) for name in ("embed", "norm"))
    return [i for i in range(count) if placed.rules_for(f"model.layers.{i}.mlp.experts.2.up")]


@pytest.mark.parametrize(
    ("blocks", "count", "expected"),
    [
        ("first 2", 5, [0, 1]),
        ("last 2", 5, [3, 4]),
        ("last 15%", 20, [17, 18, 19]),
        ("last 15%", 8, [6, 7]),
        ("last 15 %", 8, [6, 7]),
        ("last 15%", 2, [1]),
        ("first 1, last 1", 5, [0, 4]),
        ("first 1, last 1", 1, [0]),
        ("last 9", 2, [0, 1]),
    ],
)
def test_a_rule_is_for_blocks_at_an_end(blocks: str, count: int, expected: list[int]) -> None:
    assert in_blocks(blocks, count) == expected


def test_each_list_of_blocks_has_ends_of_its_own() -> None:
    rules = [{"match": "*", "blocks": "last 1", "recipe": "skip"}, {"match": "*", "recipe": "mxfp8"}]
    names = ["encoder.layers.0", "encoder.layers.1", "h.0", "h.1", "h.2"]
    placed = lpq.policy({"rules": rules}).placed(names)
    quantized = [name for name in names if placed.schedule(name).at(0) is not None]
    assert quantized == ["encoder.layers.0", "h.0", "h.1"]
    again = lpq.policy(placed.to_toml())
    assert again == placed
    assert again.placed(["h.0"]) is again, "a policy that knows the blocks keeps them"


def test_a_model_is_converted_but_for_its_last_blocks() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(4))
    rules = [{"match": "*", "blocks": "last 25%", "recipe": "skip"}, {"match": "*.1", "recipe": "mxfp8"}]
    model = lpq.convert(nn.ModuleDict({"layers": blocks}), {"rules": rules})
    assert [name for name, m in model.named_modules() if isinstance(m, lpq.nn.Linear)] == [
        "layers.0.1", "layers.1.1", "layers.2.1"
    ]  # fmt: skip


@pytest.mark.parametrize("blocks", ["last", "last 0", "first 101%", "middle 2", "last -1", "last 2,", "last 15  %", 2])
def test_blocks_that_are_none_are_refused(blocks: object) -> None:
    with pytest.raises(RecipeError, match=r"rule 1: blocks must be 'first 2', 'last 15%' or several"):
        lpq.policy({"rules": [{"match": "*", "blocks": blocks, "recipe": "mxfp8"}]})


def test_a_stage_of_a_pipeline_is_refused_unless_the_policy_knows_the_model() -> None:
    rule = {"match": "*", "blocks": "last 1", "recipe": "mxfp8"}
    names = ["layers.4.up", "layers.5.up"]
    with pytest.raises(RecipeError, match=r"layers begins with block 4, as a stage of a pipeline does: convert the"):
        lpq.policy({"rules": [rule]}).placed(names)
    whole = lpq.policy({"rules": [rule], "stacks": [{"name": "layers", "blocks": 8}]}).placed(names)
    assert not whole.rules_for("layers.5.up")
    assert whole.rules_for("layers.7.up")


def test_rules_that_are_for_no_block_are_told_apart_from_beaten_ones() -> None:
    """By a warning and in the report, as the model may be quantized otherwise than was meant."""
    some: dict[str, object] = {"match": "*", "blocks": "last 1", "recipe": "skip"}
    rest: dict[str, object] = {"match": "*", "recipe": "mxfp8"}

    def reported(model: nn.Module, *rules: dict[str, object], **more: object) -> list[tuple[int, str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = lpq.report(lpq.convert(model, {"rules": [*rules], **more}))
        said = [str(warning.message) for warning in caught]
        assert [f"lpq.convert: rule {n} never holds: {why}" for n, why in report.misplaced] == [
            words for words in said if "never holds" in words
        ]
        assert [line for line in str(report).splitlines() if "never holds" in line] == [
            f"rule {n} never holds: {why}" for n, why in report.never_holding
        ]
        return report.never_holding

    def flat() -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})

    listless = "this model has no list of layers for `blocks`: other rules hold for all of it; name layers by `match`"
    assert reported(flat(), some, rest) == [(1, listless)]
    assert reported(flat(), {**some, "recipe": "mxfp8"}) == [(1, listless)]
    assert reported(flat(), {**some, "match": "c"}) == []  # which is a pattern that matches nothing
    within = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)]), "b": nn.Linear(32, 32)})
    outside = {**some, "match": "b"}
    assert reported(copy.deepcopy(within), outside, rest) == [
        (1, "none of the layers that it matches is in its blocks")
    ]
    assert reported(copy.deepcopy(within), some, rest) == []
    beaten = {**some, "blocks": "first 1", "match": "layers.*"}
    earlier = {"match": "layers.[0]*", "recipe": "nvfp4"}
    assert reported(copy.deepcopy(within), earlier, beaten, rest) == [(2, "the rules before it win at every step")]
    stage = reported(within, some, rest, stacks=[{"name": "layers", "blocks": 4}])
    assert stage == [], "the last block is in another stage"


def test_a_rule_for_some_blocks_hides_no_rule_for_others() -> None:
    some = {"match": "*", "blocks": "first 1", "recipe": "skip"}
    lpq.policy({"rules": [some, {"match": "layers.*", "recipe": "mxfp8"}, {"match": "*", "recipe": "nvfp4"}]})
    with pytest.raises(RecipeError, match="hides rule 2"):
        lpq.policy({"rules": [some, some]})


@pytest.mark.parametrize("name", shipped.policies())
def test_policies_that_come_with_lpq(name: str) -> None:
    assert len(shipped.policies()[name]) < 120
    placed = lpq.policy(name).placed([f"layers.{i}.up" for i in range(20)])
    assert {"lm_head", "gate", "router"} <= {*placed.leave}
    schedules = [placed.schedule(f"layers.{i}.up", 100) for i in range(20)]
    assert [i for i, schedule in enumerate(schedules) if schedule.at(0) is not None] == HIGH[name]
    with pytest.raises(RecipeError, match=f"{name} is a policy and not a recipe: pass it to lpq.convert or lpq.policy"):
        lpq.recipe(name)
    with pytest.raises(UnknownRecipe, match=f"did you mean .*'{name}'"):
        lpq.policy(f"{name[:-2]}{name[-1]}{name[-2]}")


@pytest.mark.parametrize("attention", ["self_attn.q_proj", "attention.query", "layer.0.SelfAttention.q"])
def test_nvfp4_rl_leaves_attention_as_it_is(attention: str) -> None:
    names = [f"layers.{i}.{part}" for i in range(8) for part in (attention, "mlp.experts")]
    placed = lpq.policy("nvfp4-rl").placed(names)
    found = [name for name in names if placed.schedule(name, 100).at(0) == lpq.recipe("nvfp4-row-fwd-decoded-bwd")]
    assert found == ["layers.2.mlp.experts", "layers.3.mlp.experts"]
    assert placed.unmatched(names) == (), "a policy that ships warns of no pattern"


HIGH = {
    "nvfp4-pretrain": [*range(17)], "nvfp4-late-switch": [*range(20)], "fp8-current-edges-bf16": [*range(1, 19)],
    "nvfp4-last-blocks": [*range(17)], "nvfp4-rl": [*range(2, 16)],
}  # fmt: skip
"""The blocks of 20 that are quantized."""


def test_the_forward_of_nvfp4_pretrain_ends_before_the_run() -> None:
    schedule = lpq.policy("nvfp4-pretrain").placed(["layers.0.up", "layers.9.up"]).schedule("layers.0.up", 1000)
    assert schedule.at(819) == lpq.recipe("nvfp4-eden")
    late = schedule.at(820)
    assert late is not None
    assert late.fprop == lpq.recipe("mxfp8").fprop
    assert late.dy == lpq.recipe("nvfp4-eden").dy


@pytest.mark.parametrize("name", ["nvfp4-late-switch", "nvfp4-last-blocks"])
def test_a_policy_in_nvfp4_whose_forward_ends_in_bf16(name: str) -> None:
    schedule = lpq.policy(name).placed(["layers.0.up", "layers.9.up"]).schedule("layers.0.up", 1000)
    assert schedule.at(819) == lpq.recipe("nvfp4")
    assert schedule.at(820) == lpq.recipe("fprop=bf16, dgrad=nvfp4, wgrad=nvfp4")
