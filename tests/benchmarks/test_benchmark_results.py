"""Numbers in the hands of the benchmarks: floors, tables, plots, files and pages. No GPU is needed for that."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import lpq
from benchmarks import environment, plots, profiles, scaling, stored, tables
from benchmarks.contenders import KINDS, PEERS, RECIPES, of_layers, of_stacks
from benchmarks.floor import FLOORS, Floor
from benchmarks.layers import encoded_bytes
from benchmarks.shapes import HOST, LINEAR, Stack
from lpq.bench.layers import LayerSize

Results = dict[str, dict[str, Any]]


# ---------------------------------------------------------------------------------------------- sizes and floors


def test_a_shape_counts_the_elements_of_its_three_tensors() -> None:
    assert LayerSize(2, 3, 5).tensors == (6, 15, 10)
    assert str(HOST) == "128x128x128"
    assert Stack().tokens == 8192


@pytest.mark.parametrize("shape", LINEAR, ids=str)
def test_sizes_suit_every_format_and_every_scaled_matmul(shape: LayerSize) -> None:
    assert all(size % 512 == 0 for size in (shape.tokens, shape.inputs, shape.outputs))


def test_a_floor_is_its_gemms_and_its_bytes_at_copy_speed() -> None:
    shape = LayerSize(8192, 4096, 4096)
    assert FLOORS["fp8-current"].quantized_bytes(shape) == 6 * sum(shape.tensors)
    assert FLOORS["fp8-delayed"].quantized_bytes(shape) == 4 * sum(shape.tensors)
    assert Floor("tensor", reads=2).seconds(shape, 0.5e-3, 6e12) == pytest.approx(0.5e-3 + sum(shape.tensors) / 1e12)


def test_every_recipe_exists_and_other_libraries_are_compared_with_one_that_has_a_floor() -> None:
    assert [lpq.recipe(name).name for name in RECIPES] == list(RECIPES)
    assert set(KINDS.values()) <= set(FLOORS) <= set(RECIPES)


def test_the_bytes_kept_for_backward_are_those_of_two_operands() -> None:
    shape = LayerSize(64, 32, 128)
    elements = 64 * 32 + 128 * 32
    assert encoded_bytes("fp8-current", shape) == elements + 2 * 4
    assert encoded_bytes("mxfp8", shape) == elements + elements // 32


def test_names_differ() -> None:
    for everyone in (of_layers(), of_stacks()):
        names = [c.name for c in everyone]
        assert len(set(names)) == len(names)
        assert names[0] == "bf16"


# ---------------------------------------------------------------------------------------------- tables


def row(table: tables.Table, name: str) -> list[str]:
    (found,) = [list(cells[1:]) for cells in table.rows if cells[0] == name]
    return found


def test_ratios_divide_by_what_their_title_names(results: Results) -> None:
    made = tables.linear(results["linear"])
    assert row(made["times"], "bf16") == ["2.00", "2.00"]
    assert row(made["times"], "lpq fp8-current") == ["4.00", "4.00"]
    assert row(made["bf16"], "lpq fp8-current") == ["2.00", "2.00"]
    assert row(made["peers"], "lpq fp8-current ÷ torchao tensorwise, compiled") == ["1.00", "1.00"]
    assert row(made["memory"], "lpq fp8-current") == ["1.0 (2.00)", "1.0 (2.00)"]
    floor = results["linear"]["shapes"][0]["floors"]["fp8-current"]["ms"]
    assert row(made["floor"], "torchao tensorwise, compiled")[0] == f"{4 / floor:.2f}"
    assert not [cells for cells in made["floor"].rows if "nvfp4" in cells[0]]


def test_host_time_has_a_reading_in_one_thread_and_one_as_graphs(results: Results) -> None:
    """A recipe that is recorded as a graph is compared to ``nn.Linear`` as a graph."""
    made = tables.host(results["host"])["times"]
    assert row(made, "bf16") == ["100", "1.00", "50", "1.00", "90", "1.00"]
    assert row(made, "bf16, compiled") == ["200", "2.00", "75", "1.50", tables.NONE, tables.NONE]


def test_what_failed_stands_in_the_table_and_what_is_missing_below(
    results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    times = tables.linear(results["linear"])["times"]
    assert row(times, "bf16, compiled") == ["3.00", tables.NONE]
    assert not [cells for cells in times.rows if "TransformerEngine" in cells[0]]
    stored.show(results["linear"])
    assert "\nnot measured, since not installed: TransformerEngine\n" in capsys.readouterr().out
    results["linear"]["environment"]["peers"]["TransformerEngine"] = "2.20.2"
    assert tables.absent(results["linear"]) == ""
    assert tables.failures(results["linear"]) == ["bf16, compiled: ValueError: it cannot"]
    assert tables.failures(results["host"]) == []
    for row_ in results["layouts-4"]["results"]:
        row_["failure"] = "no" if row_["recipe"] == "bf16" else None
    assert tables.failures(results["layouts-4"]) == ["one GPU: bf16: no", "TP 4: bf16: no"]
    results["casts"]["peers"] = [{"library": "TransformerEngine", "name": "casts", "sides": "", "failure": "no"}]
    assert row(tables.casts(results["casts"])["times"], "TransformerEngine casts")[1] == tables.NONE
    assert tables.failures(results["casts"]) == ["TransformerEngine casts: no"]


def test_faster_than_bf16_is_above_one_for_tokens(results: Results) -> None:
    made = tables.stack(results["stack-2"])["times"]
    assert row(made, "lpq fp8-current")[:3] == ["60,000", "1.50", "1.20"]
    assert "2 GPUs" in made.title


def test_bytes_gathered_stand_beside_memory_where_they_were_counted(results: Results) -> None:
    without = tables.stack(results["stack-2"])["times"]
    results["stack-2"]["results"][0]["gathered_bytes"] = 2**30
    made = tables.stack(results["stack-2"])["times"]
    assert made.columns == [*without.columns, "MiB gathered"]
    assert row(made, "bf16") == [*row(without, "bf16"), "1,024"]
    assert row(made, "lpq fp8-current") == [*row(without, "lpq fp8-current"), tables.NONE]
    assert {len(cells) for cells in made.rows} == {len(made.columns)}


def test_grouped_layers_are_compared_with_bf16_and_the_floor(results: Results) -> None:
    made = tables.grouped(results["grouped"])
    assert row(made["bf16"], "lpq fp8-row") == ["0.75", tables.NONE], "which has not run at the second shape yet"
    assert row(made["floor"], "lpq fp8-row") == ["1.20", tables.NONE]
    assert row(made["times"], "floor of FP8, fast everywhere") == ["4.50", tables.NONE]


def test_memory_of_a_model_is_compared_with_what_is_compiled_alike(results: Results) -> None:
    """Peaks: bf16 20 GiB, 19 compiled; fp8-current 18 and, compiled, 16; torchao, compiled, 14."""
    made = tables.llama(results["llama"])
    assert row(made["memory"], "lpq fp8-current") == ["18.0", "0.90", tables.NONE]
    assert row(made["memory"], "lpq fp8-current, compiled") == ["16.0", "0.84", "1.14"]
    assert row(made["times"], "lpq fp8-current, compiled")[:3] == ["90,000", "1.80", "1.50"]
    assert row(made["peers"], "lpq fp8-current, compiled ÷ torchao tensorwise, compiled") == ["0.82"]


def test_memory_that_ran_out_is_told_in_the_row(results: Results) -> None:
    result = results["llama"]
    result["results"][2] = {**result["results"][2], "tokens_per_second": None, "peak_bytes": None}
    result["results"][2]["failure"] = "rank 1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    result["results"][3] |= {"tokens_per_second": None, "failure": "ValueError: it cannot"}
    made = tables.llama(result)["times"]
    assert row(made, "lpq fp8-current")[0] == "out of memory"
    assert row(made, "lpq nvfp4")[0] == tables.NONE


def several(results: Results) -> Results:
    """The same model on two numbers of GPUs, and another model on one."""
    one = results["llama"] | {"sharded": True, "checkpointing": "none"}
    two = one | {"ranks": 2, "results": [{**row, "tokens_per_second": 3e4} for row in one["results"]]}
    two["results"][0] |= {"tokens_per_second": None, "failure": "OutOfMemoryError: CUDA out of memory."}
    other = one | {"layers": 3}
    return {"llama-1-8b": one, "llama-2-8b": two, "llama-1-8b-layers-3": other, "llama": results["llama"]}


def test_one_model_on_several_numbers_of_gpus_is_put_together(results: Results) -> None:
    found = scaling.over_ranks(several(results))
    assert list(found) == ["scaling-8b"]
    made = tables.scaling(found["scaling-8b"])["times"]
    assert list(made.columns) == ["", "1 GPU", "2 GPUs", "2 GPUs ÷ the fewest"]
    assert row(made, "bf16") == ["50,000", "out of memory", tables.NONE]
    assert row(made, "bf16, compiled") == ["60,000", "30,000", "0.50"]
    chart = ElementTree.fromstring(plots.drawn(found["scaling-8b"]))
    shown = [text.text for text in chart.iter("{http://www.w3.org/2000/svg}text")]
    assert shown.count("2 GPUs") == len(results["llama"]["results"])
    assert "out of memory" in shown


def test_words_below_a_mark_stand_on_the_page_once_there_is_a_result(results: Results) -> None:
    page = "a\n<!-- benchmarks: scaling-8b chart\n## Scaling\n\nIt is > 1. -->\n<!-- end -->\nb\n"
    assert stored.filled(page, {}) == page
    filled = stored.filled(page, scaling.over_ranks(several(results)))
    inside = filled.partition(" -->\n\n")[2]
    assert inside.startswith("## Scaling\n\nIt is > 1.\n\n![Tokens/s and GPU of 16 layers, ")
    assert inside.endswith("(assets/performance-scaling-8b.svg)\n\n<!-- end -->\nb\n")
    assert stored.charted(filled) == ["scaling-8b"]
    assert stored.filled(filled, scaling.over_ranks(several(results))) == filled


@pytest.mark.parametrize("stem", ["linear", "host", "stack-2", "casts", "llama", "grouped", "layouts-4"])
def test_every_part_prints_is_markdown_and_is_drawn_from_its_file(
    stem: str, results: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored.show(results[stem])
    assert "÷" in capsys.readouterr().out or stem == "casts"
    for table in tables.OF[results[stem]["part"]](results[stem]).values():
        lines = table.markdown().splitlines()
        assert len(lines) == len(table.rows) + 2
        assert {line.count("|") for line in lines} == {len(table.columns) + 1}
    (tmp_path / f"{stem}.json").write_text(json.dumps(results[stem]))
    stored.plot(tmp_path, stem, stored.load(tmp_path)[stem])
    chart = ElementTree.fromstring((tmp_path / f"{stem}.svg").read_text())
    shown = [text.text for text in chart.iter("{http://www.w3.org/2000/svg}text")]
    assert any("fp8" in (text or "") for text in shown), "the names of who took part"


# ---------------------------------------------------------------------------------------------- plots, files, pages


def test_a_bar_is_as_long_as_its_value(results: Results) -> None:
    """Memory: bf16 20 GiB, lpq's fp8-current 18; bars begin at zero."""
    chart = ElementTree.fromstring(plots.svg(*plots._training(results["llama"])))
    bars = [one for one in chart.iter("{http://www.w3.org/2000/svg}rect") if one.get("class") in ("torch", "lpq")]
    memory = {(one.get("class"), one.get("y")): float(one.get("width") or 0) for one in bars[1::2]}
    longest, *_ = sorted(memory.values(), reverse=True)
    assert [round(20 * wide / longest) for wide in memory.values()] == [20, 18, 17, 19, 16, 15]


@pytest.mark.parametrize("library", ["torch", "lpq", *PEERS])
def test_a_bar_of_each_library_has_a_colour(results: Results, library: str) -> None:
    found = copy.deepcopy(results["llama"])
    found["results"][-1]["library"] = library
    drawn = plots.drawn(found)
    name = plots.CLASSES[library]
    assert f'<rect class="{name}"' in drawn
    assert f".{name} {{ fill: var(--{name}); }}" in drawn
    assert drawn.count(f"--{name}: #") == 2  # on light and on dark ground


def test_a_file_holds_the_result_and_the_machine(results: Results, tmp_path: Path) -> None:
    found = {key: value for key, value in results["stack-2"].items() if key not in ("part", "environment")}
    whole = stored.save(tmp_path, "stack-2", environment.record(["stack"], ranks=2), found)
    assert stored.load(tmp_path) == {"stack-2": whole}
    assert whole["part"] == "stack"
    record = whole["environment"]
    assert {"date", "device", "torch", "cuda", "lpq", "peers", "command"} <= set(record)
    assert record["command"] == "torchrun --nproc-per-node 2 -m benchmarks stack"


def test_a_page_is_filled_at_its_marks_only(results: Results) -> None:
    unknown = "<!-- benchmarks: none times -->\nkept\n<!-- end -->\n"
    page = f"a\n<!-- benchmarks: host times -->\nold\n<!-- end -->\nb\n{unknown}"
    filled = stored.filled(page, results)
    assert filled.startswith("a\n<!-- benchmarks: host times -->\n\n|  | µs | ÷ nn.Linear |")
    assert "old" not in filled
    assert filled.endswith(f"<!-- end -->\nb\n{unknown}")
    assert stored.filled(filled, results) == filled


def test_pages_show_the_stored_results() -> None:
    found, shown = stored.load(stored.FOLDER), set()
    for path in stored.PAGES:
        page = path.read_text()
        assert stored.filled(page, found) == page, "python -m benchmarks page"
        for place in stored.MARK.finditer(page):
            start, stem, *_, end = place.groups()
            assert stem in found or place.group() == start + end, f"{stem} is shown, and there is no file of it"
            assert stored.part_of(stem) in tables.OF
            shown.add(stem)
        for stem in stored.charted(page):
            drawn = (stored.CHARTS / f"performance-{stem}.svg").read_text()
            assert drawn == plots.drawn(found[stem]), "python -m benchmarks page"
    assert shown >= set(found), "results that no page shows"  # other places wait for what is not measured yet


@pytest.mark.parametrize("path", sorted(stored.FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_stored_results_have_tables(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result["part"] == stored.part_of(path.stem)
    assert result["environment"]["device"] != "CPU"
    assert all(table.rows for table in tables.OF[result["part"]](result).values())


# ---------------------------------------------------------------------------------------------- traces, the command


def test_a_trace_becomes_the_kernels_of_the_median_step() -> None:
    starts = [0.0, 12.0, 100.0, 112.0, 200.0, 214.0]
    events = [{"ts": t, "dur": 10.0, "name": "ab"[i % 2]} for i, t in enumerate(starts)]
    first, second = profiles.kernels_of(events[::-1], steps=3)
    assert (first.name, first.gap, first.took) == ("a", pytest.approx((78 + 78) / 2), 10.0)
    assert (second.name, second.gap) == ("b", 3.0)
    with pytest.raises(ValueError, match="5 kernels are not 3 equal steps"):
        profiles.kernels_of(events[:5], steps=3)


def test_the_time_of_a_gpu_by_kinds_of_kernels() -> None:
    events: list[dict[str, object]] = [
        {"name": name, "dur": took}
        for name, took in (("nvjet_tst_128", 4000), ("nvjet_tst_128", 2000), ("produce", 1000), ("unknown", 500))
    ]
    first, *rest = profiles.kinds_of(events, steps=2, lines=2).splitlines()
    assert first == "  the GPU's 3.8 ms of a step: products 3.0, encoding and activations 0.5, other 0.2"
    assert rest == ["      3.00 ms  nvjet_tst_128", "      0.50 ms  produce"]


@pytest.mark.starts
def test_profiles_of_kernels_are_of_compiled_layers_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kernels(step: object) -> list[profiles.Kernel]:
        seen.append(step)
        if len(seen) == 2:
            raise ValueError("it did not run")
        return [profiles.Kernel("a", 1.0, 4.0)]

    seen: list[object] = []
    monkeypatch.setattr(profiles, "kernels", kernels)
    monkeypatch.setattr(profiles, "functions", lambda step: "none")
    everyone = of_layers(("fp8-current",))[:4]
    profiles.show(everyone, LayerSize(16, 16, 16), torch.device("cpu"), on_host=False)
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if " at " in line] == [f"{c.name} at 16x16x16" for c in everyone]
    assert out.count("busy 4.0") == len(everyone) - 1
    assert "failed: ValueError: it did not run" in out
    profiles.show(everyone, LayerSize(16, 16, 16), torch.device("cpu"), on_host=True)
    assert "compiled" not in capsys.readouterr().out
