"""What vLLM is given to read: each way in which its schemes lie in a layout, in a dense model and in experts; and what
it made of these files, as ``results/vllm.json`` has it."""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tiny
import torch
from support.comparing import as_bytes
from support.hugging_face import small

import lpq
from lpq.engines.layouts import layout_named, schemes_in, summaries
from lpq.registry import Group, Inputs, LayoutError, Scheme

RESULTS = Path(__file__).parent / "results" / "vllm.json"
ENGINE = "vLLM"
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"name": "Llama", "inner": 512},
    "experts": {"name": "Qwen3Moe", "inner": 256, "experts": 4},
}
SIZES: dict[str, Any] = {"hidden": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
FP8_AND_MXFP8 = {"rules": [{"match": "*mlp*", "recipe": "fp8-current"}, {"match": "*self_attn*", "recipe": "mxfp8"}]}
MIXTURES = {"nvfp4 and mxfp8": tiny.MIXTURE, "fp8 and mxfp8": FP8_AND_MXFP8}
"""Of the layers of mlp and of self_attn."""


@dataclass(frozen=True)
class Served:
    """A model in a layout. Its name is the first four values."""

    model: str
    layout: str
    weights: str
    """The quantizer of weights, or a mixture."""
    inputs: str
    """The quantizer of inputs."""

    def __str__(self) -> str:
        return f"{self.model}, {self.layout}, {self.weights}, inputs {self.inputs}"

    @property
    def static(self) -> bool:
        """Whether the files have scales of inputs."""
        return "static" in self.inputs

    def policy(self) -> dict[str, Any]:
        x = f"hybrid(row={self.inputs.replace('(static=true)', '').replace('bf16', 'identity')}, col=identity)"
        every = {"match": "*", "recipe": f"x={x}, w={self.weights}, dy=bf16"}
        rules = MIXTURES[self.weights]["rules"] if self.weights in MIXTURES else [every]
        left = ["lm_head", "*mlp.gate"] if self.model == "experts" else ["lm_head"]
        return {"rules": [{"match": left, "recipe": None}, *rules]}

    def options(self, model: Any) -> dict[str, Any]:
        """The arguments of ``lpq.export``."""
        layers = [name for name in tiny.layers(model) if "experts" not in name]
        if self.model == "experts":
            blocks = [f"model.layers.0.mlp.experts.{i}" for i in range(MODELS["experts"]["experts"])]
            layers += [f"{one}.{name}" for one in blocks for name in ("gate_proj", "up_proj", "down_proj")]
        return {"layout": self.layout, "input_amax": dict.fromkeys(layers, 3.75) if self.static else {}}

    def plain(self, seed: int = 0) -> Any:
        """The model before it has a recipe: the same on any machine, with any version of what made it."""
        model = small(dtype=torch.bfloat16, **{**SIZES, **MODELS[self.model]})
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}{name}".encode()))
                high, low = (torch.randint(-64, 65, parameter.shape, generator=generator) for _ in range(2))
                values = (high * low) / 2**12  # of which few are large
                parameter.copy_(1 + values / 8 if parameter.dim() == 1 else values / 16)
        return model.eval()

    def build(self, seed: int = 0) -> Any:
        return lpq.convert(self.plain(seed), self.policy())


def _inputs_of(scheme: Scheme) -> list[Inputs | None]:
    """The ways of inputs for which the layout has a place; those that lie alike once."""
    found: dict[str, Inputs | None] = {}
    for inputs in (None, *scheme.inputs):
        group = Group(scheme, inputs, ("layer",))
        try:
            layout_named(scheme.layout).files([group], [])
        except LayoutError:
            continue
        found.setdefault(json.dumps(group.config, sort_keys=True), inputs)
    return [*found.values()]


@cache
def cases() -> tuple[tuple[Served, bool], ...]:
    """All that schemes declare for the engine, and whether it is declared to read them."""
    found: list[tuple[Served, bool]] = []
    for layout in summaries():
        written = [s for s in schemes_in(layout) if s.unwritten is None and ENGINE in s.readers]
        ways = [(scheme, inputs) for scheme in written for inputs in _inputs_of(scheme)]
        for model in MODELS:
            for scheme, inputs in ways:
                case = Served(model, layout, scheme.quantizer, "bf16" if inputs is None else inputs.quantizer)
                group = Group(scheme, inputs, ())
                refused = group.not_experts if model == "experts" else ()
                found.append((case, ENGINE in group.readers and ENGINE not in refused))
        if len({scheme.title for scheme, _ in ways}) > 2:
            found += [(Served("dense", layout, mixture, "static"), True) for mixture in MIXTURES]
    return tuple(found)


def digest(path: Path) -> str:
    """One of all that an engine reads in these files: the tensors, and what describes their quantization."""
    made = hashlib.sha256()
    for name, tensor in sorted(tiny.tensors(path).items()):
        made.update(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
        made.update(as_bytes(tensor).numpy().tobytes())
    described = [tiny.config(path)]
    if (legacy := path / "hf_quant_config.json").exists():
        described.append(json.loads(legacy.read_text()))
    made.update(json.dumps(described, sort_keys=True).encode())
    return made.hexdigest()


def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found
