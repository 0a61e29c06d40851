"""``lpq bench`` on a CPU, at tiny sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import lpq as library
from lpq.bench import chart, speedups
from lpq.bench.layers import Layers, LayerSize
from lpq.bench.native import native_products, to_begin_with
from lpq.cli.bench import _remarks

SVG = "{http://www.w3.org/2000/svg}"


def test_a_map_is_a_table_and_a_picture(lpq: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedups, "ON_CPU", ((16, 32), (16, 48)))
    ended = lpq("bench", "--device", "cpu", "--recipe", "mxfp8", "--out", tmp_path / "out")
    assert (ended.status, ended.err) == (0, "")
    assert "mxfp8: times as fast as bf16, forward and backward; CPU" in ended.out
    assert "These are times of emulation" in ended.out
    assert f"written to {tmp_path}/out/: bench.json and bench.svg" in ended.out.replace("\n", "")
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [(s["tokens"], s["inputs"], s["outputs"]) for s in found["shapes"]] == [
        (16, 16, 16), (16, 48, 48), (32, 16, 16), (32, 48, 48),
    ]  # fmt: skip
    drawn = ElementTree.fromstring((tmp_path / "out" / "bench.svg").read_text())
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    for shape in found["shapes"]:
        gain = f"{speedups.speedup(shape, 'mxfp8'):.2f}"
        assert gain in texts
        assert gain in ended.out


def test_shapes_are_tokens_inputs_and_outputs(lpq: Callable) -> None:
    found = json.loads(lpq("bench", "--shape", "16,32,48", "--device", "cpu", "--json").out)
    (shape,) = found["shapes"]
    assert (shape["tokens"], shape["inputs"], shape["outputs"]) == (16, 32, 48)
    assert [row["recipe"] for row in shape["results"]] == ["bf16", "fp8-current"]
    assert all(row["ms"] > 0 and row["failure"] is None for row in shape["results"])
    assert found["native"] == {"fp8-current": []}
    assert found["environment"]["command"] == "lpq bench --shape 16,32,48 --device cpu"


@pytest.mark.parametrize("option", ["--tokens", "--experts-per-token"])
def test_what_is_for_a_model_is_refused_without_one(lpq: Callable, option: str) -> None:
    ended = lpq("bench", "--shape", "16,32,48", option, 8, "--device", "cpu")
    assert (ended.status, f"{option} 8 is for the layers of --model: name a model" in ended.err) == (2, True)


def two_layers() -> nn.Module:
    return nn.ModuleDict({"0": nn.Linear(32, 16), "1": nn.Linear(32, 16), "up": nn.Linear(16, 64)})


def with_experts() -> nn.Module:
    return nn.ModuleDict({"experts": library.nn.GroupedLinear(4, 32, 16, recipe="mxfp8"), "up": nn.Linear(16, 64)})


def test_experts_are_timed_if_it_is_known_how_many_rows_they_get(
    lpq: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    options = ("bench", "--model", "test_bench:with_experts", "--tokens", 16, "--device", "cpu", "--recipe", "mxfp8")
    assert "Experts are left out (experts)" in lpq(*options).out
    ended = lpq(*options, "--experts-per-token", 2)
    assert "4 experts, 32x32x16" in ended.out
    assert "Experts are left out" not in ended.out
    found = json.loads(lpq(*options, "--experts-per-token", 2, "--json").out)
    assert found["environment"]["command"].endswith("--experts-per-token 2 --device cpu --recipe mxfp8")
    (experts,) = [shape for shape in found["shapes"] if "experts" in shape]
    assert all(row["ms"] > 0 and row["failure"] is None for row in experts["results"])


def test_the_layers_of_a_model_are_counted(lpq: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    ended = lpq("bench", "--model", "test_bench:two_layers", "--tokens", 16, "--device", "cpu")
    assert (ended.status, ended.err) == (0, "")
    rows = [line.split() for line in ended.out.splitlines() if "16x" in line or "all of them" in line]
    assert (rows[0][:4], rows[1][:3]) == (["16x32x16", "0,", "1", "2"], ["16x16x64", "up", "1"])
    one, other = float(rows[0][4]), float(rows[1][3])
    assert float(rows[2][4]) == pytest.approx(2 * one + other, abs=0.03)


def test_a_config_of_hugging_face_is_built_without_its_weights(lpq: Callable, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, which `make install` brings")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "config.json"):
        found = json.loads(lpq("bench", "--model", source, "--tokens", 16, "--device", "cpu", "--json").out)
        sizes = {(s["inputs"], s["outputs"]) for s in found["shapes"]}
        assert sizes == {(32, 32), (32, 64), (64, 32)}, "and not the head"


def test_a_folder_that_is_no_model_is_told(lpq: Callable, tmp_path: Path) -> None:
    ended = lpq("bench", "--model", tmp_path)
    assert ended.status == 1
    assert f"--model: transformers cannot build the model of {tmp_path}" in ended.err


def test_what_does_not_fit_is_a_result_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(Layers):
        def __init__(self, everyone: object, size: LayerSize, device: torch.device) -> None:
            if size.tokens > 16:
                raise torch.OutOfMemoryError("too large")
            super().__init__(everyone, size, device)  # type: ignore[arg-type]

    monkeypatch.setattr(speedups, "Layers", Small)
    sizes = [LayerSize(tokens, 16, 16) for tokens in (32, 16)]
    large, fits = speedups.measure(sizes, ("mxfp8",), torch.device("cpu"))
    assert speedups.speedup(large, "mxfp8") is None
    assert speedups.speedup(fits, "mxfp8") is not None
    failed = [f"{name}: OutOfMemoryError: too large" for name in ("bf16", "lpq mxfp8")]
    assert speedups.failures([large, fits]) == failed
    drawn = ElementTree.fromstring(chart.svg([large, fits], "t"))
    assert [text.text for text in drawn.iter(f"{SVG}text")].count("–") == 1


def test_what_does_not_fit_on_a_cpu_is_a_result_too(lpq: Callable) -> None:
    """Torch's error is a class of its own on a GPU alone."""
    sizes = ("--shape", "16,16,16", "--shape", f"{10**9},{10**7},16")
    ended = lpq("bench", "--device", "cpu", *sizes, "--recipe", "mxfp8")
    assert ended.status == 0
    assert "can't allocate memory" in ended.err
    rows = {line.split()[0]: line.split()[1:] for line in ended.out.splitlines() if "x16" in line}
    assert "–" not in rows.pop("16x16x16")
    assert [row[0] for row in rows.values()] == ["–"]
    for size in ("1" + 18 * "0", 5000 * "1"):
        ended = lpq("bench", "--device", "cpu", "--shape", f"{size},16,16")
        assert (ended.status, "it is not M,K,N" in ended.err) == (2, True)


def test_a_gpu_multiplies_what_its_kernels_declare() -> None:
    import lpq

    assert [to_begin_with(sm) for sm in (None, 80, 89, 90)] == [(), (), ("fp8-current",), ("fp8-current",)]
    assert to_begin_with(100) == ("fp8-current", "mxfp8", "nvfp4")
    block = lpq.recipe("fp8-block")
    assert native_products(block, 90) == ["fprop", "dgrad", "wgrad"]
    assert native_products(block, 100) == [], "cuBLAS has it on Hopper alone"
    assert native_products(lpq.recipe("fprop=fp8-current, dgrad=mxfp8, wgrad=bf16"), 90) == ["fprop"]
    (said,) = _remarks({"bf16": [], "nvfp4": []}, torch.device("cuda"))
    assert said.startswith("nvfp4: this GPU multiplies none of its products as codes")
