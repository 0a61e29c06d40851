"""A policy leaves out unless asked: heads and routers by their names, adapters by their size."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.small_models import Mlp
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BioGptConfig,
    BioGptForCausalLM,
    ElectraConfig,
    ElectraForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    T5Config,
    T5Model,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
    YolosConfig,
    YolosForObjectDetection,
)

import lpq
from lpq.recipes import RecipeError

NAMES = ("gate_proj", "up", "gate", "block.router.classifier", "routers", "lm_head", "lm_head_2")
SKIPPED = {"gate", "block.router.classifier", "lm_head"}
RULES = {"rules": [{"match": "*", "recipe": "mxfp8"}]}


def model(width: int = 32) -> nn.Module:
    """A model with linear layers of these names; the routers are small."""
    made = nn.Module()
    for name in NAMES:
        parent, _, leaf = name.rpartition(".")
        where = made
        for part in parent.split(".") if parent else ():
            if not hasattr(where, part):
                where.add_module(part, nn.Module())
            where = where.get_submodule(part)
        where.add_module(leaf, nn.Linear(width, 16 if leaf in ("gate", "classifier") else 8 * width))
    return made


def converted(made: nn.Module, *args: Any, **how: Any) -> set[str]:
    return {entry.name for entry in lpq.report(lpq.convert(made, *args, **how)).converted}


def test_one_recipe_leaves_out_what_everybody_leaves_out() -> None:
    for source in ("mxfp8", lpq.recipe("mxfp8"), lpq.policy("mxfp8"), {"x": "mxfp8", "w": "mxfp8", "dy": "mxfp8"}):
        made = model()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert converted(made, source) == set(NAMES) - SKIPPED
        left = {entry.name: entry.note for entry in lpq.report(made).left}
        assert left["lm_head"] == "the policy leaves out 'lm_head'; include='all' does not"
        assert left["block.router.classifier"] == "the policy leaves out 'router'; include='all' does not"
        assert left.keys() == SKIPPED


def test_one_word_turns_that_off_and_so_do_rules() -> None:
    assert converted(model(), "mxfp8", include="all") == set(NAMES)
    assert converted(model(), lpq.policy("mxfp8", include="all")) == set(NAMES)
    assert converted(model(), RULES) == set(NAMES)
    assert converted(model(), {**RULES, "leave": ["up"]}) == set(NAMES) - {"up"}
    with pytest.raises(RecipeError, match="include='everything': it is 'all' or None"):
        lpq.convert(model(), "mxfp8", include="everything")  # type: ignore[arg-type]


def test_what_is_kept_of_a_policy_says_so_too() -> None:
    for how in ({}, {"include": "all"}):
        made = model()
        names = converted(made, "mxfp8", **how)
        kept = lpq.policy("mxfp8", **how)
        for saved in (kept.to_dict(), kept.to_toml()):
            assert lpq.policy(saved) == kept
            assert converted(model(), saved) == names
        assert converted(made, kept.to_dict()) == names, "converted again"


def test_a_layer_of_two_names_is_left_out_by_either() -> None:
    made = model()
    made.add_module("output", made.get_submodule("lm_head"))
    assert "lm_head" not in converted(made, "mxfp8")


def test_the_head_of_a_model_is_left_out_by_any_name() -> None:
    """BioGPT calls it ``output_projection``, and a library may wrap the model."""

    def wrapped() -> nn.Module:
        sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
        return nn.ModuleDict({"base": BioGptForCausalLM(BioGptConfig(vocab_size=64, num_hidden_layers=1, **sizes))})

    made = wrapped()
    assert "base.output_projection" not in converted(made, "mxfp8")
    notes = {entry.name: entry.note for entry in lpq.report(made).left}
    assert notes["base.output_projection"].startswith(
        "the policy leaves out 'lm_head', and the model says that this is its head"
    )
    assert "base.output_projection" in converted(wrapped(), "mxfp8", include="all")
    assert "base.output_projection" in converted(wrapped(), {**RULES, "leave": ["gate"]})


FEW = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
HEADS = {
    "classifier": lambda: ViTForImageClassification(ViTConfig(image_size=32, num_labels=48, **FEW)),
    "proj_out": lambda: WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=96, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=1,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
def test_heads_are_found_by_what_they_are(head: str) -> None:
    """The models have no layer called ``lm_head``."""
    made = HEADS[head]()
    linear = {name for name, m in made.named_modules() if type(m) is nn.Linear}
    assert head in linear
    assert converted(made, "mxfp8") == linear - {head}


BETWEEN = {
    "cls.predictions": lambda: BertForMaskedLM(BertConfig(vocab_size=96, **FEW)),
    "lm_head": lambda: RobertaForMaskedLM(RobertaConfig(vocab_size=96, **FEW)),
    "generator": lambda: ElectraForMaskedLM(ElectraConfig(vocab_size=96, embedding_size=32, **FEW)),
    "classifier": lambda: RobertaForSequenceClassification(RobertaConfig(vocab_size=96, num_labels=48, **FEW)),
}


@pytest.mark.parametrize("head", BETWEEN)
def test_layers_between_the_blocks_and_the_outputs_are_of_the_head(head: str) -> None:
    """Whatever they are called, for words and for labels: in one module with the last layer, as RoBERTa's ``lm_head``,
    or beside it, as ELECTRA's."""
    made = BETWEEN[head]()
    beside = {name for name, m in made.named_modules() if type(m) is nn.Linear and name.startswith(head)}
    assert len(beside) == 2
    linear = {name for name, m in made.named_modules() if type(m) is nn.Linear}
    assert converted(made, "mxfp8") == linear - beside
    assert converted(BETWEEN[head](), "mxfp8", include="all") == linear


def test_a_detector_has_an_output_for_nothing_found() -> None:
    """YOLOS' and DETR's classifier has one output more than the model has labels; beside it lies what finds boxes."""
    model = YolosForObjectDetection(YolosConfig(image_size=[32, 32], num_labels=47, num_detection_tokens=4, **FEW))
    linear = {name for name, m in model.named_modules() if type(m) is nn.Linear}
    beside = {name for name in linear if not name.startswith("vit.")}
    assert {name.partition(".")[0] for name in beside} == {"class_labels_classifier", "bbox_predictor"}
    assert model.class_labels_classifier.layers[-1].out_features == 48
    assert converted(model, "mxfp8") == linear - beside


def test_layers_of_blocks_are_no_classifiers() -> None:
    """Though they have as many outputs as the model has labels, and adapters stand around the model."""

    def made() -> nn.Module:
        return RobertaForSequenceClassification(RobertaConfig(vocab_size=96, num_labels=32, **FEW))

    assert "roberta.encoder.layer.0.attention.self.query" in converted(made(), "mxfp8")
    adapted = get_peft_model(made(), LoraConfig(target_modules=["value"]))
    assert "base_model.model.roberta.encoder.layer.0.attention.self.query" in converted(adapted, "mxfp8")


def test_a_large_layer_that_only_its_name_leaves_out_is_warned_of() -> None:
    made = nn.ModuleDict({"gate": nn.Linear(64, 256), "up": nn.Linear(64, 256), "lm_head": nn.Linear(64, 999)})
    with pytest.warns(UserWarning, match=r"gate stays in high precision: the policy leaves out 'gate'; include='all'"):
        lpq.convert(made, "mxfp8")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({**RULES, "leave": "lm_head"}, "leave must be a tuple of parts of names"),
        ({**RULES, "leave": ["model.lm_head"]}, "without dots and wildcards"),
        ({**RULES, "leave": ["*"]}, "without dots and wildcards"),
        ({**RULES, "least": -1}, "least must be a number of inputs or outputs"),
        ({**RULES, "least": True}, "least must be a number of inputs or outputs"),
        ({"leave": ["a"]}, "a policy has rules, and this has only leave"),
    ],
)
def test_what_is_left_out_is_checked(wrong: Any, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        lpq.policy(wrong)


# ------------------------------------------------------------------------------------------ small layers


def test_a_small_layer_is_converted_if_a_rule_is_for_such_alone() -> None:
    def layers() -> nn.ModuleDict:
        return nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 15), "c": nn.Linear(4, 64)})

    made = layers()
    assert converted(made, RULES) == {"a"}
    assert lpq.report(made).left[0].note.startswith("a weight of [15, 64], and below 16 there is nothing to gain")
    every = {"match": "*", "recipe": "mxfp8"}
    assert converted(layers(), {"rules": [{"match": "b", "recipe": "mxfp8"}, every]}) == {"a", "b"}
    assert converted(layers(), {"rules": [{"match": "[bc]", "recipe": "mxfp8"}, every]}) == {"a", "b", "c"}
    assert converted(layers(), {"rules": [{"match": "[ab]", "recipe": "mxfp8"}, every]}) == {"a"}
    assert converted(layers(), {**RULES, "least": 8}) == {"a", "b"}
    assert converted(layers(), {**RULES, "least": 65}) == {"a", "b", "c"}, "all are small, so the rule is for such"
    assert converted(layers(), RULES, include="all") == {"a", "b", "c"}
    assert converted(nn.Sequential(nn.Linear(8, 8)), "mxfp8") == {"0"}


def adapted(made: nn.Module, **how: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(made, LoraConfig(r=4, init_lora_weights=False, **how))  # type: ignore[arg-type]


def trained(made: nn.Module, x: Tensor, **how: Any) -> list[Tensor]:
    torch.manual_seed(2)
    trainable = [p for p in made.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trainable, lr=1e-2), []
    for _ in range(3):
        out = made(x, **how)
        loss = out.square().mean() if isinstance(out, Tensor) else out.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_adapters_are_left_in_both_orders_and_these_are_the_same() -> None:
    torch.manual_seed(0)
    plain, x = Mlp(), torch.randn(16, 64)
    before = adapted(lpq.convert(copy.deepcopy(plain), "nvfp4"), target_modules=["up", "down"])
    after = adapted(copy.deepcopy(plain), target_modules=["up", "down"])
    every = copy.deepcopy(after)
    names = converted(after, "nvfp4")
    assert names == {f"base_model.model.{name}.base_layer" for name in ("up", "down")}
    left = {entry.name for entry in lpq.report(after).left}
    assert left == {f"base_model.model.{n}.lora_{ab}.default" for n in ("up", "down") for ab in "AB"}
    losses = trained(after, x)
    assert all(map(torch.equal, trained(before, x), losses))
    assert len(converted(every, "nvfp4", include="all")) == 6
    assert not torch.equal(trained(every, x)[0], losses[0])
    asked = {"rules": [{"match": "*.lora_*", "recipe": "nvfp4"}, {"match": "*", "recipe": "nvfp4"}]}
    assert len(converted(adapted(copy.deepcopy(plain), target_modules=["up", "down"]), asked)) == 6


def test_adapters_of_layers_with_a_transposed_weight() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    plain, tokens = GPT2LMHeadModel(config).eval(), torch.arange(32).view(2, 16)
    how: dict[str, Any] = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    before = adapted(lpq.convert(copy.deepcopy(plain), "mxfp8"), **how)
    after = lpq.convert(adapted(copy.deepcopy(plain), **how), "mxfp8")
    kinds = [entry.name for entry in lpq.report(after).converted if entry.kind == "Conv1D"]
    assert len(kinds) == 4
    losses = trained(after, tokens, labels=tokens)
    assert all(map(torch.equal, trained(before, tokens, labels=tokens), losses))
    layer = before.base_model.model.transformer.h[0].attn.c_proj
    expected = layer.base_layer.weight + layer.get_delta_weight("default")
    merged = before.merge_and_unload().transformer.h[0].attn.c_proj
    assert torch.equal(merged.weight, expected)
    assert merged.recipe == lpq.recipe("mxfp8")


def test_nvfp4_rl_leaves_the_attention_of_t5_as_it_is() -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 7, "num_heads": 2}
    model = lpq.convert(T5Model(T5Config(**sizes)), "nvfp4-rl")
    found = {entry.name for entry in lpq.report(model).converted}
    halves = {"encoder.block.2.layer.1", "decoder.block.2.layer.2"}
    assert found == {f"{half}.DenseReluDense.{layer}" for half in halves for layer in ("wi", "wo")}


def test_the_report_says_which_rule_skips_a_layer() -> None:
    rules = [
        {"match": "*", "blocks": "last 50%", "recipe": "skip"},
        {"match": ["*.u?", "*.gate"], "recipe": "skip"},
        {"match": "*.down", "recipe": "mxfp8"},
    ]
    blocks = [nn.ModuleDict({name: nn.Linear(32, 32) for name in ("up", "gate", "down")}) for _ in range(2)]
    model = nn.ModuleDict({"layers": nn.ModuleList(blocks), "out": nn.Linear(32, 32)})
    report = lpq.report(lpq.convert(model, {"rules": rules}))
    last = "rule 1 (blocks last 50%) gives it no recipe"
    assert {entry.name: entry.note for entry in report.left} == {
        "layers.0.up": "rule 2 ('*.u?') gives it no recipe",
        "layers.0.gate": "rule 2 ('*.gate') gives it no recipe",
        **{f"layers.1.{name}": last for name in ("up", "gate", "down")},
        "out": "no rule of the policy is for it",
    }
