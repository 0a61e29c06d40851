"""vLLM on a CPU: a model that it has filled with the tensors of files, what its parameters are made of, and an engine.

vLLM brings a torch of its own, so `make test-vllm` installs it apart. No other test imports this file.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import as_bytes
from torch import Tensor

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERTS = re.compile(r"(.*\.experts)\.routed_experts\.(w13|w2)_(.+)")
OF_EXPERTS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
OF_A_CACHE = re.compile(r".*\.attn\.(.*_scale|.*_zero_point)")
"""Parameters of a KV cache, which lpq's files do not have."""


def _any_hardware(kind: Any) -> Any:
    """A kernel of a GPU that is chosen here. It has the parameters of a model, and multiplies nothing."""
    yes = classmethod(lambda *args, **kwargs: (True, None))
    return type(f"Unused{kind.__name__}", (kind,), {"is_supported": yes, "can_implement": yes})


@contextmanager
def kernels() -> Iterator[None]:
    """Have vLLM build each model: by its own kernels for a CPU; by emulation, which it does not choose there by itself;
    and last by kernels of a GPU, with which a model can be filled and not run."""
    linear: Any = importlib.import_module("vllm.model_executor.kernels.linear")
    platforms: Any = importlib.import_module("vllm.platforms").PlatformEnum
    experts: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.nvfp4_emulation_moe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        for name in [name for name in vars(linear) if re.fullmatch("_POSSIBLE_.*_KERNELS", name)]:
            table = getattr(linear, name)
            of_gpus = table[platforms.CUDA]
            emulated = [kind for kind in of_gpus if kind.__name__.startswith("Emulation")]
            last = next((kind for kind in of_gpus if kind.__name__.startswith("Marlin")), of_gpus[-1])
            patch.setitem(table, platforms.CPU, [*table.get(platforms.CPU, ()), *emulated, _any_hardware(last)])
        yes = staticmethod(lambda *args, **kwargs: (True, None))
        patch.setattr(linear.MarlinNvFp4LinearKernel, "is_supported", yes)  # asked for by name, inputs in bf16
        emulation = experts.Nvfp4QuantizationEmulationTritonExperts
        patch.setattr(emulation, "is_supported_config", yes)
        yield


def filled(path: Path) -> Any:
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
        distributed.destroy_model_parallel()  # that of a dense model has no group for experts
        distributed.initialize_model_parallel(1, 1)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = loading.utils.initialize_model(vllm_config=made)
        finally:
            torch.set_default_dtype(before)
        loading.get_model_loader(made.load_config).load_weights(model, made.model_config)
    return model


def differing(model: Any, files: dict[str, Tensor], experts: int, high_precision: bool) -> tuple[list[str], set[str]]:
    """The parameters that are not, byte for byte, tensors of the files; and the tensors that others have.

    ``high_precision``: inputs are, so that parameters for their scales stay as they were made.
    """
    wrong: list[str] = []
    used: set[str] = set()
    for name, parameter in model.named_parameters():
        if OF_A_CACHE.fullmatch(name) or (high_precision and "input" in name.rpartition(".")[2]):
            continue
        parts = sources(name, experts)
        ways = [parts]
        if parameter.numel() == experts and len(parts) == 2 * experts:  # one value for gate and up, which have the same
            ways = [parts[::2], parts[1::2]]
        for way in ways:
            found = [files[one] for one in way if one in files]
            same = len(found) == len(way) and {one.dtype for one in found} == {parameter.dtype}
            if not (same and torch.equal(as_bytes(parameter), torch.cat([as_bytes(one) for one in found]))):
                wrong.append(name)
        used |= {*parts}
    return wrong, used


def sources(name: str, count: int) -> list[str]:
    """The names in files of the tensors that lie one after the other in a parameter; ``count``: of experts."""
    if (found := EXPERTS.fullmatch(name)) is not None:
        block, which, leaf = found.groups()
        return [f"{block}.{i}.{part}.{leaf}" for i in range(count) for part in OF_EXPERTS[which]]
    module, _, leaf = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    return [f"{parent}.{part}.{leaf}" for part in FUSED.get(last, ())] or [name]


_engines: list[Any] = []
"""They stay: an engine that goes takes the groups of the next one with it."""


def engine(path: Path) -> Any:
    """vLLM, ready to generate from these files."""
    vllm: Any = importlib.import_module("vllm")
    importlib.import_module("vllm.distributed").destroy_model_parallel()
    _engines.append(
        vllm.LLM(
            str(path), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, max_model_len=32,
            kv_cache_memory_bytes=2**24, max_num_seqs=2,
        )
    )  # fmt: skip
    return _engines[-1]


def generated(llm: Any, prompt: list[int], count: int) -> list[dict[int, float]]:
    """For each token that is generated the likeliest five and their log-probabilities, the likeliest first."""
    vllm: Any = importlib.import_module("vllm")
    how = vllm.SamplingParams(temperature=0, max_tokens=count, detokenize=False, logprobs=5)
    (answer,) = llm.generate({"prompt_token_ids": prompt}, how, use_tqdm=False)
    steps = [{token: one.logprob for token, one in step.items()} for step in answer.outputs[0].logprobs]
    assert [max(step, key=step.__getitem__) for step in steps] == [*answer.outputs[0].token_ids]
    return steps
