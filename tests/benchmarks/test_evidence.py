"""The pages about losses show what the stored curves give, every training of them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import lpq
from benchmarks import evidence, widened
from benchmarks.searched import STUDIES
from lpq.registry import shipped
from lpq.train import beside, gaps, trainings
from lpq.train.errors import TrainError

FOLDERS = [folder.name for folder in evidence.folders()]
README = " ".join((evidence.DOCS.parent / "README.md").read_text(encoding="utf-8").split())


@cache
def curves() -> dict[str, list[trainings.Training]]:
    """All that are stored: 2,200 files, which each process that collects the tests would read for a second."""
    return evidence.read()


def test_the_pages_show_the_stored_curves() -> None:
    pages = [page.read_text(encoding="utf-8") for page in evidence.PAGES]
    assert [evidence.filled(page, curves()) for page in pages] == pages, "python -m benchmarks.evidence"
    page = "".join(pages)
    shown = {(match[2], match[3]) for match in evidence.MARK.finditer(page)}
    assert {name for name, _ in shown} <= set(curves()), "the page shows curves that no file has"
    for name in curves():
        assert {(name, "table"), (name, "made")} <= shown, f"{name} is stored, and no page shows it"
        assert f"assets/evidence-{name}.svg" in page


def test_every_recipe_and_every_policy_was_trained() -> None:
    assert {*lpq.registry.recipes(), *shipped.policies()} <= {t.title for found in curves().values() for t in found}


@pytest.mark.parametrize("name", FOLDERS)
def test_each_command_is_told_once_as_it_works_anywhere(name: str) -> None:
    (block,) = re.findall(r"```text\n(.*)\n```", evidence.made(curves()[name]), re.DOTALL)
    commands = block.splitlines()
    assert len(commands) == len({*commands})
    assert all(re.match(r"(?:\w+=\S+ )*(?:torchrun .*|python )-m (?:lpq|benchmarks)\b", line) for line in commands)


@pytest.mark.parametrize("name", FOLDERS)
def test_no_seed_is_left_out(name: str) -> None:
    """Seeds count from 0, and each has its baseline."""
    base = {t.seed for t in curves()[name] if t.baseline}
    assert base == {*range(len(base))}
    for title in {t.title for t in curves()[name]}:
        own = {t.seed for t in curves()[name] if t.title == title}
        assert own == {*range(len(own))}, title
        assert own <= base, title
    assert len({t.text for t in curves()[name]}) == 1


@pytest.mark.parametrize("name", FOLDERS)
def test_lpq_compare_has_a_table_of_the_stored_curves(name: str) -> None:
    """Control: not if one of them were of another text."""
    *others, last = curves()[name]
    assert others
    trainings.refuse_mixed([*others, last], evidence.CURVES / name)
    with pytest.raises(TrainError, match="another text"):
        trainings.refuse_mixed([*others, replace(last, text="another")], evidence.CURVES / name)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_figure_has_every_recipe(name: str) -> None:
    figure = (evidence.CHARTS / f"evidence-{name}.svg").read_text(encoding="utf-8")
    for title in (gap.title for gap in gaps.gaps(curves()[name]) if gap.mean is not None):
        assert title in re.sub(r"\s+", " ", figure)


def test_a_mark_without_curves_stays(tmp_path: Path) -> None:
    page = "<!-- curves: none table -->\nkept\n<!-- end -->\n"
    assert evidence.filled(page, curves()) == page


def test_the_page_tells_the_gaps_of_each_seed() -> None:
    found = curves()["h200-60m"]
    base = {t.seed: t.held_out[-1][1] for t in found if t.baseline}
    apart: dict[str, list[float]] = {}
    for one in sorted(found, key=lambda t: t.seed):
        apart.setdefault(one.title, []).append(100 * (one.held_out[-1][1] / base[one.seed] - 1))
    page = " ".join(evidence.PAGES[0].read_text(encoding="utf-8").split())
    assert max(map(abs, apart["fp8-current"])) <= 0.15
    assert "By `fp8-current` each seed ended within 0.15 % of bf16's" in page
    shown = {gap.title: gap for gap in gaps.gaps(found)}
    current = shown["fp8-current"]
    assert current.mean is not None
    assert current.half is not None
    assert f"leaves out every gap above {100 * (current.mean + current.half):.2f} %" in page
    told = {
        "fp8-row": "By `fp8-row` the gaps",
        "fp8-block": "by `fp8-block`",
        "mxfp8": "by `mxfp8`",
        "fp8-delayed": "and by `fp8-delayed`",
        "mxfp8-fwd-nvfp4-bwd": "By `mxfp8-fwd-nvfp4-bwd` they",
        "nvfp4-late-switch": "by `nvfp4-late-switch`",
        "nvfp4-eden": "by `nvfp4-eden`",
        "nvfp4": "and by `nvfp4`",
    }
    for title, words in told.items():
        first, second, third = (f"{gap:+.2f}" for gap in apart[title])
        assert re.search(rf"{words}(?: were)? {re.escape(f'{first}, {second} and {third}')} %", page), title
    # "too far apart … to show a gap", and "which shows a gap of each"
    assert [shown[title].verdict for title in told] == ["nothing"] * 4 + ["worse"] * 4
    # "The first seed had almost none by any of the four, the others had 0.3 to 0.7 % by each"
    for title in list(told)[:4]:
        first, *others = apart[title]
        assert abs(first) < 0.15, title
        assert 0.3 < min(others) < max(others) < 0.7, title
    for title, text in (
        *((title, README) for title in ("fp8-current", "mxfp8", "mxfp8-fwd-nvfp4-bwd", "nvfp4")),
        ("mxfp8-fwd-nvfp4-bwd", page),
    ):
        one = shown[title]
        assert one.mean is not None
        assert one.half is not None
        assert f"{100 * one.mean:+.2f} ± {100 * one.half:.2f} %" in text
    assert {one.seeds for one in shown.values()} == {3}  # "three paired seeds"
    for title, words in {
        "nvfp4-late-switch": "and so closed {}, {} and {} % of the gap",
        "mxfp8-fwd-nvfp4-bwd": "the shares were {}, {} and {} %",
        "nvfp4-eden": "With `nvfp4-eden` they were {}, {} and {} %",
    }.items():
        closed = [1 - own / never for own, never in zip(apart[title], apart["nvfp4"], strict=True)]
        assert words.format(*(f"{100 * share:.0f}" for share in closed)) in page


def test_sentences_have_the_intervals_of_the_tables() -> None:
    def pages(*names: str) -> str:
        return " ".join(" ".join((evidence.DOCS / name).read_text(encoding="utf-8").split()) for name in names)

    def share(folder: str, title: str, seeds: int = 1000) -> str:
        part = beside.closed([t for t in curves()[folder] if t.seed < seeds], title, "nvfp4")
        assert part is not None
        return f"{100 * part.share:.0f} % ± {100 * part.half:.0f} %"

    def less(first: int, last: int) -> str:
        found = beside.beside([t for t in curves()["oscillation"] if first <= t.seed < last], "nvfp4")
        (one,) = (gap for gap in found if gap.title == "nvfp4 with resets")
        assert one.mean is not None
        assert one.half is not None
        return f"{-100 * one.mean:.2f} % ± {100 * one.half:.2f} %"

    page = pages("evidence.md")
    assert f"the first have {less(0, 8)} less loss with resets, and the others {less(8, 16)} (half of the 95 %" in page
    assert f"`nvfp4-last-blocks` would close {share('h200-5m', 'nvfp4-last-blocks', 22)}." in page
    numerics = pages("numerics.md")
    assert f"`nvfp4-fwd-bf16-bwd` closes {share('toy-others', 'nvfp4-fwd-bf16-bwd')}]" in numerics
    assert f"`nvfp4-late-switch` closes {share('h200-5m', 'nvfp4-late-switch')}]" in numerics
    assert f"closed {share('oscillation', 'nvfp4 with resets')} of NVFP4's gap" in numerics
    for name in ("choose.md", "policies.md"):
        assert f"`nvfp4-last-blocks` closes {share('h200-5m', 'nvfp4-last-blocks')}]" in pages(name)
        assert f"`nvfp4-pretrain` closes {share('h100-5m', 'nvfp4-pretrain')}]" in pages(name)
    assert "s.e." not in page


def test_a_searched_policy_is_beside_every_recipe_that_is_as_fast() -> None:
    """Those that were not trained are told, so that a policy cannot win by what it was compared with."""
    _, _, *lines = evidence.within_time(curves()["searched"], "searched").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    told = {row[0]: row[-1] for row in rows}
    assert {"nvfp4", "nvfp4-four-over-six"} == {title for title, shown in told.items() if shown == "not trained"}
    assert {t.title for t in curves()["searched"] if not t.baseline} <= {*told}
    assert not {"mxfp8", "fp8-current", "bf16"} & {*told}, "they are slower"
    speeds = [float(row[1]) for row in rows]
    assert speeds == sorted(speeds, reverse=True)


def test_a_policy_is_better_than_each_uniform_recipe_of_its_time() -> None:
    """The page says so. All have every seed that was planned, and a recipe that was not trained is told."""
    found = curves()["searched-between"]
    assert {(t.title, t.seed) for t in found} == {(t.title, seed) for t in found for seed in range(16)}
    assert not any(t.diverged for t in found)
    _, _, *lines = evidence.BETWEEN(found).splitlines()
    told = {row[1].strip(): row[-2].strip() for row in (line.split("|") for line in lines)}
    assert {*STUDIES["searched-between"].uniform} < {*told}
    assert (told.pop("searched-between"), told.pop("mxfp8-fwd-nvfp4-bwd")) == ("", "nothing")
    assert (len(told), {*told.values()}) == (16, {"worse"})
    fewer = evidence.BETWEEN([t for t in found if t.title != "nvfp4-four-over-six"]).splitlines()
    assert [line.count("not trained") for line in fewer if line.startswith("| nvfp4-four-over-six |")] == [1]


def test_the_times_of_a_policy_are_those_of_its_layers() -> None:
    layers = widened.sizes(layers=2, heads=2, width=64)
    assert {size.inputs for size in layers.values()} == {widened.WIDTH, 4 * widened.WIDTH}
    half = lpq.policy({"rules": [{"match": "blocks.0.*", "recipe": "nvfp4"}, {"match": "*", "recipe": "mxfp8"}]})
    nvfp4, mxfp8 = (widened.whole(layers, lpq.policy(name)) for name in ("nvfp4", "mxfp8"))
    assert widened.whole(layers, half) == pytest.approx((nvfp4 + mxfp8) / 2)
    assert nvfp4 < mxfp8 < widened.whole(layers, None)
