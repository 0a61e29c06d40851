"""Hugging Face's Trainer on a CPU: a policy that follows its steps, and what its checkpoints hold of it."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import llama
import pytest
import safetensors.torch as safetensors
import torch
from llama import STEPS, TWO_STAGES, ReadsWeights, codes, converted, decoded, losses, trainer, transformers
from support.comparing import equal_states
from support.hugging_face import small
from torch import nn

import lpq
from lpq.checkpoint import CheckpointError, CheckpointWarning
from lpq.integrations.decoded import Decoded
from lpq.integrations.going_on import begins_afresh
from lpq.integrations.transformers import LpqCallback, attach, resume

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::lpq.tensor.quantized_tensor.PrecisionWarning")]
REVERSED = {
    "rules": [{**TWO_STAGES["rules"][0], "recipe": "mxfp8"}, {**TWO_STAGES["rules"][1], "recipe": "fp8-delayed"}]
}


class Recipes(transformers.TrainerCallback):
    """Notes the recipe of a layer in each step."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        recipe = model.model.layers[0].mlp.up_proj.recipe
        self.seen.append(next(name for name in ("mxfp8", "fp8-delayed") if recipe == lpq.recipe(name)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A run of two stages that was not interrupted, and where its checkpoints are."""
    out = tmp_path_factory.mktemp("run")
    seen = Recipes()
    done = trainer(converted(TWO_STAGES, weights="high_precision"), out, LpqCallback(), seen)
    done.train()
    assert seen.seen == ["fp8-delayed"] * 3 + ["mxfp8"] * 3
    return done, out


def test_a_run_goes_on_bit_for_bit(run: tuple[Any, Path], tmp_path: Path) -> None:
    done, out = run
    seen = Recipes()
    resumed = trainer(converted(TWO_STAGES, weights="high_precision"), tmp_path, LpqCallback(), seen)
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert seen.seen == ["fp8-delayed"] + ["mxfp8"] * 3
    assert len(losses(done)) == STEPS
    assert losses(resumed) == losses(done)
    assert equal_states(resumed.model.state_dict(), done.model.state_dict())
    assert lpq.report(resumed.model).weights == lpq.report(done.model).weights


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_with_experts_goes_on_where_the_model_is_built_from_the_checkpoint(tmp_path: Path) -> None:
    """Control: the Trainer itself leaves experts as they are. Once it loads them, the pages have to say so."""

    def run(model: Any, at: Path, **options: Any) -> Any:
        it = trainer(lpq.convert(model, "mxfp8"), at, LpqCallback())
        it.train(**options)
        return it.model.state_dict()

    done, given = run(small("Mixtral"), tmp_path / "x"), str(tmp_path / "x" / "checkpoint-2")
    read = transformers.MixtralForCausalLM.from_pretrained(given)
    assert equal_states(run(read, tmp_path / "y", resume_from_checkpoint=given), done)
    assert not equal_states(run(small("Mixtral", seed=1), tmp_path / "z", resume_from_checkpoint=given), done)


def test_adapters_that_go_on_over_states_that_were_not_saved_warn(tmp_path: Path) -> None:
    """The Trainer saves adapters alone. Control: in the later stage, which remembers nothing, it goes on to the bit."""
    peft = pytest.importorskip("peft", reason="needs peft, which `make install` brings")

    def adapted(out: str) -> Any:
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj"])
        return trainer(peft.get_peft_model(converted(TWO_STAGES), adapters), tmp_path / out, LpqCallback())

    done = adapted("x")
    done.train()
    early, late = adapted("y"), adapted("z")
    with pytest.warns(CheckpointWarning, match=r"no states of these layers.*\.0\.self_attn\.q_proj\.base_layer"):
        early.train(resume_from_checkpoint=str(tmp_path / "x" / "checkpoint-2"))
    resume(late.model, tmp_path / "x" / "checkpoint-4")
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        late.train(resume_from_checkpoint=str(tmp_path / "x" / "checkpoint-4"))
    assert equal_states(late.model.state_dict(), done.model.state_dict())
    assert not equal_states(early.model.state_dict(), done.model.state_dict())


@pytest.mark.parametrize(("recipe", "alike"), [("nvfp4", True), ("fp8-delayed", False)])
def test_loaded_adapters_give_the_same_outputs_where_the_base_remembers_nothing(
    recipe: str, alike: bool, tmp_path: Path
) -> None:
    peft: Any = pytest.importorskip("peft", reason="needs peft, which `make install` brings")
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    trained = peft.get_peft_model(converted(recipe), adapters)
    batch = {name: value[None] for name, value in llama.examples(1)[0].items()}
    trained(**batch).loss.backward()
    trained.save_pretrained(tmp_path)
    read = peft.PeftModel.from_pretrained(converted(recipe), tmp_path)
    with torch.no_grad():
        assert torch.equal(read.eval()(**batch).logits, trained.eval()(**batch).logits) == alike


def test_states_begin_afresh_only_where_there_were_some_before() -> None:
    model = converted(
        {"rules": [{"match": "*_proj", "recipe": "mxfp8", "until": 2}, {"match": "*_proj", "recipe": "fp8-delayed"}]}
    )
    lpq.set_step(model, 2)
    assert begins_afresh(model, 2) == []
    assert len(begins_afresh(model, 3)) == 7
    model(**{name: value[None] for name, value in llama.examples(1)[0].items()}).loss.backward()
    assert begins_afresh(model, 3) == []


def test_without_the_callback_the_first_stage_stays(run: tuple[Any, Path], tmp_path: Path) -> None:
    seen = Recipes()
    alone = trainer(converted(TWO_STAGES, weights="high_precision"), tmp_path, seen)
    with pytest.warns(UserWarning, match=r"lpq\.set_step"):
        alone.train()
    assert set(seen.seen) == {"fp8-delayed"}
    assert losses(alone)[:3] == losses(run[0])[:3]
    assert losses(alone)[4:] != losses(run[0])[4:]


def test_a_run_goes_on_from_a_checkpoint_that_was_saved_without_the_callback(
    run: tuple[Any, Path], tmp_path: Path
) -> None:
    shutil.copytree(run[1] / "checkpoint-2", tmp_path / "checkpoint-2")
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"].pop("LpqCallback")["attributes"]["policy"]["conversions"][""]["steps"] == STEPS
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text(json.dumps(state))
    resumed = trainer(converted(TWO_STAGES, weights="high_precision"), tmp_path, LpqCallback())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(run[0])
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert "LpqCallback" in saved["stateful_callbacks"]


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        (
            "mxfp8", {},
            r"go on from this checkpoint: .* another policy than the model's(?s:.*)policy \(as it stands above\)",
        ),
        (TWO_STAGES, {"max_steps": STEPS + 2}, f"for {STEPS + 2} steps"),
    ],
)  # fmt: skip
def test_another_policy_or_another_length_is_refused(
    policy: Any, options: dict[str, Any], words: str, run: tuple[Any, Path], tmp_path: Path
) -> None:
    given = str(run[1] / "checkpoint-4")
    other = trainer(converted(policy), tmp_path, LpqCallback(), **options)
    with pytest.raises(CheckpointError, match=rf"(?s){words}.*LpqCallback\(any_policy=True\)"):
        other.train(resume_from_checkpoint=given)
    with pytest.raises(TypeError, match="LpqCallback: any_policy='no': it is True or False"):
        LpqCallback(any_policy="no")
    other = trainer(converted(policy), tmp_path, LpqCallback(any_policy=True), **options)
    other.train(resume_from_checkpoint=given)
    assert other.state.global_step == options.get("max_steps", STEPS)


def test_a_length_that_is_not_the_trainers_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"planned for 100 steps, and the Trainer takes {STEPS}.*steps='later'"):
        trainer(converted(TWO_STAGES, steps=100), tmp_path, LpqCallback()).train()
    ends = {"rules": [{"match": "*_proj", "recipe": "mxfp8", "until": 3}, {"match": "*_proj", "recipe": "nvfp4"}]}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer(converted(ends, steps=100), tmp_path, LpqCallback()).train()
        trainer(converted(TWO_STAGES, steps=STEPS), tmp_path, LpqCallback()).train()


def test_what_a_later_stage_remembers_is_loaded_or_missed(run: tuple[Any, Path], tmp_path: Path) -> None:
    other = trainer(converted(REVERSED), tmp_path / "b", LpqCallback())
    with pytest.raises(CheckpointError, match="another policy"):  # which is said first
        other.train(resume_from_checkpoint=str(run[1] / "checkpoint-4"))
    done = trainer(converted(REVERSED), tmp_path / "a", LpqCallback())
    done.train()
    checkpoint = tmp_path / "a" / "checkpoint-4"
    unprepared = trainer(converted(REVERSED), tmp_path / "b", LpqCallback())
    with pytest.raises(CheckpointError, match=r"were not loaded.*mlp\.\w+_proj.*Call .*resume\(model, checkpoint\)"):
        unprepared.train(resume_from_checkpoint=str(checkpoint))
    model = converted(REVERSED)
    resume(model, checkpoint)
    resumed = trainer(model, tmp_path / "b", LpqCallback())
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses(resumed) == losses(done)
    assert equal_states(model.state_dict(), done.model.state_dict())
    histories = [t for name, t in model.state_dict().items() if name.endswith("x_amax_history")]
    assert len(histories) == 7
    assert all(t.any() for t in histories)
    with pytest.raises(CheckpointError, match="another policy"):
        resume(converted("mxfp8"), checkpoint)
    with pytest.raises(CheckpointError, match=r"is no checkpoint of a Trainer: there is no trainer_state\.json"):
        resume(converted("mxfp8"), tmp_path)


def test_from_pretrained_tells_what_layers_remembered_and_it_can_be_loaded(
    run: tuple[Any, Path], tmp_path: Path
) -> None:
    model = converted("fp8-delayed", weights="high_precision")
    trainer(model, tmp_path, LpqCallback(), max_steps=2).train()
    model.save_pretrained(tmp_path)
    plain, said = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    state = model.state_dict()
    remembered = {name for name in state if "_amax" in name}
    assert said["unexpected_keys"] == remembered
    assert not said["missing_keys"]
    assert equal_states(plain.state_dict(), {name: t for name, t in state.items() if name not in remembered})
    again = lpq.convert(plain, "fp8-delayed", weights="high_precision")
    assert not again.model.layers[0].mlp.up_proj.x_amax_history.any()
    safetensors.load_model(again, tmp_path / "model.safetensors")
    assert equal_states(again.state_dict(), state)


# ---------------------------------------------------------------------------------------------- stored quantized


def test_stored_weights_with_masters_go_on_bit_for_bit(tmp_path: Path) -> None:
    recipe = "fp8-current"  # what its weights decode to is not encoded to the same bits
    options = {"masters": True, "max_steps": 4}
    done = trainer(converted(recipe, weights="quantized"), tmp_path / "a", LpqCallback(), **options)
    done.train()
    resumed = trainer(converted(recipe, weights="quantized"), tmp_path / "b", LpqCallback(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert losses(resumed) == losses(done)
    assert equal_states(decoded(resumed.model), decoded(done.model))
    assert len(codes(done.model)) > 7
    assert equal_states(codes(resumed.model), codes(done.model))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-4")
    assert equal_states(loaded.state_dict(), decoded(done.model))


def test_stored_weights_without_masters_are_encoded_again_and_that_is_said(tmp_path: Path) -> None:
    trainer(converted(weights="quantized"), tmp_path, LpqCallback(), max_steps=2).train()
    resumed = trainer(converted(weights="quantized"), tmp_path, LpqCallback(), max_steps=4)
    with pytest.warns(CheckpointWarning, match=r"encoding these again.*lpq\.optim\.MasterWeights"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_stored_weights_are_saved_as_they_decode_once_that_is_asked(tmp_path: Path) -> None:
    model = converted("nvfp4", weights="quantized")
    with pytest.raises(TypeError, match=r"q_proj\.weight: .*lpq\.export\(model, path"):
        model.save_pretrained(tmp_path)
    assert attach(model) is model
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert equal_states(loaded.state_dict(), decoded(model))
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    abstract_in_4 = ("_process_model_before_weight_loading", "_process_model_after_weight_loading", "is_trainable")
    assert all(hasattr(Decoded, name) for name in abstract_in_4)
    assert model.hf_quantizer.is_serializable(safe_serialization=True)
    assert model.hf_quantizer.get_state_dict_and_metadata(model, True)[0].keys() == model.state_dict().keys()


def test_stored_weights_inside_of_other_models_are_saved_as_they_decode(tmp_path: Path) -> None:
    """As sentence-transformers hold a model."""
    model = converted("nvfp4", weights="quantized")
    attach(nn.Sequential(model))
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert equal_states(loaded.state_dict(), decoded(model))


def test_adapters_over_stored_weights_of_a_model_of_no_library_are_trained_and_saved(tmp_path: Path) -> None:
    """PEFT's model has a save_pretrained, which writes adapters alone."""
    peft: Any = pytest.importorskip("peft", reason="needs peft, which `make install` brings")
    base = lpq.convert(nn.Sequential(nn.Linear(32, 32)), "nvfp4", weights="quantized")
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"]))
    LpqCallback().on_train_begin(None, transformers.TrainerState(max_steps=2), None, model)
    model.save_pretrained(tmp_path)
    assert all(".lora_" in name for name in safetensors.load_file(tmp_path / "adapter_model.safetensors"))


# ---------------------------------------------------------------------------------------------- the best model


@pytest.mark.parametrize("policy", [TWO_STAGES, REVERSED])
def test_the_best_model_has_the_recipes_under_which_it_was_best(policy: Any, tmp_path: Path) -> None:
    """The learning rate makes the first checkpoint the best: it is of the first stage."""
    best = trainer(
        converted(policy, weights="high_precision"), tmp_path, LpqCallback(), Recipes(), load_best_model_at_end=True,
        eval_strategy="steps", eval_steps=2, learning_rate=10.0, lr_scheduler_type="constant",
    )  # fmt: skip
    forgotten = policy is TWO_STAGES
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        best.train()
    assert best.state.best_global_step == 2
    assert any(w.category is CheckpointWarning and "resume(model, " in str(w.message) for w in said) == forgotten
    assert best.model.model.layers[0].mlp.up_proj.recipe == lpq.recipe(policy["rules"][0]["recipe"])
    saved = safetensors.load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    state = best.model.state_dict()
    weights = [name for name in state if "_amax" not in name]
    assert equal_states({n: state[n] for n in weights}, {n: saved[n] for n in weights})


# ---------------------------------------------------------------------------------------------- the module


def test_layers_that_the_model_multiplies_past_are_warned_of(tmp_path: Path) -> None:
    """Control: a model that calls every layer."""
    model = small("Llama")
    attention = model.model.layers[0].self_attn
    attention.q_proj = ReadsWeights(attention.q_proj)
    lpq.convert(model, "mxfp8")
    with pytest.warns(UserWarning, match=r"reads the weights .*: model\.layers\.0\.self_attn\.q_proj\.inner\. "):
        trainer(model, tmp_path, LpqCallback(), max_steps=2, save_strategy="no").train()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the model reads the weights")
        trainer(converted("mxfp8"), tmp_path, LpqCallback(), max_steps=2, save_strategy="no").train()


def test_the_callback_is_a_class_of_transformers_under_its_own_name() -> None:
    """It is made when it is used: that lpq imports no transformers by itself, a rule of the house shows."""
    assert issubclass(LpqCallback, transformers.TrainerCallback)
    assert LpqCallback is lpq.integrations.transformers.LpqCallback
    assert (LpqCallback.__name__, LpqCallback.__module__) == ("LpqCallback", "lpq.integrations.transformers")


def test_a_model_that_was_not_converted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"call lpq\.convert"):
        trainer(llama.llama(), tmp_path, LpqCallback()).train()
    with pytest.raises(AttributeError, match="no attribute 'LpqCallbacks'"):
        lpq.integrations.transformers.LpqCallbacks  # noqa: B018


def test_callbacks_that_are_restored_from_a_checkpoint_go_on(run: tuple[Any, Path], tmp_path: Path) -> None:
    resumed = trainer(
        converted(TWO_STAGES), tmp_path, LpqCallback(any_policy=True), restore_callback_states_from_checkpoint=True
    )
    resumed.train(resume_from_checkpoint=str(run[1] / "checkpoint-4"))
    assert torch.equal(torch.tensor(losses(resumed)), torch.tensor(losses(run[0])))
