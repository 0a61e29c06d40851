"""Tables of results: made of stored numbers alone, printed with rich or written as Markdown.

A ratio divides by what its title names, so a ratio of times below 1 is better.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from benchmarks.contenders import GATHERED_IN_BF16, KINDS
from benchmarks.shapes import ONE_GPU
from lpq.bench import speedups
from lpq.bench.contenders import BASELINE, label

Result = dict[str, Any]
WIDTH = 150
NONE = "–"


@dataclass(frozen=True)
class Table:
    """Cells of text; the first column names the rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def show(self) -> None:
        """Print it."""
        made = RichTable(title=escape(self.title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for i, column in enumerate(self.columns):
            made.add_column(escape(column), justify="right" if i else "left", no_wrap=True)
        for row in self.rows:
            made.add_row(*map(escape, row))
        console = Console()
        Console(width=max(console.width, WIDTH)).print(made)

    def markdown(self) -> str:
        """The same for a page, without its title."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        return "\n".join("| " + " | ".join(row) + " |" for row in [self.columns, rule, *self.rows])


def name(row: Result) -> str:
    """The name of a row of results."""
    return label(row["library"], row["recipe"], row["compiled"])


def kind(row: Result) -> str | None:
    """The recipe of lpq that does the arithmetic of this row, if there is one."""
    if row["library"] == "lpq":
        return str(row["recipe"]).removesuffix(GATHERED_IN_BF16)
    return KINDS.get((row["library"], row["recipe"]))


def number(value: float | None, digits: int) -> str:
    """A number, or a dash for what was not measured."""
    return NONE if value is None else f"{value:,.{digits}f}"


def ratio(value: float | None, of: float | None) -> str:
    """A ratio, or a dash where one of the two is missing."""
    return NONE if value is None or not of else f"{value / of:.2f}"


def measured(row: Result, reading: str, digits: int) -> str:
    """A number of a row; where the row has none since memory ran out, these words."""
    if row.get(reading) is None and "out of memory" in (row.get("failure") or ""):
        return "out of memory"
    return number(row.get(reading), digits)


def _mebibytes(count: int | None) -> str:
    return number(count / 2**20 if count else None, 0)


# ---------------------------------------------------------------------------------------------- linear


def linear(result: Result) -> dict[str, Table]:
    """Milliseconds; ratios to bf16, to the floor, to other libraries and of compiled layers to others; memory held for
    backward. A table that nothing was measured for is left out."""
    shapes: list[Result] = result["shapes"]
    columns = ["tokens x inputs x outputs", *(f"{s['tokens']}x{s['inputs']}x{s['outputs']}" for s in shapes)]
    at = [{name(row): row for row in s["results"]} for s in shapes]
    rows = shapes[0]["results"]
    floors: list[str] = list(shapes[0]["floors"])

    def line(row: Result, cell: Callable[[int, float | None], str]) -> list[str]:
        return [name(row), *(cell(i, at[i][name(row)].get("ms")) for i in range(len(shapes)))]

    def floor(i: int, recipe: str, reading: str = "ms") -> float:
        return float(shapes[i]["floors"][recipe][reading])

    def ratios(reading: str) -> list[list[str]]:
        like = [(row, kind(row)) for row in rows]
        return [
            line(row, lambda i, ms, recipe=recipe: ratio(ms, floor(i, recipe, reading)))  # type: ignore[misc]
            for row, recipe in like
            if recipe in floors
        ]

    times = [line(row, lambda i, ms: number(ms, 2)) for row in rows]
    times += [[f"floor of {r}", *(number(floor(i, r), 2) for i in range(len(shapes)))] for r in floors]
    to_bf16 = [line(r, lambda i, ms: ratio(ms, at[i][BASELINE].get("ms"))) for r in rows if name(r) != BASELINE]
    rivals = [r for r in rows if r["library"] not in ("lpq", "torch")]
    to_rivals = [
        [f"{name(row)} ÷ {name(rival)}", *(ratio(a[name(row)].get("ms"), a[name(rival)].get("ms")) for a in at)]
        for rival in rivals
        for row in rows
        if row["library"] == "lpq" and kind(row) == kind(rival)
    ]
    to_itself = [
        [name(row), *(ratio(a[name(row)].get("ms"), a[_plain(row)].get("ms")) for a in at)]
        for row in rows
        if row["compiled"] and _plain(row) in at[0]
    ]
    tables = {
        "times": Table("Linear, forward and backward: milliseconds", columns, times),
        "bf16": Table("Linear: ÷ bf16", columns, to_bf16),
        "floor": Table(
            "Linear: ÷ floor (GEMMs alone, and the bytes of quantizing at copy speed)", columns, ratios("ms")
        ),
        "stream": Table("Linear: ÷ floor as one stream (GEMMs and copies)", columns, ratios("stream_ms")),
        "peers": Table("Linear: ÷ other libraries", columns, to_rivals),
        "compiled": Table("Linear, compiled: ÷ the same layer without", columns, to_itself),
        "memory": _memory(rows, columns, at),
    }
    return {what: table for what, table in tables.items() if table.rows}


def _plain(row: Result) -> str:
    """The name of the same contender without ``torch.compile``."""
    return label(row["library"], row["recipe"], False)


def _memory(rows: Iterable[Result], columns: list[str], at: list[dict[str, Result]]) -> Table:
    def cell(row: Result) -> str:
        held, encoded = row.get("held_bytes"), row.get("encoded_bytes")
        return number(held / 2**20, 1) + (f" ({ratio(held, encoded)})" if encoded else "") if held else NONE

    measured = [row for row in rows if any(a[name(row)].get("held_bytes") for a in at)]
    cells = [[name(row), *(cell(a[name(row)]) for a in at)] for row in measured]
    return Table("Linear: MiB held for backward (÷ bytes of the encoded operands)", columns, cells)


def grouped(result: Result) -> dict[str, Table]:
    """Milliseconds; ratios to bf16 in the same rounds, and to the floor of FP8 with exact gradients."""
    shapes: list[Result] = result["shapes"]
    columns = ["experts x tokens x inputs x outputs"]
    columns += [f"{s['experts']}x{s['tokens']}x{s['inputs']}x{s['outputs']}" for s in shapes]
    at = [{name(row): row for row in s["results"]} for s in shapes]

    def lines(cell: Callable[[int, Result], str]) -> list[list[str]]:
        return [[who, *(cell(i, of.get(who, {})) for i, of in enumerate(at))] for who in at[0]]

    times = lines(lambda i, row: number(row.get("ms"), 2))
    for reading, what in (("ms", "floor of FP8, exact gradients"), ("fast_ms", "floor of FP8, fast everywhere")):
        times.append([what, *(number(s["floor"].get(reading), 2) for s in shapes)])
    to_bf16 = lines(lambda i, row: ratio(row.get("ms"), row.get("bf16_ms")))
    return {
        "times": Table("Grouped linear, forward and backward: milliseconds", columns, times),
        "bf16": Table("Grouped linear: ÷ bf16", columns, to_bf16),
        "floor": Table(
            "Grouped linear: ÷ floor of FP8, exact gradients", columns,
            lines(lambda i, row: ratio(row.get("ms"), shapes[i]["floor"].get("ms"))),
        ),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- the others


def host(result: Result) -> dict[str, Table]:
    """Microseconds and their ratio to ``nn.Linear``, also with backward in the calling thread and as CUDA graphs."""
    rows: list[Result] = result["results"]
    readings = ("us", "one_thread_us", "graphed_us")
    base = {reading: next(row.get(reading) for row in rows if name(row) == BASELINE) for reading in readings}
    cells = [
        [name(row), *(text for r in readings for text in (number(row.get(r), 0), ratio(row.get(r), base[r])))]
        for row in rows
    ]
    columns = ["", "µs", "÷ nn.Linear", "µs in one thread", "÷ the same", "µs as CUDA graphs", "÷ the same"]
    return {"times": Table(f"Host time of a step at {result['shape']}", columns, cells)}


def casts(result: Result) -> dict[str, Table]:
    """Time and share of the copy speed."""
    rows = [
        [
            f"{c.get('library', '')} {c['name']}".strip(),
            c["sides"],
            number(c.get("microseconds"), 1),
            number(c["speed"] / 1e12 if "speed" in c else None, 2),
            number(100 * c["share"] if "share" in c else None, 1),
            number(100 * c["target"] if "target" in c else None, 0),
            c.get("kernel", ""),
        ]
        for c in [*result["cases"], *result.get("peers", [])]
    ]
    title = f"Casts of {result['rows']}x{result['cols']} bf16, copy speed {result['copy_speed'] / 1e12:.2f} TB/s"
    return {
        "times": Table(title, ["", "operand", "µs", "TB/s", "% of copy", "goal", "kernel"], rows),
        "shares": _shares(result),
    }


def _shares(result: Result) -> Table:
    """Percent of the copy speed, a format a line and what is made of it a column."""
    made = list(dict.fromkeys(c["sides"] for c in result["cases"]))
    found: dict[str, dict[str, float | None]] = {}
    for case in result["cases"]:
        found.setdefault(case["name"], {})[case["sides"]] = 100 * case["share"] if "share" in case else None
    rows = [[name, *(number(of.get(what), 1) if what in of else "" for what in made)] for name, of in found.items()]
    return Table(f"Casts: % of the copy speed, {result['copy_speed'] / 1e12:.2f} TB/s", ["", *made], rows)


def stack(result: Result) -> dict[str, Table]:
    """Tokens a second and GPU, ratios of these to bf16 and to other libraries (above 1 is better), the most memory
    allocated, and the bytes gathered where they were counted."""
    count = f"{result['ranks']} GPU" + ("s" if result["ranks"] > 1 else "")
    return _training(result, f"A stack of blocks under FSDP2 on {count}: tokens/s and GPU")


def model(result: Result) -> str:
    """The size of a model of Hugging Face, in words."""
    size = f"{result['layers']} layers, hidden {result['hidden']}, batch {result['batch']} x {result['sequence']}"
    size += f", MLPs of {result['width']}" if result.get("width") else ""
    size += f", {result['experts']} experts" if result.get("experts") else ""
    way = result.get("checkpointing", "none")
    return size + (f", {way} checkpointing" if way != "none" else "")


def llama(result: Result) -> dict[str, Table]:
    """The same of a whole model, and ratios of the memory."""
    rows: list[Result] = result["results"]
    peaks = {name(row): row.get("peak_bytes") for row in rows}
    size = model(result)
    memory = [
        [
            name(row), number(row["peak_bytes"] / 2**30 if row["peak_bytes"] else None, 1),
            *(ratio(peaks[name(row)], peaks.get(label(*of, row["compiled"])))
              for of in (("torch", "bf16"), ("torchao", "tensorwise"))),
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["", "GiB at most", "÷ bf16, compiled as it is", "÷ torchao tensorwise, compiled as it is"]
    shared = f" and GPU, on {result['ranks']} GPUs by FSDP2" if result.get("sharded", result["ranks"] > 1) else ""
    made = _training(result, f"Hugging Face's Llama, {size}: tokens/s{shared}")
    return {**made, "memory": Table("Llama: memory (below 1 is better)", columns, memory)}


def _training(result: Result, title: str) -> dict[str, Table]:
    """Beside the median step stands the fastest: where they differ by much, something else had the machine's time."""
    rows: list[Result] = result["results"]
    speeds = {name(row): row.get("tokens_per_second") for row in rows}
    fastest = {
        name(row): result["batch"] * result["sequence"] / row["fastest_ms"] * 1e3 if row.get("fastest_ms") else None
        for row in rows
    }
    compiled = label("torch", "bf16", True)
    cells = [
        [
            name(row), measured(row, "tokens_per_second", 0), ratio(speeds[name(row)], speeds.get(BASELINE)),
            ratio(speeds[name(row)], speeds.get(compiled)), number(fastest[name(row)], 0),
            number(row["peak_bytes"] / 2**30, 1) if row["peak_bytes"] else NONE,
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["", "tokens/s", "÷ bf16", "÷ bf16, compiled", "fastest step", "GiB at most"]
    if any(row.get("host_ms") for row in rows):
        shown = {"ms": "ms", "host_ms": "host", "gpu_ms": "GPU"}
        if any(row.get("sending_ms") for row in rows):
            shown |= {"sending_ms": "only sends", "idle_ms": "idle"}
        columns += shown.values()
        times = [[number(row.get(what), 0) for what in shown] for row in rows]
        cells = [[*line, *more] for line, more in zip(cells, times, strict=True)]
    if any(row.get("gathered_bytes") for row in rows):
        columns.append("MiB gathered")
        cells = [[*line, _mebibytes(row.get("gathered_bytes"))] for line, row in zip(cells, rows, strict=True)]
    rivals = [row for row in rows if row["library"] not in ("lpq", "torch")]
    to_rivals = [
        [f"{name(row)} ÷ {name(rival)}", ratio(speeds[name(row)], speeds[name(rival)])]
        for rival in rivals
        for row in rows
        if row["library"] == "lpq" and kind(row) == kind(rival)
    ]
    made = {"times": Table(title, columns, cells)}
    if to_rivals:
        heading = "Tokens/s ÷ other libraries (above 1 is better)"
        made["peers"] = Table(heading, ["", "tokens/s ÷ tokens/s"], to_rivals)
    return made


def failures(result: Result) -> list[str]:
    """The contenders that could not be measured, and why, one line each."""
    found: dict[str, str] = {}
    for part in result.get("shapes", [result]):
        for row in part.get("results", []):
            if row.get("failure"):
                found[f"{row['layout']}: {name(row)}" if "layout" in row else name(row)] = row["failure"]
    found |= {f"{row['library']} {row['name']}": row["failure"] for row in result.get("peers", []) if "failure" in row}
    return [f"{who}: {why}" for who, why in found.items()]


def absent(result: Result) -> str:
    """One line for the libraries that were not installed, and so have no row; empty where all were."""
    peers = result.get("environment", {}).get("peers", {})
    missing = [library for library, version in peers.items() if version is None]
    return f"not measured, since not installed: {', '.join(missing)}" if missing else ""


def parallel(result: Result) -> dict[str, Table]:
    """Milliseconds, their ratio to bf16, without and with the compiler (below 1 is better), and the bytes gathered."""
    rows: list[Result] = result["results"]
    base = {name(row): row for row in rows}
    plain, compiled = base[BASELINE], base.get(label("torch", "bf16", True), {})
    cells = [
        [
            name(row), number(row.get("ms"), 2), ratio(row.get("ms"), plain.get("ms")),
            ratio(row.get("ms"), compiled.get("ms")),
            _mebibytes(row.get("gathered_bytes")),
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["", "ms", "÷ bf16", "÷ bf16, compiled", "MiB gathered"]
    title = f"{result['tokens']} tokens, {result['hidden']} to {result['ffn']} to {result['hidden']}"
    return {"times": Table(f"{title}, over {result['ranks']} GPUs", columns, cells)}


def layouts(result: Result) -> dict[str, Table]:
    """For each layout its contenders: milliseconds, tokens a second of one model and their ratio to bf16 (above 1 is
    better), the most memory, the bytes gathered, and the loss beside the same contender's on one GPU."""
    rows: list[Result] = result["results"]
    found = {(row["layout"], name(row)): row for row in rows}

    def of(layout: str, who: str, reading: str) -> float | None:
        return found.get((layout, who), {}).get(reading)

    cells = []
    for row in rows:
        layout, who, speed = row["layout"], name(row), row.get("tokens_per_second")
        same = label("torch", "bf16", row["compiled"])
        alike = layout.removesuffix(", overlapped")  # bf16 is overlapped by the compiler alone
        loss, other = row.get("loss"), of(ONE_GPU, label(row["library"], row["recipe"], False), "loss")
        apart = f"{abs(loss / other - 1):.1e}" if loss is not None and other else NONE
        cells.append([
            f"{layout}: {who}", measured(row, "ms", 1), number(speed, 0),
            ratio(speed, of(layout, same, "tokens_per_second") or of(alike, same, "tokens_per_second")),
            number(row["peak_bytes"] / 2**30 if row["peak_bytes"] else None, 1),
            _mebibytes(row.get("gathered_bytes")), apart,
        ])  # fmt: skip
    columns = ["", "ms", "tokens/s", "÷ bf16, compiled as it is", "GiB at most", "MiB gathered", "loss from one GPU's"]
    title = f"{result['blocks']} blocks, hidden {result['hidden']}, {result['batch']} x {result['sequence']} tokens"
    return {"times": Table(f"{title}, {result['ranks']} GPUs", columns, cells)}


def scaling(result: Result) -> dict[str, Table]:
    """Tokens a second and GPU by the number of GPUs, and the share of those on the fewest that held the model."""
    rows: list[Result] = result["results"]
    counts = sorted({row["ranks"] for row in rows})
    found = {(row["ranks"], name(row)): row for row in rows}
    cells = []
    for who in dict.fromkeys(name(row) for row in rows):
        of = [found.get((count, who), {}) for count in counts]
        speeds = [row.get("tokens_per_second") for row in of]
        known = [i for i, speed in enumerate(speeds) if speed is not None]
        least = speeds[known[0]] if known else None
        shares = [ratio(speed, least) if [i] != known[:1] else NONE for i, speed in enumerate(speeds)]
        shown = [measured(row, "tokens_per_second", 0) for row in of]
        cells.append([who, *shown, *shares[1:]])
    columns = ["", *_gpus(counts), *(f"{words} ÷ the fewest" for words in _gpus(counts[1:]))]
    return {"times": Table(f"Tokens/s and GPU of {model(result)}", columns, cells)}


def _gpus(counts: Iterable[int]) -> list[str]:
    return [f"{count} GPU{'s' * (count > 1)}" for count in counts]


def saving(result: Result) -> dict[str, Table]:
    """For each run, one after the other: what it loaded and saved, and what a save costs the training."""
    rows: list[Result] = result["results"]

    def seconds(row: Result, *readings: str) -> list[str]:
        return [number(row.get(reading), 2) for reading in readings]

    cells = [
        [
            f"{row['ranks']}, {' and '.join(row['did'])}", row.get("loaded", NONE), row.get("saved", NONE),
            *seconds(row, "load_seconds", "save_seconds", "returned_after_seconds", "written_after_seconds"),
            number(row.get("step_ms"), 1), number(row.get("lost_meanwhile_ms"), 0),
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["GPUs", "loaded", "saved", "s to load", "s to save", "s until training goes on", "s until written"]
    layers = f"{result['layers']} layers" if "layers" in result else f"{result['blocks']} blocks"
    title = f"Saving {layers}, hidden {result['hidden']}, with AdamW's moments"
    return {"times": Table(title, [*columns, "ms a step", "ms lost meanwhile"], cells)}


def by_commit(result: Result) -> dict[str, Table]:
    """By commit the time of a step ÷ bf16's in the same processes, also the host's and the GPU's alone; ± half of what
    passes differ by, in percent. And the functions of lpq that a step calls."""
    found = {(row["measured"], row["recipe"], row["commit"]): row for row in result["results"]}
    commits = [one["commit"] for one in result["commits"]]
    shown = [at for at in dict.fromkeys(at[:2] for at in found) if at[1] != "bf16"]

    def passes(measured: str, recipe: str, commit: str, reading: str) -> list[float]:
        """The times of the slower rank."""
        ranks = found.get((measured, recipe, commit), {}).get(reading, [])
        return [max(times) for times in zip(*ranks, strict=False)]

    def cell(measured: str, recipe: str, commit: str, reading: str) -> str:
        mine, base = (passes(measured, who, commit, reading) for who in (recipe, "bf16"))
        if not mine or not base or not statistics.median(base):
            return NONE
        middle = statistics.median(mine)
        return f"{ratio(middle, statistics.median(base))} ± {50 * (max(mine) - min(mine)) / middle:.0f}"

    def lines(of: Callable[[str, str, str], str]) -> list[list[str]]:
        return [[f"{at[0]}, {at[1].removeprefix('fp8-')}", *(of(*at, commit) for commit in commits)] for at in shown]

    made = {
        "commits": Table("Commits", ["new in it", "commit"], [[one["new"], one["commit"]] for one in result["commits"]])
    }
    for what, title in (("wall", "A step"), ("host", "The host alone"), ("gpu", "The GPU alone")):
        rows = lines(partial(cell, reading=f"{what}_us"))
        made[what] = Table(f"{title}: ÷ bf16 ± % (below 1 is better)", ["", *commits], rows)
    calls = lines(lambda *at: str(found.get(at, {}).get("calls", NONE)))
    return {**made, "calls": Table("Functions of lpq that a step calls", ["", *commits], calls)}


def map_of_sizes(result: Result) -> dict[str, Table]:
    """The map of `lpq bench` for each recipe: how many times as fast as bf16 it is."""
    shapes, heading = result["shapes"], speedups.title(result["environment"])
    recipes = speedups.recipes_of(shapes)
    return {recipe: Table(f"{recipe}: {heading}", *speedups.cells(shapes, recipe)) for recipe in recipes}


OF = {
    "map": map_of_sizes,
    "parallel": parallel,
    "casts": casts,
    "linear": linear,
    "grouped": grouped,
    "host": host,
    "stack": stack,
    "llama": llama,
    "layouts": layouts,
    "saving": saving,
    "by_commit": by_commit,
    "scaling": scaling,
}
"""The tables of each part."""
