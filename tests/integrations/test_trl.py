"""TRL's SFTTrainer and GRPOTrainer with the callback for transformers' Trainer, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama
import pytest
import torch
from support.comparing import equal_states

import lpq
from lpq.integrations.transformers import LpqCallback

trl: Any = pytest.importorskip("trl", reason="needs trl, which `make test-loops` brings")
pytestmark = pytest.mark.slow
OPTIONS: dict[str, Any] = {
    "max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": 2, "report_to": [],
    "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2, "bf16": False,
}  # fmt: skip


def tokenizer() -> Any:
    """A word for each number under 60."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(i): i for i in range(60)} | {"<pad>": 60, "<eos>": 61, "<unk>": 62}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def data(key: str) -> Any:
    from datasets import Dataset

    rows = torch.randint(0, 60, (16, 8), generator=torch.Generator().manual_seed(1)).tolist()
    return Dataset.from_list([{key: " ".join(map(str, row))} for row in rows])


def sft(model: Any, out: Path, **options: Any) -> Any:
    arguments = trl.SFTConfig(str(out), max_length=16, **{**OPTIONS, **options})
    return trl.SFTTrainer(
        model, arguments, train_dataset=data("text"), processing_class=tokenizer(), callbacks=[LpqCallback()]
    )


def test_fine_tuning_follows_a_policy_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    done = sft(llama.converted(llama.TWO_STAGES), tmp_path / "a")
    done.train()
    assert done.model.model.layers[0].mlp.up_proj.recipe == lpq.recipe("mxfp8")
    resumed = sft(llama.converted(llama.TWO_STAGES), tmp_path / "b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert llama.losses(resumed) == llama.losses(done)
    assert equal_states(resumed.model.state_dict(), done.model.state_dict())
    plain = sft(llama.llama(), tmp_path / "c")
    plain.remove_callback(LpqCallback)
    plain.train()
    assert llama.losses(plain) != llama.losses(done)


def test_adapters_train_over_a_converted_base(tmp_path: Path) -> None:
    from peft import LoraConfig

    base = llama.converted("nvfp4", weights="quantized")
    before = llama.codes(base)

    def after() -> dict[str, Any]:
        return {name.replace(".base_layer", ""): t for name, t in llama.codes(base).items()}

    arguments = trl.SFTConfig(str(tmp_path), max_length=16, **OPTIONS)
    trained = trl.SFTTrainer(
        base, arguments, train_dataset=data("text"), processing_class=tokenizer(), callbacks=[LpqCallback()],
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )  # fmt: skip
    trained.train()
    assert len(llama.losses(trained)) == 4
    assert before
    assert equal_states(after(), before)


def test_rollouts_are_generated_and_trained_on_by_the_same_layers(tmp_path: Path) -> None:
    """GRPO generates with the model that it trains, so there is nothing to refit."""
    model = llama.converted("mxfp8")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    arguments = trl.GRPOConfig(
        str(tmp_path), num_generations=2, max_completion_length=4, **{**OPTIONS, "max_steps": 2},
    )  # fmt: skip

    def total(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(int(word) for word in text.split() if word.isdigit())) for text in completions]

    trained = trl.GRPOTrainer(
        model, total, arguments, train_dataset=data("prompt"), processing_class=tokenizer(), callbacks=[LpqCallback()]
    )
    trained.train()
    assert trained.state.global_step == 2
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert "model.layers.0.mlp.up_proj.weight" in changed
