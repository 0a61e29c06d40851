"""Files of readings, curves and records whose values have other types, or whose lines are torn: each is told in words
that name the file, the line, the value and a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import Command

from lpq.files.typed import fits
from lpq.observe import NumericsError, Readings
from lpq.train.config import TrainConfig
from lpq.train.errors import TrainError
from lpq.train.loop import records, step_seconds
from lpq.train.trainings import Training, read_all, refuse_mixed, refuse_others

WHOLE: dict[str, Any] = {"step": 1, "layer": "a", "tensor": "x", "direction": "row", "format": "mxfp8", "snr_db": 30.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": "1"}, "step = '1' must be a whole number"),
        ({"step": True}, "step = True must be a whole number"),
        ({"layer": None}, "layer = None must be a string"),
        ({"tensor": "z"}, "tensor = 'z' must be 'x' or 'w' or 'dy' or 'dw'"),
        ({"direction": 3}, "direction = 3 must be 'row' or 'col' or ''"),
        ({"snr_db": "30"}, "snr_db = '30' must be a number or left out"),
        ({"flushed": float("nan")}, "flushed is not finite"),
        ({"flushed": {"a": [1]}}, "flushed = {'a': [1]} must be a number or left out"),
        ({"snr": 1.0}, "nothing is named 'snr': did you mean 'snr_db'?"),
    ],
)
def test_a_reading_of_other_types_is_refused_where_it_is_read(
    change: dict[str, Any], words: str, tmp_path: Path, lpq_command: Command
) -> None:
    path = tmp_path / "numerics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (WHOLE, WHOLE | change, WHOLE)))
    ended = lpq_command("report", path)
    assert ended.status == 1
    assert f"{path}, line 2: this is no reading of lpq.observe.numerics: {words}. Where" in ended.err
    assert "restore it or take the line out; else name another file" in ended.err
    assert not path.with_suffix(".html").exists()


@pytest.mark.parametrize("line", [b'{"step": 1, "lay\n', b"[1]\n", b"\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n"])
def test_a_torn_line_is_told_by_its_number(line: bytes, tmp_path: Path) -> None:
    whole = json.dumps(WHOLE).encode() + b"\n"
    (path := tmp_path / "numerics.jsonl").write_bytes(whole + line + whole)
    with pytest.raises(NumericsError, match=r"numerics\.jsonl, line 2: this is no reading"):
        Readings.read(path)
    (path := tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "seconds": 1}\n' + line)
    with pytest.raises(TrainError, match=r"metrics\.jsonl, line 2, is broken"):
        records(path)


def test_a_record_of_other_types_is_refused_and_none_at_all_has_no_time(tmp_path: Path) -> None:
    (path := tmp_path / "metrics.jsonl").write_text('{"step": 1, "seconds": "fast", "loss": 1.0}\n')
    with pytest.raises(TrainError, match=r"line 1, is broken \(seconds = 'fast' must be a number\): restore it"):
        records(path)
    path.write_text("")
    assert str(step_seconds(path)) == "nan"


def curve(title: str = "bf16", **values: Any) -> Training:
    usual: dict[str, Any] = {
        "title": title, "seed": 0, "policy": "" if title in ("bf16", "fp32") else title,
        "settings": {"steps": 2, "batch": 1, "seq": 8, "data": ["a"]}, "source": "a text", "text": "0",
        "losses": [2.0, 1.0], "held_out": [[2, 1.5]], "diverged": None, "step_seconds": 0.5, "machine": {},
        "command": "", "date": "",
    }  # fmt: skip
    return Training(**{**usual, **values})


def text_of(training: Training, **change: Any) -> str:
    return json.dumps({**vars(training), **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": "0"}, r"seed = '0' must be a whole number"),
        ({"losses": [1.0, None]}, r"losses = \[1\.0, None\] must be a list of numbers"),
        ({"losses": []}, "it has no held-out loss, or no training loss"),
        ({"held_out": [[2]]}, r"held_out = \[\[2\]\] must be a list of lists"),
        ({"held_out": {"2": 1.5}}, "must be a list of lists"),
        ({"settings": [1]}, r"settings = \[1\] must be a table"),
        ({"settings": {"steps": 2, "batch": "1", "seq": 8}}, "batch = '1' must be a whole number"),
        ({"settings": {"steps": 2}}, "it lacks batch, seq"),
        ({"step_seconds": 0}, "step_seconds = 0 is no time"),
        ({"diverged": 3}, "diverged = 3 must be a string or left out"),
    ],
)
def test_a_curve_of_other_types_is_refused(
    change: dict[str, Any], words: str, tmp_path: Path, lpq_command: Command
) -> None:
    (tmp_path / "bf16-seed0.json").write_text(text_of(curve(), **change))
    with pytest.raises(TrainError, match=rf"bf16-seed0\.json is no curve of lpq compare \(.*{words}.*\): move it away"):
        read_all(tmp_path)
    ended = lpq_command("compare", "--out", tmp_path)
    assert (ended.status, "is no curve" in ended.err) == (1, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": {"steps": 3, "batch": 1, "seq": 8, "data": ["a"]}}, "with steps = 3, and steps = 2 is of bf16: "),
        ({"settings": {"steps": 2, "batch": 1, "seq": 8, "data": ["b"]}}, "with data = ('b',), and data = ('a',) is"),
        ({"text": "1"}, "was trained on another text"),
        ({"title": "fp32", "policy": ""}, "fp32-seed1.json is a baseline, and bf16 is, too"),
        (
            {"settings": {**curve().settings, "weights": "quantized"}},
            "training with weights = 'quantized', and the mean of nvfp4 has one with weights = None: ",
        ),
    ],
)
def test_trainings_of_several_comparisons_have_no_table(
    change: dict[str, Any], words: str, tmp_path: Path, lpq_command: Command
) -> None:
    """Files that were copied together: the gaps would be of other lengths, texts or baselines."""
    for one in (curve(), curve("nvfp4"), curve(**{"title": "nvfp4", "seed": 1, **change})):
        one.write(tmp_path)
    ended = lpq_command("compare", "--out", tmp_path)
    assert ended.status == 1
    assert words in ended.err
    assert not (tmp_path / "table.md").exists()
    refuse_mixed([curve(), curve("nvfp4"), curve("nvfp4", seed=1)], tmp_path)


def test_a_script_may_change_more_than_the_recipe(tmp_path: Path) -> None:
    """As resets of stored weights do, and channels that are found anew for each seed."""
    settings = {**curve().settings, "weights": "quantized", "reset": [0.1]}
    refuse_mixed([curve(), *(curve("a", seed=seed, settings=settings, policy=f"{seed}") for seed in (0, 1))], tmp_path)
    for name, value in (("weights", "quantized"), ("reset", [0.1])):  # lpq compare would make another one of that title
        other = curve("nvfp4", settings={**curve().settings, name: value})
        with pytest.raises(TrainError, match=f"with {name} = .*, and {name} = None is asked for"):
            refuse_others([other], tmp_path, TrainConfig(steps=2, batch=1, seq=8, data=("a",)))


def test_a_training_that_two_files_have_counts_in_neither(tmp_path: Path) -> None:
    curve("nvfp4").write(tmp_path)
    (tmp_path / "copy-seed0.json").write_text(text_of(curve("nvfp4"), losses=[9.0, 9.0]))
    with pytest.raises(TrainError, match=r"nvfp4-seed0\.json .*copy-seed0\.json has the training by nvfp4 from seed 0"):
        read_all(tmp_path)


@pytest.mark.parametrize("end", [float("nan"), float("inf")])
def test_a_training_whose_last_loss_is_none_diverged(end: float, tmp_path: Path, lpq_command: Command) -> None:
    """It was called better than the baseline."""
    for seed in (0, 1):
        curve(seed=seed).write(tmp_path)
        curve("nvfp4", seed=seed, held_out=[[2, end if seed else 1.5]]).write(tmp_path)
    ended = lpq_command("compare", "--out", tmp_path)
    assert (ended.status, "1 diverged" in ended.out) == (0, True)


def test_types_of_annotations() -> None:
    cases: list[tuple[Any, object, bool]] = [
        (float, 1, True), (float, True, False), (int, 1.0, False), (str | None, None, True), (str | None, 1, False),
        (tuple[str, ...], ["a", "b"], True), (tuple[str, ...], "ab", False), (tuple[int, float], [1, 2], True),
        (tuple[int, float], [1.5, 2], False), (tuple[int, float], [1], False),
    ]  # fmt: skip
    for kind, value, expected in cases:
        assert fits(kind, value) is expected, (kind, value)
