"""Numbers in sentences of the first pages are those of the results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import stored, tables
from lpq.train import trainings

ROOT = Path(__file__).parents[2]
PAGES = {
    name: " ".join((ROOT / name).read_text().split())
    for name in (
        "README.md",
        "docs/index.md",
        "docs/performance.md",
        "docs/fused.md",
        "docs/choose.md",
        "docs/design.md",
        "docs/evidence.md",
        "docs/numerics.md",
        "docs/policies.md",
        "benchmarks/NOTES.md",
    )
}
WIDE = "llama-6x4096-14336-2x4096-liger-positions-recorded"
ATTENTION = "attention compiled, fused, recorded", "recorded, compiled"
RECIPES = ("current", "delayed")
FP8 = ("fp8-current", "fp8-delayed", "fp8-block", "fp8-row")


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return stored.load(stored.FOLDER)


def said(page: str, sentence: str) -> tuple[str, ...]:
    """The numbers in place of the ``#`` of a sentence that a page must have, once."""
    pattern = re.escape(sentence).replace("\\#", r"(\d+\.\d+)")
    (found,) = re.finditer(pattern, PAGES[page])
    return found.groups()


def of(result: dict[str, Any], reading: str, name: str) -> float:
    (row,) = [row for row in result["results"] if tables.name(row) == name]
    return float(row[reading])


def ratio(result: dict[str, Any], reading: str, one: str, other: str) -> str:
    return f"{of(result, reading, one) / of(result, reading, other):.2f}"


def test_the_llama_of_the_first_pages(results: dict[str, dict[str, Any]]) -> None:
    llama = results["llama-h100"]
    plain = ratio(llama, "tokens_per_second", "lpq fp8-current", "bf16")
    compiled = ratio(llama, "tokens_per_second", "lpq fp8-current, compiled", "bf16, compiled")
    memory = ratio(llama, "peak_bytes", "lpq fp8-current, compiled", "bf16, compiled")
    sentence = (
        "trains # times as fast as in bf16 with `fp8-current`; where both are compiled, # times as fast and in # of the"
    )
    assert said("README.md", sentence) == (plain, compiled, memory)
    sentence = "trains # times as fast as in bf16 with `fp8-current`, both compiled, and in # of the memory"
    assert said("docs/index.md", sentence) == (compiled, memory)
    sentence = "trains # times as fast with `fp8-current`, and # times where both are compiled"
    assert said("docs/performance.md", sentence) == (plain, compiled)


def test_the_gain_of_fused_blocks(results: dict[str, dict[str, Any]]) -> None:
    fused = results["llama-h100-fused"]
    assert said("README.md", "the Llama above trains # times as fast as bf16 compiled") == (
        ratio(fused, "tokens_per_second", "lpq fp8-current, fused", "bf16, compiled"),
    )
    sentence = "gain # (`fp8-current`) and # (`fp8-delayed`) of what a compiler gains"
    assert said("docs/performance.md", sentence) == (part_gained(fused, "current"), part_gained(fused, "delayed"))


def part_gained(results: dict[str, Any], recipe: str) -> str:
    """How much of a compiler's gain fused blocks have."""
    plain, own, compiled = (
        of(results, "tokens_per_second", f"lpq fp8-{recipe}{how}") for how in ("", ", fused", ", compiled")
    )
    return f"{(own - plain) / (compiled - plain):.2f}"


def test_the_blocks_of_transformer_engine(results: dict[str, dict[str, Any]]) -> None:
    fused, reading = results["llama-h100-fused"], "tokens_per_second"
    ratios = {
        how: sorted(
            ratio(fused, reading, *pair[::order])
            for name in ("delayed", "current")
            for pair in [(f"TransformerEngine {name}, its own blocks", f"lpq fp8-{name}, {how}")]
        )
        for how, order in (("fused", 1), ("compiled", -1))
    }
    page = "docs/performance.md"
    assert [*said(page, "TransformerEngine's blocks are # to # times as fast as lpq's fused")] == ratios["fused"]
    assert [*said(page, "brings lpq to # to # times the speed of these blocks")] == ratios["compiled"]


def test_fused_blocks_with_the_positions_of_liger(results: dict[str, dict[str, Any]]) -> None:
    recorded, reading = results["llama-liger-positions-recorded"], "tokens_per_second"
    current, delayed = (
        ratio(recorded, reading, f"lpq fp8-{how}, fused, recorded", "bf16, compiled") for how in ("current", "delayed")
    )
    page = "docs/performance.md"
    assert said(page, "blocks train # times (`fp8-current`) and # times (`fp8-delayed`)") == (current, delayed)
    assert said("README.md", "as a CUDA graph # times, by `fp8-delayed` # times") == (current, delayed)
    faster = ratio(recorded, reading, "lpq fp8-delayed, fused, recorded", "lpq fp8-current, fused, recorded")
    assert said("docs/choose.md", "it is # times as fast as `fp8-current`") == (faster,)


def test_fused_blocks_beside_a_compiler(results: dict[str, dict[str, Any]]) -> None:
    """In the design's reasons for what is not built."""

    def thousands(name: str, *rows: str) -> tuple[str, ...]:
        return tuple(f"{of(results[name], 'tokens_per_second', f'lpq fp8-{row}') / 1000:.1f}" for row in rows)

    page = "docs/design.md"
    both = "delayed, compiled", "delayed, fused"
    sentence = "on an H100, a compiler is: # and # thousand tokens a second with 1 billion weights, # and # with wide"
    assert said(page, sentence) == (*thousands("llama-h100-fused", *both), *thousands("llama-wide", *both))
    recorded = "delayed, fused, recorded", "delayed, recorded, compiled"
    sentence = "fused blocks are: recorded # and #, and, not recorded, # and # with wide layers"
    assert said(page, sentence) == (
        *thousands("llama-liger-positions-recorded", *recorded), *thousands(WIDE, *both[::-1]),
    )  # fmt: skip
    attention = [f"{how}, {rest}" for how in ("current", "delayed") for rest in ATTENTION]
    sentence = "trains # thousand tokens a second, recorded, and # with compiled layers; by `fp8-delayed` # and #"
    assert said(page, sentence) == thousands("llama-h200-attention", *attention)
    _, _, row = PAGES["docs/fused.md"].partition("| its backward, five operands |")
    delayed, mxfp8, _, current = re.findall(r"\), (\d+) \(", row)[:4]
    assert f"without branches, takes [{delayed}, {mxfp8} and {current}](fused.md#what-it-gains)" in PAGES[page]


def test_which_figure_is_of_which_machine(results: dict[str, dict[str, Any]]) -> None:
    """And that no run has TransformerEngine's blocks beside torchao or Liger."""
    h100, liger, wide = (results[name] for name in ("llama-h100-fused", "llama-liger-positions-recorded", "llama-wide"))
    page, fused = "docs/performance.md", "| fused, no compiler |"
    recorded = "| fused, recorded, no compiler |"
    for row, run, lpq in (
        (f"| 1 billion weights {fused} H100 | Hugging Face's | # |", h100, "fused"),
        (f"| 1 billion weights {recorded} H100 | Hugging Face's | # |", h100, "fused, recorded"),
        (f"| 1 billion weights {fused} H200 | Liger's, in all rows | # |", liger, "fused"),
        (f"| 1 billion weights {recorded} H200 | Liger's, in all rows | # |", liger, "fused, recorded"),
        ("| 6 wide layers | compiled | H100 | Hugging Face's | # |", wide, "compiled"),
        (f"| 6 wide layers {fused} H100 | Hugging Face's | # |", wide, "fused"),
        ("| 6 wide layers | compiled | H200 | Liger's, in all rows | # |", results[WIDE], "compiled"),
        (f"| 6 wide layers {fused} H200 | Liger's, in all rows | # |", results[WIDE], "fused"),
    ):
        assert said(page, row) == (ratio(run, "tokens_per_second", f"lpq fp8-delayed, {lpq}", "bf16, compiled"),)
    theirs = ratio(wide, "tokens_per_second", "TransformerEngine delayed, its own blocks", "bf16, compiled")
    assert said(page, "compiled wide layers of lpq have 1.32, TransformerEngine's blocks have #") == (theirs,)
    for name, result in results.items():
        rows = [tables.name(row) for row in result["results"]] if name.startswith("llama") else []
        if any("its own blocks" in row for row in rows):
            assert not [row for row in rows if row.startswith(("torchao", "Liger"))], name


def test_the_memory_of_fused_blocks_with_the_loss_of_liger(results: dict[str, dict[str, Any]]) -> None:
    of_bf16, of_liger = (
        tuple(
            ratio(results["llama-h200-liger"], "peak_bytes", f"lpq fp8-{how}, fused", other)
            for how in ("current", "delayed")
        )
        for other in ("bf16", "Liger bf16, its norms and SwiGLU")
    )
    sentence = "fused blocks take # (`fp8-current`) and # (`fp8-delayed`) of bf16's memory"
    assert said("docs/fused.md", sentence) == of_bf16
    sentence = "beside bf16 with all of Liger's kernels fused blocks take # and # of the memory"
    assert said("docs/fused.md", sentence) == of_liger
    option = "fprop=fp8-current, dgrad=fp8-current, wgrad=fp8-current, x.save=input, w.save=weight"
    saved = ratio(results["llama-h200-liger"], "peak_bytes", f"lpq {option}, fused", "Liger bf16, its norms and SwiGLU")
    sentence = "this option for all layers: it takes # of the memory of bf16 with all of Liger's kernels"
    assert said("docs/fused.md", sentence) == (saved,)


def test_several_gpus(results: dict[str, dict[str, Any]]) -> None:
    four, wide = results["llama-4-recorded"], results["llama-4-8x4096-14336-2x4096-recorded"]
    page, reading = "docs/performance.md", "tokens_per_second"
    compiled = ratio(four, reading, "lpq fp8-current, recorded, compiled", "bf16, recorded, compiled")
    alone = ratio(four, reading, "lpq fp8-current, recorded", "bf16, recorded")
    assert said(page, "`fp8-current` trains # times as fast as bf16 recorded and compiled") == (compiled,)
    assert said(page, "it trains # times as fast as bf16 in the same way") == (alone,)
    waiting = sorted(ratio(four, reading, f"lpq fp8-current{how}", f"bf16{how}") for how in ("", ", compiled"))
    assert [*said(page, "trains slower than bf16 (# to #)")] == waiting
    assert said(page, "`fp8-current` trains # times as fast as compiled bf16 without a recording") == (
        ratio(wide, reading, "lpq fp8-current, compiled", "bf16, compiled"),
    )


def test_layouts_of_four_gpus(results: dict[str, dict[str, Any]]) -> None:
    assert (
        "but where a compiler makes a CUDA graph of each block under tensor parallelism" in PAGES["docs/performance.md"]
    )
    rows = results["layouts-4-8x4096"]["results"]
    times = {(row["layout"], tables.name(row)): row["ms"] for row in rows if row["compiled"]}
    faster = {
        layout for layout, _ in times if times[layout, "lpq fp8-current, compiled"] < times[layout, "bf16, compiled"]
    }
    assert faster == {"FSDP 4", "FSDP 4, CUDA graphs", "TP 4", "TP 4, overlapped"}


def test_a_step_by_each_commit(results: dict[str, dict[str, Any]]) -> None:
    table = tables.by_commit(results["by_commit"])["wall"]
    of_commit = {row[0]: [cell.partition(" ")[0] for cell in row[1:]] for row in table.rows}
    commits = [*table.columns[1:]]

    def change(*rows: str, by: str = "") -> tuple[str, ...]:
        """Before and after a commit, or from the first to the last."""
        places = [commits.index(by) - 1, commits.index(by)] if by else [0, -1]
        return tuple(of_commit[row][place] for row in rows for place in places)

    page = "benchmarks/NOTES.md"
    current, delayed = ([f"pair {how}, {recipe}" for how in ("replicated", "sequences")] for recipe in RECIPES)
    sentence = "The pair: # → # replicated and # → # with sequences; delayed # → # and # → #."
    assert said(page, sentence) == change(*current, *delayed)
    assert said(page, "(# → # and # → #, a quarter of the calls)") == change(*current, by="e945f3e5")
    assert said(page, "which reduces states once (# → # and # → #)") == change(*delayed, by="125cd7ee")
    assert said(page, "Small groups: # → #, most by 233c2f80") == change("grouped small, current")
    assert said(page, "of all layers (# → #)") == change("grouped small, current", by="233c2f80")
    units = [f"unit, {recipe}" for recipe in RECIPES]
    assert said(page, "The unit: # → # (by pass # to #), delayed # → #, most by 40192597")[::5] == change(*units)[::3]
    assert said(page, "weights together (# → #, delayed # → #)") == change(*units, by="40192597")
    without = of_commit["unit, current, weights=None"]
    assert said(page, "With `weights=None` it is # to # at all commits") == (min(without), max(without))
    assert said(page, "and yet up to # of its step") == (max(of_commit["plain wide, current"]),)
    spread = max(int(cell.rpartition(" ")[2]) for row in table.rows if row[0].startswith("plain") for cell in row[1:])
    assert f"passes differ by up to ± {spread} %" in PAGES[page]


def test_the_range_of_single_layers(results: dict[str, dict[str, Any]]) -> None:
    wide: list[float] = []
    narrow: dict[str, float] = {}
    for shape in results["linear-h100"]["shapes"]:
        ms = {tables.name(row): row["ms"] for row in shape["results"]}
        gains = {recipe: ms[f"lpq {recipe}"] / ms["bf16"] for recipe in FP8}
        if shape["inputs"] * shape["outputs"] == 4096**2:
            narrow = gains
        else:
            wide += gains.values()
    page = "docs/performance.md"
    assert said(page, "a layer by itself takes # to # of bf16's time in FP8") == (
        f"{min(wide):.2f}",
        f"{max(wide):.2f}",
    )
    first, low, high = said(
        page, "only `fp8-current` is faster than bf16 (#); the other FP8 recipes take # to # of its"
    )
    assert first == f"{narrow.pop('fp8-current'):.2f}"
    assert (low, high) == (f"{min(narrow.values()):.2f}", f"{max(narrow.values()):.2f}")


def test_the_seeds_of_the_first_figure() -> None:
    numbers = {2: "two", 3: "three", 4: "four", 5: "five"}
    curves = trainings.read_all(stored.FOLDER / "curves" / "h100-60m")
    seeds = numbers[sum(t.baseline for t in curves)]
    assert f"the grey band is the spread of bf16 between {seeds} seeds" in PAGES["README.md"]


def test_a_number_that_is_not_the_results_is_noticed(
    results: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = PAGES["docs/index.md"].replace("trains 1.", "trains 2.")
    assert other != PAGES["docs/index.md"]
    monkeypatch.setitem(PAGES, "docs/index.md", other)
    with pytest.raises(AssertionError):
        test_the_llama_of_the_first_pages(results)


def test_the_policy_that_closes_the_gap_is_as_fast_as_nvfp4(results: dict[str, dict[str, Any]]) -> None:
    steps = results["llama-h200-nvfp4"]
    before, after, eden = (
        ratio(steps, "ms", f"lpq {recipe}", "lpq nvfp4")
        for recipe in ("nvfp4-last-blocks", "fprop=bf16, dgrad=nvfp4, wgrad=nvfp4", "nvfp4-eden")
    )
    sentence = "a step by `nvfp4-last-blocks` takes # times as long as by `nvfp4`, and after the switch # times"
    assert said("docs/evidence.md", sentence) == (before, after)
    assert max(float(before), float(after)) <= 1.05
    for page in ("docs/evidence.md", "docs/choose.md", "docs/policies.md"):
        assert said(page, "a step by `nvfp4-eden` takes # times as long as by `nvfp4`") == (eden,)


@pytest.mark.parametrize(
    ("page", "recipes"),
    [
        ("docs/choose.md", {"nvfp4-last-blocks", "nvfp4-pretrain"}),
        ("docs/policies.md", {"nvfp4-last-blocks", "nvfp4-pretrain"}),
        ("docs/numerics.md", {"nvfp4-late-switch", "nvfp4-fwd-bf16-bwd"}),
    ],
)
def test_the_part_of_the_gap_that_is_closed_is_in_the_tables(page: str, recipes: set[str]) -> None:
    told = re.findall(r"`(nvfp4[\w-]+)` closes (\d+) % ± (\d+) %", PAGES[page])
    assert {recipe for recipe, *_ in told} == recipes
    rows = re.findall(r"\| (nvfp4[\w-]+) (?:\| [^|]+){3}\| (\d+) % \| (\d+) % \|", PAGES["docs/evidence.md"])
    assert {*told} <= {*rows}
