"""How much of a model is converted: the report begins with it, and convert warns of large parts that stay."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import lpq
from lpq.nn.advice import nearest
from lpq.nn.names import grouped


class Experts(nn.Module):
    """A stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Parameter(torch.randn(4, 32, 64)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up.sum(0)


def first_line(model: nn.Module) -> str:
    return str(lpq.report(model)).splitlines()[0]


def said(model: nn.Module, policy: Any, **how: Any) -> list[str]:
    """Return the warnings of convert."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        lpq.convert(model, policy, **how)
    return [str(warning.message) for warning in told]


def test_the_report_begins_with_how_much_is_converted() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "a": nn.Linear(32, 32), "b": nn.Linear(32, 96, bias=False)})
    rules = {"rules": [{"match": "a", "recipe": "mxfp8"}]}
    assert said(model, rules) == [], "the rules say so"
    assert first_line(model) == (
        "17 % of the matrix parameters are converted (1,024 of 6,144), 25 % of the work in products; "
        "not converted: b (Linear) 3,072 (50 %), embed (Embedding) 2,048 (33 %)"
    )
    model["b"].weight = model["a"].weight
    assert lpq.report(model).coverage.converted == 1024, "what two modules share counts once"
    assert said(nn.ModuleDict({"embed": nn.Embedding(640, 32), "a": nn.Linear(32, 32)}), "mxfp8") == []


def test_what_was_taken_back_since_does_not_count() -> None:
    model = lpq.convert(nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), "mxfp8")
    assert lpq.report(model).coverage.share == 1
    model[0].recipe = None
    model[1] = nn.Linear(32, 32)
    assert lpq.report(model).coverage.share == 0.5
    model[0].recipe = "nvfp4"
    assert lpq.report(model).coverage.share == 0.75


@pytest.mark.parametrize("wrapped", [checkpoint_wrapper, torch.compile])
def test_what_is_wrapped_since_is_converted_still(wrapped: Any) -> None:
    def made() -> nn.Module:
        block = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        return nn.ModuleDict({"block": block, "lm_head": nn.Linear(32, 32)})

    model = lpq.convert(made(), "mxfp8", weights="high_precision")
    before = str(lpq.report(model))
    assert "converted  block.0 (Linear): mxfp8" in before
    assert before.startswith("50 % of the matrix parameters are converted (1,024 of 2,048), 50 % of the work")
    model["block"][0] = wrapped(model["block"][0])
    assert str(lpq.report(model)) == before
    model["block"] = wrapped(model["block"])
    assert str(lpq.report(model)) == before
    assert str(lpq.report(wrapped(model))) == before
    first = made()
    first["block"] = wrapped(first["block"])
    assert str(lpq.report(lpq.convert(first, "mxfp8", weights="high_precision"))) == before
    staged = {"rules": [{"match": "block.*", "recipe": "mxfp8", "until": 0.5}]}
    first = lpq.convert(made(), staged, steps="later")
    first["block"] = wrapped(first["block"])
    lpq.replan(first, steps=4)
    assert lpq.report(first).converted[0].note == "mxfp8 until step 2, then left alone; now: mxfp8"


def test_what_has_adapters_since_is_converted_and_they_are_not() -> None:
    model: nn.Module = lpq.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "mxfp8")
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["0"]))  # type: ignore[arg-type]
    report = lpq.report(adapted)
    assert [entry.name for entry in report.converted] == ["base_model.model.0.base_layer", "base_model.model.1"]
    assert (report.coverage.converted, report.coverage.total) == (2048, 2048 + 2 * 8 * 32)
    model = lpq.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "mxfp8")
    model[0] = nn.Bilinear(32, 32, 32)
    assert lpq.report(model).converted[0].note == "mxfp8; since then replaced by an ordinary Bilinear"
    assert lpq.report(model).coverage.converted == 1024


def test_a_large_part_that_its_class_leaves_is_warned_of() -> None:
    model = nn.ModuleDict({"experts": Experts(), "a": nn.Linear(32, 32)})
    (words,) = said(model, "mxfp8")
    assert words.startswith(f"lpq.convert: {first_line(model)}. experts stays in high precision: no plugin converts ")
    assert "100 % of the work in linear layers (the work of 8,192 others is not known)" in words
    assert said(nn.ModuleDict({"experts": Experts(), "a": nn.Linear(999, 999)}), "mxfp8") == []
    assert said(model, {"rules": [{"match": "a", "recipe": "mxfp8"}]}) == []


class Fused(nn.Module):
    """Experts with transformers' interface, without a gate."""

    num_experts, has_gate, has_bias, is_transposed, is_concatenated = 4, False, True, False, True

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = (nn.Parameter(torch.ones(4, 32, 32)) for _ in range(2))
        self.up_proj_bias, self.down_proj_bias = (nn.Parameter(torch.ones(4, 32)) for _ in range(2))


def test_fused_experts_are_work_as_grouped_layers_are() -> None:
    """A row meets one matrix of each stack. They were work that is not known, and their biases matrices."""
    fused = nn.ModuleDict({"experts": Fused(), "a": nn.Linear(32, 32)})
    two = {name: lpq.nn.GroupedLinear(4, 32, 32, recipe=None) for name in ("up", "down")}
    layers = nn.ModuleDict({**two, "a": nn.Linear(32, 32)})
    for rules, work in (({"rules": [{"match": "a", "recipe": "mxfp8"}]}, 1 / 3), ("mxfp8", 1.0)):
        found = [lpq.report(lpq.convert(model, rules)).coverage for model in (fused, layers)]
        assert [(c.total, c.unknown, c.work) for c in found] == [(9 * 1024, 0, work)] * 2


def test_convolutions_are_matrices_too_and_vectors_of_any_shape_are_none() -> None:
    """A model of convolutions with some linear layers was reported as 100 % of the work."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.time = nn.Conv2d(8, 32, 3), nn.GroupNorm(4, 32), nn.Linear(32, 32)
            self.token, self.place = nn.Parameter(torch.ones(1, 1, 32)), nn.Parameter(torch.ones(1, 16, 32))

    (words,) = said(model := Block(), "mxfp8")
    assert "100 % of the work in linear layers (the work of 2,816 others is not known); not converted: conv (" in words
    report = lpq.report(model)
    assert (report.coverage.converted, report.coverage.total) == (1024, 1024 + 32 * 72 + 16 * 32)
    assert {entry.name: entry.note for entry in report.left} == {
        "": "no plugin converts Block, which holds place beside other modules",
        "conv": "no plugin converts Conv2d",
    }
    assert said(nn.ModuleDict({"norm": nn.LayerNorm(32), "a": nn.Linear(32, 32)}), "mxfp8") == []


def test_matrices_that_are_not_there_yet_or_are_computed() -> None:
    lazy = nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(4))
    assert said(lazy, "mxfp8") == []
    assert first_line(lazy).startswith("100 % of the matrix parameters are converted (4,096 of 4,096)")
    pruned = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    torch.nn.utils.prune.l1_unstructured(pruned[0], "weight", 0.5)  # type: ignore[no-untyped-call]
    assert said(pruned, {"rules": [{"match": "0", "recipe": "mxfp8"}]}) == []
    assert first_line(pruned).startswith("50 % of the matrix parameters are converted (4,096 of 8,192), 50 % of the")


@pytest.mark.slow
def test_models_of_hugging_face() -> None:
    small: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    with torch.device("meta"):
        gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2))
        llama = LlamaForCausalLM(LlamaConfig(**small, intermediate_size=128, num_hidden_layers=12))
        experts: dict[str, Any] = {"num_local_experts": 4, "intermediate_size": 128}
        mixtral = MixtralForCausalLM(MixtralConfig(**small, **experts, num_hidden_layers=2))
    assert said(gpt2, "mxfp8") == []
    kinds = [entry.kind for entry in lpq.report(gpt2).converted]
    assert kinds == ["Conv1D"] * 8
    assert said(mixtral, "mxfp8") == []
    assert "model.layers.0–1.mlp.experts (2 MixtralExperts): mxfp8" in str(lpq.report(mixtral))
    left = {entry.name: entry.note for entry in lpq.report(mixtral).left}
    assert left["model.layers.0.mlp.gate"].startswith("the policy leaves out 'gate'")
    assert said(llama, "mxfp8") == []
    lines = str(lpq.report(llama)).splitlines()
    alike = "model.layers.0–11.self_attn.*_proj (48 Linear), model.layers.0–11.mlp.*_proj (36 Linear)"
    assert f" converted  {alike}: mxfp8" in lines
    assert len(lines) < 12
    full = str(lpq.report(llama, full=True)).splitlines()
    assert len(full) == 2 + 12 * 7 + 2, "and no norm"
    assert " converted  model.layers.11.mlp.up_proj (Linear): mxfp8" in full
    edge = {"rules": [{"match": "*.[07].mlp.*", "recipe": "nvfp4"}, {"match": "*.down_proj", "recipe": "mxfp8"}]}
    lpq.convert(llama, edge)
    lines = str(lpq.report(llama)).splitlines()
    assert " converted  model.layers.{0,7}.mlp.*_proj (6 Linear): nvfp4" in lines
    assert " converted  model.layers.{1–6,8–11}.mlp.down_proj (10 Linear): mxfp8" in lines
    assert any("model.layers.{1–6,8–11}.mlp.{gate_proj,up_proj} (20 Linear)" in line for line in lines), "and no glob"


GROUPS = [
    (["a"], (), ["a"]), (["a.0.b", "a.1.b", "a.3.b"], (), ["a.{0–1,3}.b"]),
    (["a.0.b", "a.1.b", "a.1.c"], (), ["a.0–1.b", "a.1.c"]), (["l.0.q_proj", "l.0.k_proj"], (), ["l.0.*_proj"]),
    (["l.0.q_proj", "l.0.k_proj"], ("l.0.o_proj",), ["l.0.{k_proj,q_proj}"]),
    (["l.0.q_proj", "l.0.k_proj"], ("l.1.o_proj", "m.0.o_proj"), ["l.0.*_proj"]),
    (["x.0.0", "x.0.1", "x.1.0", "x.1.1"], (), ["x.0–1.0–1"]), (["a.b", "c"], (), ["a.b", "c"]), ([""], (), [""]),
]  # fmt: skip


@pytest.mark.parametrize(("names", "others", "called"), GROUPS)
def test_names_are_grouped(names: list[str], others: tuple[str, ...], called: list[str]) -> None:
    groups = grouped(names, (*names, *others))
    assert [name for name, _ in groups] == called
    assert sorted(n for _, members in groups for n in members) == sorted(names)


class Counted(tuple[str, ...]):
    """Names that count how often one is looked at."""

    looks = 0

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            self.looks += 1
            yield name


@pytest.mark.parametrize(("ends", "stars"), [(["up_proj"], 0), (["up_proj", "q_proj"], 1)])
def test_only_a_text_with_a_star_goes_through_all_names(ends: list[str], stars: int) -> None:
    """A report with a line for each of 1,500 modules took a minute, as each line went through the names of all."""
    names = Counted(f"layers.{i}.{end}" for i in range(8) for end in ends)
    for i in range(8):
        assert len(grouped([f"layers.{i}.{end}" for end in ends], names)) == 1
    assert len(grouped(names[:], names)) == 1
    assert names.looks == 9 * stars * len(names)


# ------------------------------------------------------------------------------------------ rules that do nothing


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)) for _ in range(3))
        self.norm, self.lm_head = nn.LayerNorm(32), nn.Linear(32, 64)


def rules(*matches: str) -> dict[str, Any]:
    return {"rules": [{"match": match, "recipe": "mxfp8"} for match in matches]}


def test_a_pattern_that_matches_nothing_is_warned_of_beside_any_rule() -> None:
    skip = {"rules": [{"match": "lm_haed", "recipe": "skip"}, {"match": "*", "recipe": "mxfp8"}]}
    assert said(Net(), skip) == ["lpq.convert: no layer matches 'lm_haed' (did you mean 'lm_head'?)"]
    assert said(Net(), rules("block.*.0", "*")) == [
        "lpq.convert: no layer matches 'block.*.0' (did you mean 'blocks.*.*'?)"
    ]
    assert said(Net(), rules("zzz", "*")) == ["lpq.convert: no layer matches 'zzz'"]
    (words,) = said(Net(), rules("lm_haed"))
    assert words.startswith("lpq.convert left every layer as it was: none matches 'lm_haed' (did you mean 'lm_head'?)")
    assert said(Net(), rules("*")) == []
    (words,) = said(Net(), rules(*(f"zz{i}" for i in range(2000)), "*"))
    assert words == "lpq.convert: no layer matches 'zz0', 'zz1', 'zz2', …", "the report has all of them"


def test_the_nearest_name_is_found_by_its_end_and_whatever_the_layer() -> None:
    names = [f"model.layers.{i}.mlp.{leaf}" for i in range(80) for leaf in ("up_proj", "down_proj")]
    assert nearest("*.up_porj", names) == "model.layers.*.mlp.up_proj"
    assert nearest("layers.7.mlp.down_prj", names) == "model.layers.*.mlp.down_proj"
    assert nearest("embed", names) is None


def test_the_pattern_for_the_nearest_name_matches_it() -> None:
    """A name may have what stands for other characters in a pattern."""
    net = nn.ModuleDict(
        {"blocks": nn.ModuleList([nn.ModuleDict({"w[0]": nn.Linear(32, 32)})]), "w0": nn.Linear(32, 32)}
    )
    (words,) = said(net, rules("blocks.*.w[0]", "w0"))
    assert words == "lpq.convert: no layer matches 'blocks.*.w[0]' (did you mean 'blocks.*.w[[]0]'?)"
    assert said(net, rules("blocks.*.w[[]0]", "w0")) == []


def test_a_rule_that_names_what_cannot_be_converted_is_warned_of() -> None:
    norm = "lpq.convert: rule 1 gives 'norm' a recipe, and reaches no layer; norm: no plugin converts LayerNorm"
    assert said(Net(), rules("norm", "*")) == [norm]
    (words,) = said(Net(), rules("blocks.1", "*.0"))
    assert words.endswith("reaches no layer; blocks.1: it is no layer, and layers in it are called blocks.1.*")
    (words,) = said(Net(), rules("*.1", "*"))
    assert words.endswith("blocks.0.1: no plugin converts LayerNorm")
    assert said(Net(), rules("blocks.*", "*")) == [], "it reaches some"
    hidden = {"rules": [{"match": "lm_head", "recipe": "skip", "until": 5}, *rules("lm_head", "*")["rules"]]}
    assert said(Net(), hidden) == []


def test_a_rule_that_skips_only_what_layers_are_in_is_warned_of() -> None:
    def model() -> nn.Module:
        block = nn.ModuleDict({"norm": nn.LayerNorm(32), "up": nn.Linear(32, 32)})
        return nn.ModuleDict({"embed": nn.Embedding(32, 32), "blocks": nn.ModuleList([block, nn.Linear(32, 32)])})

    def skipping(*match: str) -> list[str]:
        return said(model(), {"rules": [{"match": [*match], "recipe": "skip"}, {"match": "*", "recipe": "mxfp8"}]})

    where = "it is no layer, and layers in it are called blocks.0.*"
    assert skipping("blocks.0") == [f"lpq.convert: rule 1 skips 'blocks.0', and reaches no layer; blocks.0: {where}"]
    assert len(skipping("blocks")) == 1
    assert skipping("embed", "*.norm", "blocks.0.*") == []
    assert skipping("blocks.0*") == [], "that reaches the layers too"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lpq.convert(model(), {"rules": [{"match": "blocks.1", "recipe": "mxfp8"}]})


def test_a_part_that_leaves_nothing_out_is_warned_of() -> None:
    def leaving(*leave: str) -> list[str]:
        model = nn.ModuleDict({"lm_head": nn.Linear(32, 32), "a": nn.Linear(32, 32)})
        return said(model, {"leave": [*leave], "rules": [{"match": "*", "recipe": "mxfp8"}]})

    assert leaving("lm_haed") == [
        "lpq.convert: leave has 'lm_haed', and no layer has that between the dots of its name (did you mean 'lm_head'?)"
    ]
    assert leaving("lm_head", "gate", "router") == [], "as a policy of one recipe is kept"
