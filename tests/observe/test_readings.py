"""Files, pages and scalars of the statistics of a run."""

from __future__ import annotations

import os
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lpq
from lpq.observe import Reading
from lpq.observe.table import normal_snr
from lpq.registry.errors import LpqError


def model(recipe: Any = "mxfp8") -> Any:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), recipe)


def train(net: Any, watch: Any, steps: int = 3) -> None:
    for _ in range(steps):
        with watch.step():
            net(torch.randn(48, 64)).square().mean().backward()


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_normal_numbers_are_fp32_whatever_the_default_dtype_is(default: torch.dtype) -> None:
    """The column beside the SNR of an operand. In bf16 other numbers are drawn."""
    torch.set_default_dtype(default)
    try:
        found = normal_snr.__wrapped__("nvfp4")
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == normal_snr.__wrapped__("nvfp4")


def test_a_resumed_run_goes_on_in_its_file(tmp_path: Path) -> None:
    net, path = model(), tmp_path / "run" / "numerics.jsonl"
    watch = lpq.observe.numerics(net, every=2)
    train(net, watch, 1)
    watch.write(path)
    train(net, watch, 4)
    watch.write(path)
    train(net, resumed := lpq.observe.numerics(net, every=2, step=4), 3)
    resumed.write(path)
    steps = [one.step for one in lpq.observe.Readings.read(path).readings()]
    assert steps == [step for step in (0, 2, 4, 6) for _ in range(14)]
    (tmp_path / "other").write_text("{}")
    with pytest.raises(lpq.observe.NumericsError, match="other, line 1: this is no reading"):
        lpq.observe.Readings.read(tmp_path / "other")
    with pytest.raises(lpq.observe.NumericsError, match="there are no statistics in"):
        lpq.observe.Readings.read(tmp_path / "none")


def test_a_resumed_run_looks_at_the_rows_of_the_run_that_was_not_cut_off() -> None:
    net, x = model("mxfp8"), torch.randn(512, 64)

    def watched(first: int) -> list[Reading]:
        watch = lpq.observe.numerics(net, every=2, rows=128, step=first)
        for _ in range(first, 5):
            with watch.step():
                net(x).square().mean().backward()
        return [one for one in watch.readings() if one.step == 4]

    assert watched(2) == watched(0)


@pytest.mark.parametrize("left", [1, 40, 4000])
def test_a_file_that_a_killed_process_left_is_read_up_to_its_last_whole_line(left: int, tmp_path: Path) -> None:
    net, path = model(), tmp_path / "numerics.jsonl"
    train(net, watch := lpq.observe.numerics(net, every=1), 2)
    watch.write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-left])
    count = whole[:-left].count(b"\n") + (left == 1)  # without the end of a line that is whole
    assert len(lpq.observe.Readings.read(path).readings()) == count
    train(net, resumed := lpq.observe.numerics(net, every=1, step=1), 1)
    resumed.write(path)
    steps = [one.step for one in lpq.observe.Readings.read(path).readings()]
    assert steps == [0] * min(14, count) + [1] * 14


def test_each_path_has_all_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where somebody else changes a file between two calls; what is not a file of readings is left alone."""
    net, one, other = model(), tmp_path / "one", tmp_path / "other"
    train(net, watch := lpq.observe.numerics(net, every=1), 1)
    watch.write(one)
    train(net, watch, 1)
    watch.write(other)
    watch.write(one)
    assert one.read_bytes() == other.read_bytes()
    assert lpq.observe.Readings.read(one).readings() == watch.readings()
    monkeypatch.chdir(tmp_path)
    one.write_bytes(other.read_bytes()[:200])
    watch.write("one")
    watch.write(tmp_path / "one")
    assert one.read_bytes() == other.read_bytes()
    other.write_text("notes\n")
    with pytest.raises(lpq.observe.NumericsError, match="other, line 1: this is no reading"):
        watch.write(other)
    assert other.read_text() == "notes\n"
    with pytest.raises(lpq.observe.NumericsError, match="is no file: write statistics to a file"):
        watch.write(tmp_path)


def test_tensorboard_has_each_point_once(monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[tuple[str, str, int]] = []

    class SummaryWriter(nullcontext[Any]):
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            points.append((self.directory, tag, step))

        def __init__(self, directory: str) -> None:
            super().__init__(self)
            self.directory = directory

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    net = model()
    train(net, watch := lpq.observe.numerics(net, every=1), 1)
    for steps, directory in ((1, "a"), (0, "a"), (1, "b")):
        watch.tensorboard(directory)
        train(net, watch, steps)
    watch.tensorboard("a")
    assert len({*points}) == len(points)
    assert {step for directory, _, step in points if directory.endswith("a")} == {0, 1, 2}
    assert {step for directory, _, step in points if directory.endswith("b")} == {0, 1}


@pytest.mark.parametrize("inside", [".", "run"])
def test_a_place_where_tensorboard_cannot_write_is_told(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=os.makedirs))
    (file := tmp_path / "file").touch()
    with pytest.raises(LpqError, match=r"file(/run)? cannot be written: .*; choose another place"):
        lpq.observe.Readings().tensorboard(file / inside)


class Parsed(HTMLParser):
    """The open elements of a page, and all attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        self.open += [] if tag in ("meta", "path", "circle", "wbr") else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "circle"):
            assert self.open.pop() == tag


def test_a_page_shows_each_layer_and_asks_for_nothing(tmp_path: Path) -> None:
    net = model("nvfp4")
    watch = lpq.observe.numerics(net, every=1, what_if="mxfp8")
    train(net, watch)
    watch.page(tmp_path / "run" / "numerics.html")
    text = (tmp_path / "run" / "numerics.html").read_text()
    found = Parsed(text)
    assert found.open == []
    assert found.seen.count("section") == 2 * 2
    assert found.seen.count("svg") == 3 * 4
    assert found.seen.count("polyline") == 4 * (7 + 6 + 6)
    assert not {name for name, _ in found.attributes} & {"src", "href", "srcset", "action"}
    assert not [word for word in ("http", "url(", "@import", "<script", "<link") if word in text]
    watch.write(tmp_path / "numerics.jsonl")
    lpq.observe.Readings.read(tmp_path / "numerics.jsonl").page(tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == text
    hostile = Reading(step=0, layer="<b>\x1b[1m", tensor="x", direction="row", snr_db=1.0)
    lpq.observe.Readings([hostile]).page(tmp_path / "hostile.html")
    assert "<b>" not in (tmp_path / "hostile.html").read_text()
    assert "0.<wbr>" not in text  # numbers of a table stay in one piece
    lpq.observe.Readings([Reading(step=0, layer="a.b.mlp", tensor="x", snr_db=1.5)]).page(tmp_path / "dots.html")
    assert (tmp_path / "dots.html").read_text().count("a.<wbr>b.<wbr>mlp<") == 2
    assert "nowrap" not in re.search(r"[.]key span {.*}", text)[0]  # type: ignore[index]  # a narrow screen has no room


def lines_of(readings: list[Reading], path: Path) -> list[list[float]]:
    """The heights of the points of each line of the first chart, from above."""
    lpq.observe.Readings(readings).page(path)
    chart = path.read_text().partition("<svg")[2].partition("</svg>")[0]
    return [[float(point.split(",")[1]) for point in line.split()] for line in re.findall(r'points="([^"]*)"', chart)]


def test_a_step_that_is_far_out_is_drawn_and_no_line_leads_over_a_nan(tmp_path: Path) -> None:
    def at(step: int, snr_db: float | None) -> Reading:
        return Reading(step=step, layer="a", tensor="x", direction="row", snr_db=snr_db)

    for far in range(500, 510):
        (line,) = lines_of([at(step, 2.0 if step == far else 30.0 + step % 2) for step in range(1000)], tmp_path / "a")
        assert len(line) <= 160
        assert sum(height == max(line) for height in line) == 1
    lines = lines_of([at(step, None if step == 4 else 30.0 + step) for step in range(10)], tmp_path / "b")
    assert [len(line) for line in lines] == [4, 5]


def test_a_format_that_is_not_known_here_has_nothing_to_compare_with(tmp_path: Path) -> None:
    one = Reading(step=0, layer="a", tensor="x", direction="row", format="acme4", snr_db=20.25)
    readings = lpq.observe.Readings([one, replace(one, layer="b", format="mxfp8")])
    rows = {row.split()[0]: row.split()[1:] for row in readings.table().splitlines() if "x.row" in row}
    assert rows["a"] == ["x.row", "20.2", "acme4"]
    assert rows["b"][2] == "31.5"
    readings.page(tmp_path / "page.html")
    assert "acme4" in (tmp_path / "page.html").read_text()


def test_a_model_that_is_one_layer_is_named(tmp_path: Path) -> None:
    """Its name within itself is empty."""
    net = lpq.convert(nn.Linear(64, 128), "mxfp8")
    train(net, watch := lpq.observe.numerics(net, every=1))
    watch.page(tmp_path / "page.html")
    assert "<h2>the model itself</h2>" in (tmp_path / "page.html").read_text()
    assert "the model itself" in str(watch)
    watch.write(tmp_path / "numerics.jsonl")
    assert lpq.observe.Readings.read(tmp_path / "numerics.jsonl").readings() == watch.readings()


@pytest.mark.parametrize("order", ["again", "again, then a pass"])
def test_a_graph_may_be_run_backward_again(order: str) -> None:
    """With ``retain_graph``, as for several losses: it ended in an error of sizes. The gradient of the weight counts
    once, as the inputs are looked at until a backward asks for them; ``dy`` counts each time, with the same ratios."""
    found = []
    for again in (False, True):
        net, x = model(), torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
        watch = lpq.observe.numerics(net, every=1)
        with watch.step():
            loss = net(x).square().mean()
            loss.backward(retain_graph=again)
            if again:
                loss.backward()
            if order != "again":
                net(x).square().mean().backward()
        found.append({(one.layer, one.tensor): one for one in watch.readings()})
    assert found[0].keys() == found[1].keys()
    for place, one in found[0].items():
        assert found[1][place].snr_db == pytest.approx(one.snr_db, rel=1e-6), place
        assert found[1][place].amax == one.amax
