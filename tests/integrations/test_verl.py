"""verl's FSDP engine, on a CPU and two ranks, through its own registries of platforms and engines."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import llama
import pytest
import torch
from ranks import spawn
from safetensors.torch import load_file
from support.comparing import equal_states
from torch import Tensor

import lpq

pytest.importorskip("verl", reason="needs verl, which `make test-loops` brings")
pytestmark = [pytest.mark.slow, pytest.mark.starts, pytest.mark.filterwarnings("ignore")]
LAYOUT = "compressed-tensors"
BF16 = torch.bfloat16
"""The dtype in which verl multiplies by default, and rollouts run."""


def on_cpu() -> None:
    """verl has no platform for CPUs, and a registry for those of others."""
    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.plugin.platform.platform_manager import PlatformRegistry

    @PlatformRegistry.register(platform="cpu")
    class _Cpu(PlatformCUDA):  # type: ignore[misc]
        device_name, vendor_name, device_module = "cpu", "none", torch.cpu

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return torch.device("cpu")

        def synchronize(self, *_: Any) -> None:
            return

        empty_cache = synchronize

    os.environ["VERL_PLATFORM"] = "cpu"


def engine(model: Path, *, forward_only: bool = False) -> Any:
    """verl's engine for a language model, as its workers ask for it."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    made = EngineRegistry.new(
        "language_model", "fsdp2",
        model_config=HFModelConfig(
            path=str(model), load_tokenizer=False, use_remove_padding=False, enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "eager"},
        ),
        engine_config=FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, forward_only=forward_only),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=4),
        checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    if not forward_only:  # verl keeps the reference model in pinned memory, which needs a GPU
        made.initialize()
    return made


def train(made: Any, rank: int) -> None:
    """A step on a batch of the rank's own."""
    from verl.utils import tensordict_utils
    from verl.workers.utils.losses import sft_loss

    lengths, generator = (8, 6), torch.Generator().manual_seed(rank)
    rows = {
        "input_ids": [torch.randint(0, 60, (n,), generator=generator) for n in lengths],
        "position_ids": [torch.arange(n) for n in lengths],
        "loss_mask": [torch.ones(n) for n in lengths],
    }
    how = {
        "use_remove_padding": False, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "temperature": 1.0,
    }  # fmt: skip
    nested = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in rows.items()}
    with made.train_mode():
        made.train_batch(tensordict_utils.get_tensordict(nested, non_tensor_dict=how), partial(sft_loss, None))


def sent(made: Any) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in made.get_per_tensor_param()[0]}


def _trained(rank: int, model: Path, out: Path) -> None:
    """Keeps what rollouts get before and after a step, the weights after it, and those without lpq."""
    on_cpu()
    from torch.distributed.tensor import DTensor
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from lpq.integrations.verl import LpqEngine, register

    registered = register("nvfp4", layout=LAYOUT, dtype=BF16)
    made = engine(model)
    assert type(made) is registered
    assert issubclass(registered, LpqEngine)
    before = sent(made)
    train(made, rank)
    weights = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in made.module.state_dict().items()}
    reference = engine(model, forward_only=True)._build_module()
    assert not any(isinstance(layer, lpq.nn.Linear) for layer in reference.modules())
    theirs = type("Theirs", (registered,), {"_build_module": FSDPEngineWithLMHead._build_module, "layout": None})
    plain = theirs(made.model_config, made.engine_config, made.optimizer_config, made.checkpoint_config)
    plain.initialize()
    train(plain, rank)
    kept = {"before": before, "after": sent(made), "weights": weights, "plain": sent(plain)}
    torch.save(kept, out / f"{rank}.pt")


def exported(weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """An export of a model with these weights, by one process."""
    model = llama.llama()
    model.load_state_dict(weights)
    lpq.export(lpq.convert(model, "nvfp4"), path, layout=LAYOUT, dtype=BF16)
    return load_file(path / "model.safetensors")


def test_rollouts_get_the_codes_that_verl_trains_with(tmp_path: Path) -> None:
    """Before and after a step. Without lpq's layers the step has other gradients."""
    model = llama.llama()
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(tmp_path / "model")
    spawn(_trained, 2, tmp_path / "model", tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    before = exported(model.state_dict(), tmp_path / "before")
    after = exported(first["weights"], tmp_path / "after")
    for found in (first, second):
        assert equal_states(found["before"], before)
        assert equal_states(found["after"], after)
        packed = [name for name in found["after"] if name.endswith("weight_packed")]
        assert len(packed) == 7
        assert not any(torch.equal(found["after"][name], found["before"][name]) for name in packed)
        assert found["plain"].keys() == model.state_dict().keys()
        assert not equal_states(found["plain"], found["weights"])
