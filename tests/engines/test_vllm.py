"""What lpq exports, in vLLM itself, on a CPU: `make test-vllm`, in an environment of its own.

Each way in which files lie is loaded by vLLM's loader, and each of its parameters has the bytes of the files. Files for
which it has products on any CPU generate tokens. ``results/vllm.json`` keeps the outcomes, of which the table of
docs/export.md is made; `make test-vllm RECORD=1` writes it anew.
"""

from __future__ import annotations

import ast
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import served
import tiny
import torch
from served import MODELS, RESULTS, Served
from support.comparing import as_bytes

import lpq
from lpq import registry
from lpq.checkpoint import CheckpointError
from lpq.engines.siblings import FUSED

vllm: Any = pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it in an environment of its own")
import vllm_on_cpu as on_cpu  # noqa: E402

pytestmark = [pytest.mark.starts, pytest.mark.filterwarnings("ignore")]
CASES = served.cases()
RUN = {
    ("mxfp8", "mxfp8"): ("bf16", 0.01), ("fp8(scaling=row)", "fp8(scaling=row)"): ("encoded", 0.05),
    ("nvfp4", "nvfp4(static=true)"): ("encoded", 0.15), ("nvfp4 and mxfp8", "static"): ("bf16", 0.1),
}  # fmt: skip
"""What a CPU multiplies: whether inputs are encoded (emulation of MXFP8 does not), and how far log-probabilities may
be from those of transformers' model. Each rounds to bf16 in its own order, and so an input may get the next code."""
GENERATED = [case for case, _ in CASES if case.model == "dense" and (case.weights, case.inputs) in RUN]
PROMPT = [5, 9, 33, 2, 17, 60, 41, 8]
found: dict[Served, dict[str, Any]] = {}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with on_cpu.kernels():
        yield


@pytest.mark.parametrize(("case", "read"), CASES, ids=str)
def test_vllm_has_the_bytes_of_the_files_or_refuses_them(case: Served, read: bool, tmp_path: Path) -> None:
    model = case.build()
    made = lpq.export(model, tmp_path / "x", **case.options(model))
    assert ("vLLM" in made.readers) == read
    found[case] = {"outcome": "refused", "tensors": 0, "digest": served.digest(tmp_path / "x")}
    if not read:
        with pytest.raises((AssertionError, AttributeError, RuntimeError, ValueError)):
            on_cpu.filled(tmp_path / "x")
        return
    files = tiny.tensors(tmp_path / "x")
    theirs = on_cpu.filled(tmp_path / "x")
    count = MODELS[case.model].get("experts", 0)
    wrong, used = on_cpu.differing(theirs, files, count, case.inputs == "bf16")
    assert not wrong
    assert used == files.keys()
    found[case] |= {"outcome": "read", "tensors": len(used)}
    codes = next(p for name, p in theirs.named_parameters() if name.endswith(("_proj.weight", "_proj.weight_packed")))
    codes.data.view(torch.uint8)[0, 0] ^= 1
    assert on_cpu.differing(theirs, files, count, case.inputs == "bf16")[0]  # one bit is seen


def likeliest(model: Any, prompt: list[int], steps: list[dict[int, float]]) -> list[dict[int, float]]:
    """The log-probabilities of the same tokens by a model of transformers', after the same beginnings."""
    tokens, ours = [*prompt], []
    for step in steps:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1].float()
        probabilities = logits.log_softmax(-1)
        ours.append({token: probabilities[token].item() for token in step})
        tokens.append(max(step, key=step.__getitem__))
    return ours


def farthest(one: list[dict[int, float]], other: list[dict[int, float]]) -> float:
    return max(abs(a[token] - b[token]) for a, b in zip(one, other, strict=True) for token in a)


def references(case: Served, path: Path) -> dict[str, Any]:
    """transformers' model with lpq's layers, which encode inputs as engines are told to, and with decoded weights."""
    encoded, decoded = lpq.load_quantized(case.plain(), path).eval(), case.plain()
    for name, layer in tiny.layers(encoded).items():
        decoded.get_submodule(name).weight.data = tiny.decoded(layer, torch.bfloat16)
    return {"encoded": encoded, "bf16": decoded}


@pytest.mark.parametrize("case", GENERATED, ids=str)
def test_vllm_generates_as_transformers_does(case: Served, tmp_path: Path) -> None:
    """A model that was not quantized is farther away, and another one is far."""
    lpq.export(model := case.build(), tmp_path / "x", **case.options(model))
    steps = on_cpu.generated(on_cpu.engine(tmp_path / "x"), PROMPT, 4)
    reference, limit = RUN[case.weights, case.inputs]
    near = farthest(steps, likeliest(references(case, tmp_path / "x")[reference], PROMPT, steps))
    assert near < limit
    assert near < farthest(steps, likeliest(case.plain(), PROMPT, steps))
    assert farthest(steps, likeliest(case.build(seed=1), PROMPT, steps)) > 1
    found.setdefault(case, {})["outcome"] = "read and generated"


@pytest.mark.parametrize("weights", ["mxfp8", "nvfp4"])
def test_transformers_reads_the_files_that_vllm_generates_from(weights: str, tmp_path: Path) -> None:
    """The version that vLLM needs. It encodes inputs, so that it comes near to vLLM, and no nearer."""
    transformers: Any = pytest.importorskip("transformers")
    (case,) = [one for one in GENERATED if (one.layout, one.weights) == ("compressed-tensors", weights)]
    lpq.export(model := case.build(), tmp_path / "x", **case.options(model))
    how = transformers.CompressedTensorsConfig(run_compressed=False)
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "x", dtype=torch.bfloat16, quantization_config=how
    )
    for name, layer in tiny.layers(model).items():
        assert torch.equal(read.get_submodule(name).weight, tiny.decoded(layer, torch.bfloat16))
    steps = on_cpu.generated(on_cpu.engine(tmp_path / "x"), PROMPT, 4)
    assert farthest(steps, likeliest(read, PROMPT, steps)) < 0.15


# ---------------------------------------------------------------------------------------------- refit


def parameters(llm: Any) -> dict[str, Any]:
    """Copies of an engine's parameters, as it multiplies them."""
    (found,) = llm.apply_model(lambda model: {n: p.detach().clone() for n, p in model.named_parameters()})
    return dict(found)


@pytest.mark.parametrize("case", GENERATED, ids=str)
def test_new_weights_reach_an_engine_that_runs(case: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two generations, code by code, out of weights that are stored quantized and are never decoded. The engine
    is then one that was started from an export of them."""
    old = case.build()
    lpq.export(old, tmp_path / "old", **case.options(old))
    engine = on_cpu.engine(tmp_path / "old")
    before, first = parameters(engine), on_cpu.generated(engine, PROMPT, 4)
    new = lpq.convert(case.plain(seed=1), case.policy(), weights="quantized")
    assert all(isinstance(layer.weight, lpq.QuantizedTensor) for layer in tiny.layers(new).values())
    lpq.export(new, tmp_path / "new", **case.options(new))
    with monkeypatch.context() as patch:
        patch.setattr(lpq.QuantizedTensor, "dequantize", lambda *args: pytest.fail("a weight was decoded"))
        stream = lpq.export.stream(new, **case.options(new))
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})
    after, second = parameters(engine), on_cpu.generated(engine, PROMPT, 4)
    started = on_cpu.engine(tmp_path / "new")
    expected = parameters(started)
    assert after.keys() == expected.keys()
    assert all(torch.equal(as_bytes(after[name]), as_bytes(one)) for name, one in expected.items())
    assert not torch.equal(as_bytes(after[CODES]), as_bytes(before[CODES]))
    assert second == on_cpu.generated(started, PROMPT, 4) != first


CODES = "model.layers.0.self_attn.o_proj.weight"


# ---------------------------------------------------------------------------------------------- what would be misread


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-current"])
def test_what_is_refused_would_be_misread(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponents become numbers without a word, and a scale by transformers' name is none of vLLM's."""
    plain = Served("dense", "fp8-block", recipe, "bf16").plain()
    model, schemes = lpq.convert(plain, recipe), registry.schemes
    with pytest.raises(CheckpointError, match="lpq writes no"):
        lpq.export(model, tmp_path / "x", layout="fp8-block")
    written = {name: tuple(replace(s, unwritten=None) for s in schemes(name)) for name in registry.formats()}
    monkeypatch.setattr(registry, "schemes", written.get)
    lpq.export(model, tmp_path / "x", layout="fp8-block")
    if recipe == "fp8-current":
        with pytest.raises(ValueError, match=r"weight_scale_inv"):
            on_cpu.filled(tmp_path / "x")
        return
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    scale, exponents = on_cpu.filled(tmp_path / "x").get_parameter(name), tiny.tensors(tmp_path / "x")[name]
    assert (scale.dtype, exponents.dtype) == (torch.float32, torch.uint8)
    assert torch.equal(scale.flatten(), exponents.float().flatten())


# ---------------------------------------------------------------------------------------------- names, pages, results

NOT_KNOWN = {
    ("fc1", "fc3"), ("gate_proj", "dense_h_to_4h"),  # parts of encoders of images; layers of other models stay apart
    ("attn.q", "attn.k", "attn.v"),
    ("q_proj", "k_proj", "v_proj", "b_proj"), ("q_proj", "k_proj", "v_proj", "g_proj"),  # one model each
}  # fmt: skip
"""Layers that a model of vLLM's fuses, and that lpq does not take for fused."""


def test_lpq_knows_the_layers_that_vllm_fuses() -> None:
    """By the sources of its models (``packed_modules_mapping``)."""
    fused: set[tuple[str, ...]] = set()
    for source in (Path(vllm.__file__).parent / "model_executor" / "models").rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            targets = [*node.targets] if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if not any(one is not None and "packed_modules_mapping" in ast.unparse(one) for one in targets):
                continue
            lists = [one for one in ast.walk(node) if isinstance(one, ast.List)]
            names = [[part.value for part in one.elts if isinstance(part, ast.Constant)] for one in lists]
            fused |= {tuple(name.removeprefix("self_attn.") for name in one) for one in names if len(one) > 1}
    fused = {one for one in fused if not any({*one} < {*other} for other in FUSED)}  # and those in part
    fused = {one for one in fused if not any(name.startswith("encoder_attn.") for name in one)}
    assert len(fused) > 8
    assert fused - NOT_KNOWN == {*FUSED}
    assert fused >= NOT_KNOWN


def test_the_results_are_those_of_the_repository() -> None:
    """After all others. They are written with RECORD=1."""
    if len(found) < len(CASES) or any("digest" not in one for one in found.values()):
        pytest.skip("only a part of the cases was run")
    made = {
        "engine": served.ENGINE, "version": vllm.__version__, "torch": torch.__version__,
        "command": "make test-vllm RECORD=1", "date": str(date.today()),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} processors",
        "cases": [asdict(case) | found[case] for case, _ in CASES],
    }  # fmt: skip
    if os.environ.get("LPQ_RECORD"):
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(made, indent=1) + "\n")
    kept = served.results()
    assert (kept["version"], kept["cases"]) == (made["version"], made["cases"])
