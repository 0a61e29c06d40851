"""The command of the benchmarks: which parts it runs, what it refuses, and what its files are called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import contenders, environment, shapes, stored, tables
from benchmarks.contenders import of_models
from benchmarks.rows import one_by_one

Results = dict[str, dict[str, Any]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the benchmarks would run")
@pytest.mark.parametrize("arguments", [[], ["linear", "--quick"], ["stack"]])
def test_without_a_gpu_it_says_so(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*arguments, "--out", str(tmp_path)]) == 2
    assert "CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


SMALL = ["--layers", "1", "--hidden", "128", "--batch", "1", "--sequence", "32", "--words", "64"]


@pytest.mark.starts
def test_a_small_llama_is_trained_by_whoever_takes_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs transformers, which `make install` brings")
    monkeypatch.setattr(command.environment, "lacking", lambda ranks: None)
    compiled = torch.nn.Module.compile  # here by a backend that only traces: kernels take seconds
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: compiled(self, backend="aot_eager", **how))
    arguments = ["llama", *SMALL, "--recipe", "fp8-current", "--only", "bf16", "--only", "lpq", "--quick"]
    assert command.main([*arguments, "--out", str(tmp_path)]) == 0
    (stem, result) = next(iter(stored.load(tmp_path).items()))
    assert stem == "llama-1x128-1x32"
    assert [tables.name(one) for one in result["results"]] == [
        "bf16", "bf16, compiled", "lpq fp8-current", "lpq fp8-current, compiled"
    ]  # fmt: skip
    assert [one["failure"] for one in result["results"]] == [None] * 4
    assert [one["graph_breaks"] for one in result["results"]] == [None, 0, None, 0]
    plain, traced, quantized, both = (one["loss"] for one in result["results"])
    assert plain == pytest.approx(traced, rel=0.02) == pytest.approx(quantized, rel=0.05)
    assert quantized == pytest.approx(both, rel=0.02)
    assert plain != quantized
    assert "Hugging Face's Llama, 1 layers, hidden 128" in capsys.readouterr().out


def test_without_transformers_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.environment, "lacking", lambda ranks: None)
    monkeypatch.setattr(command.huggingface.importlib.util, "find_spec", lambda name: None)
    assert command.main(["llama", "--out", str(tmp_path)]) == 2
    assert "pip install transformers" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        command.main(["linaer"])
    assert status.value.code == 2
    assert "linaer" in capsys.readouterr().err


def test_the_recorded_command_names_no_folder() -> None:
    for given, told in (
        (["linear", "--out", "here", "--quick"], " linear --quick"),
        (["--out=here", "host"], " host"),
        (["llama", "--resume"], " llama"),
    ):
        assert environment.record(given)["command"] == f"python -m benchmarks{told}"


def test_the_size_of_casts(capsys: pytest.CaptureFixture[str]) -> None:
    assert command._options(["casts"]).size == (16384, 8192)
    assert command._options(["casts", "--size", "32768x16384"]).size == (32768, 16384)
    for size, stem in (("16384x8192", "casts"), ("32768x16384", "casts-32768x16384")):
        options = command._options(["casts", "--size", size])
        assert command._stem("casts", 1, options) == stem
        assert command._stem("linear", 1, options) == "linear"
        assert command._stem("stack", 2, options) == "stack-2"
    options = command._options(["linear", "--one-thread"])
    assert [command._stem(part, ranks, options) for part, ranks in (("linear", 1), ("stack", 2), ("casts", 1))] == [
        "linear-one-thread", "stack-2-one-thread", "casts"
    ]  # fmt: skip
    options = command._options(["linear", "--mode", "reduce-overhead"])
    assert [command._stem(part, 1, options) for part in ("linear", "host", "stack", "casts")] == [
        "linear-reduce-overhead", "host-reduce-overhead", "stack", "casts"
    ]  # fmt: skip
    for nothing in (["casts"], ["linear", "--no-compile"]):
        with pytest.raises(SystemExit):
            command._options([*nothing, "--mode", "reduce-overhead"])
        assert "--mode is for what linear, host and parallel compile" in capsys.readouterr().err
    for wrong in ("32768", "0x16384", "-1x5"):
        with pytest.raises(SystemExit):
            command._options(["casts", f"--size={wrong}"])
        assert f"{wrong!r} is not ROWSxCOLUMNS, such as 32768x16384" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "stem"),
    [
        (["llama"], "llama-4"),
        (["llama", "--tiny"], "llama-4-tiny"),
        (["llama", "--layers", "8", "--batch", "2"], "llama-4-8x2048-2x2048"),
        (["llama", "--model", "8b"], "llama-4-8b"),
        (["llama", "--model", "8b", "--layers", "8", "--checkpointing", "selective"], "llama-4-8b-layers-8-selective"),
        (["layouts", "--batch", "8"], "layouts-4-8x2048"),
        (["layouts", "--mixture", "qwen3", "--experts", "64"], "layouts-4-qwen3-64-experts-4x2048"),
    ],
)
def test_files_of_other_models_stand_beside_each_other(arguments: list[str], stem: str) -> None:
    options = command._options(arguments)
    assert command._stem(options.parts[0], 4, options) == stem


def test_a_model_of_8_billion_weights_has_the_sizes_of_llama_3() -> None:
    options = command._options(["llama", "--model", "8b", "--layers", "8"])
    found = command._decoder(options)
    assert (found.layers, found.heads, found.kv_heads, found.ffn, found.tokens) == (8, 32, 8, 14336, 8192)
    whole, width = shapes.MODELS["8b"], found.hidden
    layer = 2 * width * width * (1 + found.kv_heads / found.heads) + 3 * width * found.ffn + 2 * width
    assert whole.layers * layer + 2 * whole.words * width + width == 8_030_261_248


def test_a_run_of_one_process_by_torchrun_shards_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    options = command._options(["llama"])
    assert command._stem("llama", 1, options) == "llama"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert command._stem("llama", 1, options) == "llama-1"
    assert environment.record(["llama"])["command"] == "torchrun --nproc-per-node 1 -m benchmarks llama"


def test_only_what_is_wanted_takes_part() -> None:
    everyone = of_models(("fp8-current",), sharded=True)
    names = [c.name for c in contenders.chosen(everyone, ["lpq"], ["gathered in bf16"])]
    assert names == ["bf16", "lpq fp8-current", "lpq fp8-current, compiled"]


def test_rows_that_are_stored_are_gone_on_with(
    results: Results, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    setting = asdict(shapes.Decoder()) | {"ranks": 1}

    def measured(part: str, options: Any, before: Any) -> Iterator[dict[str, Any]]:
        seen.append(before)
        yield from one_by_one([], setting, before)

    record = {**results["llama"]["environment"], "command": "python -m benchmarks llama --layers 3"}
    monkeypatch.setattr(command.environment, "lacking", lambda ranks: None)
    monkeypatch.setattr(command.environment, "record", lambda arguments, ranks: {**record, "command": "then this"})
    monkeypatch.setattr(command, "_measure", measured)
    monkeypatch.setattr(command.stored, "show", lambda result: None)
    monkeypatch.setattr(command.stored, "plot", lambda *where: None)
    arguments = ["llama", "--resume", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    assert seen == [None]
    stored.save(tmp_path, "llama", record, {**setting, "results": results["llama"]["results"]})
    assert command.main(arguments) == 0
    whole = json.loads((tmp_path / "llama.json").read_text())
    assert whole["results"] == results["llama"]["results"]
    assert whole["environment"]["command"] == "python -m benchmarks llama --layers 3; then this"
    setting["ranks"] = 2
    assert command.main(arguments) == 2
    assert "the rows that are stored differ in ranks" in capsys.readouterr().err
    record["device"] = "another"
    assert command.main(arguments) == 2
    assert "were measured elsewhere (device CPU then and another now)" in capsys.readouterr().err


def test_a_recipe_that_is_none_is_refused_before_a_gpu_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        command._options(["host", "--recipe", "fp8-current", "--recipe", "x=fp8,w=fp8,dy=fp8"]).recipe[0]
        == "fp8-current"
    )
    with pytest.raises(SystemExit) as status:
        command.main(["host", "--recipe", "fp8-curent"])
    assert status.value.code == 2
    assert "--recipe fp8-curent: " in (said := capsys.readouterr().err)
    assert "fp8-current" in said


def test_stored_results_are_shown_anywhere(
    results: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "host.json").write_text(json.dumps(results["host"]))
    assert command.main(["show", "--out", str(tmp_path)]) == 0
    assert "Host time of a step at 128x128x128" in capsys.readouterr().out
    (tmp_path / "linear.json").write_text(json.dumps(results["linear"]))
    assert command.main(["show", "linear", "--out", str(tmp_path)]) == 0
    assert "Host time of a step" not in (out := capsys.readouterr().out)
    assert "Linear" in out
    assert command.main(["show", "stack", "--out", str(tmp_path)]) == 2
    assert "has no results of stack" in capsys.readouterr().err


@pytest.mark.parametrize("parts", [["show", "cast"], ["page", "casts"], ["show", "page"], ["casts", "show"]])
def test_what_cannot_be_shown_is_refused(parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        command.main(parts)
    assert status.value.code == 2
    said = capsys.readouterr().err
    assert any(words in said for words in ("no such part: cast;", "page takes no parts", "show and page stand first"))


@pytest.mark.parametrize("what", ["show", "page"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "has no results: `python -m benchmarks --out"),
        ("{", "host.json cannot be read: "),
        ("[]", "host.json is no result of a benchmark"),
        ('{"part": "houses"}', "host.json is no result of a benchmark"),
        ('{"part": ["host"]}', "host.json is no result of a benchmark"),
        ('{"part": "host", "environment": {}}', "host.json is no whole result of host: KeyError: 'devices'"),
    ],
)
def test_results_that_are_not_there_or_none_are_told(
    what: str, text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "host.json").write_text(text)
    before = [page.read_text() for page in stored.PAGES]
    assert command.main([what, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert [page.read_text() for page in stored.PAGES] == before


@pytest.mark.parametrize("one_thread", [False, True])
def test_backward_may_run_in_the_thread_that_calls_it(
    one_thread: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[bool] = []

    def measured(part: str, options: Any, before: Any) -> Iterator[dict[str, Any]]:
        found.append(torch._C._is_multithreading_enabled())
        yield {"shapes": [], "copy_speed": 1.0}

    monkeypatch.setattr(command.environment, "lacking", lambda ranks: None)
    monkeypatch.setattr(command.environment, "record", lambda arguments, ranks: {"command": ""})
    monkeypatch.setattr(command, "_measure", measured)
    monkeypatch.setattr(command.stored, "show", lambda result: None)
    monkeypatch.setattr(command.stored, "plot", lambda *where: None)
    assert command.main(["linear", "--out", str(tmp_path), *(["--one-thread"] if one_thread else [])]) == 0
    assert found == [not one_thread]
    assert torch._C._is_multithreading_enabled()
    assert [path.name for path in tmp_path.iterdir()] == [f"linear{'-one-thread' if one_thread else ''}.json"]
