"""Curves as files, and the pages that show them: ``python -m benchmarks.evidence`` fills docs/evidence.md, search.md.

A folder in benchmarks/results/curves has the files that one ``lpq compare --out FOLDER`` left.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lpq
from benchmarks import widened
from benchmarks.stored import CHARTS, DOCS, FOLDER
from lpq.bench.knapsack import ROUNDING
from lpq.train import beside, gaps, plot, trainings
from lpq.train.trainings import Training

CURVES = FOLDER / "curves"
LIBRARIES = ("torchao", "bitsandbytes")
"""Other libraries, of which a training that used one has the version."""
ANYWHERE = "python -m lpq"
"""The command by the name that no other program has. Some trainings noted it in short."""
PAGES = (DOCS / "evidence.md", DOCS / "search.md")
MARK = re.compile(r"(<!-- curves: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""``<!-- curves: FOLDER WHAT -->`` … ``<!-- end -->``: WHAT is a table, how it was made, or how the loss is counted."""


def folders() -> list[Path]:
    """The folders of trainings."""
    return [path for path in sorted(CURVES.iterdir()) if path.is_dir()]


def read() -> dict[str, list[Training]]:
    """The trainings of all folders."""
    return {path.name: trainings.read_all(path) for path in folders()}


def filled(page: str, found: Mapping[str, Sequence[Training]]) -> str:
    """A page with its marked places as the curves have them."""

    def fill(match: re.Match[str]) -> str:
        start, name, what, end = match.groups()
        return f"{start}\n{OF[what](found[name])}\n\n{end}" if name in found else match.group()

    return MARK.sub(fill, page)


def made(found: Sequence[Training]) -> str:
    """When, where and how the trainings were made."""
    commands = _different(
        t.command.replace("lpq", ANYWHERE, 1) if t.command.startswith("lpq ") else t.command for t in found
    )
    machines = _machines(found)
    days = sorted({t.date[:10] for t in found})
    settings = found[0].settings
    tokens = settings["steps"] * settings["batch"] * settings["seq"]
    weights = settings["layers"] * 12 * settings["width"] ** 2 + 256 * settings["width"]
    batch = f"{settings['batch']} times {settings['seq']} bytes"
    first = (
        f"{' to '.join({days[0]: 0, days[-1]: 0})}; {'; '.join(machines)}. A model of {_millions(weights)} weights, "
        f"{settings['layers']} blocks {settings['width']} wide; {settings['steps']:,} steps of {batch}, "
        f"{_millions(tokens)} in all, of {found[0].source}; peak learning rate {settings['lr']:g}, "
        f"{settings['schedule']}."
    )
    return "\n".join([first, "", "```text", *commands, "```"])


def _different(texts: Any) -> list[str]:
    return list(dict.fromkeys(texts))


def _machines(found: Sequence[Training]) -> list[str]:
    """The machines and their software, each once; libraries that only some trainings name are told once behind."""
    usual = _different(_machine(t.machine) for t in found)
    others = _different(f"{name} {t.machine[name]}" for t in found for name in LIBRARIES if name in t.machine)
    return [", ".join([usual[0], *others]), *usual[1:]]


def _machine(machine: Mapping[str, Any]) -> str:
    where = machine["processor"] if machine["device"] == "CPU" else machine["device"]
    return f"{where}, torch {machine['torch']}, Python {machine['python']}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.{0 if count >= 10e6 else 2}f} M"


def closed(found: Sequence[Training]) -> str:
    """Tell how much of the gap of ``nvfp4`` the policies for pretraining close."""
    told = []
    for title in ("nvfp4-pretrain", "nvfp4-last-blocks", "nvfp4-late-switch"):
        part = beside.closed(found, title, "nvfp4")
        if part is not None:
            told.append(f"`{title}` closes {100 * part.share:.0f} % ± {100 * part.half:.0f} %")
    gap = "the gap between `nvfp4` and bf16"
    return (
        f"{' and '.join(told)} of {gap}; ± is half of the 95 % interval."
        if told
        else f"No policy is shown to close {gap}."
    )


def beside_searched(found: Sequence[Training], policy: str = "searched") -> str:
    """List how much more loss each uniform recipe has than a searched policy of the same seed."""
    uniform = [t for t in found if not t.baseline and not t.title.startswith("searched")]
    _, *others = beside.beside([*(t for t in found if t.title == policy), *uniform], policy)
    rows: list[tuple[str, ...]] = [("recipe", "loss beside the searched policy's", "± 95 %", "shown")]
    rows.append(("---", "---:", "---:", "---"))
    rows += [(cells[0], *cells[3:6]) for cells in (other.cells() for other in others)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def within_time(found: Sequence[Training], policy: str, slowest: str | None = None, formats: Sequence[str] = ()) -> str:
    """List all recipes that are predicted to take at most as long as a searched policy, or as the slowest one that it
    is compared with, and all others that were trained: their times, and how much more loss they have than the policy
    of the same seed. These are the recipes that come with lpq, and those with each product in one of some formats."""
    of = {t.title: t for t in found if not t.baseline}
    speeds = {title: widened.speedup(t.settings, lpq.policy(tomllib.loads(t.policy))) for title, t in of.items()}
    settings = of[policy].settings
    uniform = {**widened.composed(formats), **widened.uniform()}
    all_speeds = {name: widened.speedup(settings, recipe) for name, recipe in uniform.items()}
    least = speeds[slowest or policy] * (1 - ROUNDING)
    fast = {name: speed for name, speed in all_speeds.items() if speed >= least}
    cells = {gap.title: gap.cells() for gap in beside.beside([t for t in found if not t.baseline], policy)}
    rows: list[tuple[str, ...]] = [("recipe", "times as fast as bf16", "loss beside the policy's", "± 95 %", "shown")]
    rows.append(("---", "---:", "---:", "---:", "---"))
    for title, speed in sorted({**fast, **speeds}.items(), key=lambda one: -one[1]):
        told = cells[title][3:6] if title in cells else ("", "", "not trained")
        rows.append((title, f"{speed:.2f}", *told))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def table(found: Sequence[Training]) -> str:
    """Return the table of the gaps; of trainings that differ in the states of their optimizers, with the bytes of these
    for each weight."""
    held = {t.title: t.settings["bytes_a_weight"] for t in found if "bytes_a_weight" in t.settings}
    if not held:
        return gaps.markdown(found)
    head, rule, *rows = gaps.markdown(found).splitlines()
    of = [gap.title for gap in gaps.gaps(found)]
    lines = [f"{head.replace('recipe', 'AdamW with', 1)} bytes a weight |", f"{rule} ---: |"]
    return "\n".join([*lines, *(f"{row} {held[title]:.2f} |" for row, title in zip(rows, of, strict=True))])


def resets(found: Sequence[Training]) -> str:
    """Tell which part of the weights was found to oscillate."""
    shares = [share for t in found for share in t.settings.get("reset", ())]
    return f"A reset found {100 * min(shares):.1f} to {100 * max(shares):.1f} % of the weights to oscillate."


BETWEEN = partial(
    within_time, policy="searched-between", slowest="fprop=nvfp4, dgrad=mxfp8, wgrad=nvfp4", formats=widened.FORMATS
)
OF: Mapping[str, Callable[[Sequence[Training]], str]] = {
    "table": table,
    "made": made,
    "closed": closed,
    "resets": resets,
    "beside-nvfp4": partial(beside.markdown, of="nvfp4"),
    "beside": beside_searched,
    "beside-32": partial(beside_searched, policy="searched-32"),
    "half-way": partial(within_time, policy="searched-5m"),
    "faster": partial(within_time, policy="searched-5m-faster"),
    "between": BETWEEN,
}
"""What a marked place may show."""


def main() -> None:
    """Fill the pages and draw their figures."""
    found = read()
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    for name, curves in found.items():
        print(plot.draw(curves, CHARTS / f"evidence-{name}.svg"))


if __name__ == "__main__":
    main()
