"""A step by each of several commits: what is packed, what processes are asked, and what becomes of their answers."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks import by_commit, stored, tables
from benchmarks.by_commit_ranks import Bench, check_tree

ROOT = Path(__file__).parents[2]
RANK = """#!{python} -S
import json, os, sys
rank, (job,) = int(os.environ["RANK"]), [json.loads(a) for a in sys.argv[1:] if a.startswith("{{")]
slow = job["tree"].endswith("slow")
for line in sys.stdin:
    what, *more = json.loads(line)
    answer = {{}}
    if what == "make" and more[0] == "unit" and slow:
        answer = {{"error": f"rank {{rank}} has no unit"}}
    if what == "make" and more[0] == "plain wide" and slow and rank:
        os._exit(1)
    if what == "sample":
        rows = [(who, us) for who, us in (("bf16", 100), ("fp8-current", 200 + 100 * slow))]
        answer = {{"results": [{{"measured": name, "recipe": who, "calls": 7, "late": 1, "host_us": us, "gpu_us": 9.126,
                                "wall_us": us + 30 * rank * (who != "bf16")}} for name in more[0] for who, us in rows]}}
    print(json.dumps(answer), flush=True)
"""
"""A process in place of a rank: in one commit it has no unit, and ends where it would make a wide plain layer."""


def packed(file: Path, commits: tuple[str, ...]) -> None:
    told = json.dumps([{"commit": one, "new": f"{one} it is"} for one in commits]).encode()
    with tarfile.open(file, "w:gz") as made:
        about = tarfile.TarInfo("commits.json")
        about.size = len(told)
        made.addfile(about, io.BytesIO(told))


@pytest.mark.starts
def test_processes_take_turns_and_what_fails_is_lost_for_its_commit_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(RANK.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    packed(tmp_path / "commits.tar.gz", ("fast", "slow"))
    file, out = str(tmp_path / "commits.tar.gz"), tmp_path / "out"
    assert by_commit.main([file, "--imitate", "--passes", "2", "--out", str(out)]) == 0
    result = stored.load(out)["by_commit"]
    assert result["environment"]["command"] == "python -m benchmarks.by_commit FILE --imitate --passes 2"
    assert result["commits"] == [{"commit": "fast", "new": "fast it is"}, {"commit": "slow", "new": "slow it is"}]
    assert {one["measured"]: one["failure"] for one in result["failures"] if one["commit"] == "slow"} == {
        "unit": "rank 0 has no unit", "plain wide": "a process ended"
    }  # fmt: skip
    assert len(result["failures"]) == 2
    assert result["results"][0] == {
        "commit": "fast", "measured": "plain small", "recipe": "bf16", "calls": 7, "late": 4,
        "host_us": [[100, 100]] * 2, "gpu_us": [[9.13, 9.13]] * 2, "wall_us": [[100, 100]] * 2,
    }  # fmt: skip
    made = tables.by_commit(result)
    cells = {row[0]: row[1:] for row in made["wall"].rows}
    assert cells["plain small, current"] == ["2.30 ± 0", "3.30 ± 0"], "of the slower rank"
    assert cells["plain wide, current"] == cells["unit, current"] == ["2.30 ± 0", tables.NONE]
    assert {row[0]: row[1:] for row in made["calls"].rows}["unit, current"] == ["7", tables.NONE]
    assert "failed: slow unit: rank 0 has no unit" in capsys.readouterr().err
    assert [*out.glob("slow-*.log.*")], "what its processes said"


def test_a_process_counts_calls_and_measures_by_an_imitated_gpu() -> None:
    bench = Bench({"tree": str(ROOT), "info": "", "imitate": True}, 0)
    asked = [["make", "plain small"], ["sample", ["plain small"], 2], ["make", "nothing"]]
    replies = io.StringIO()
    bench.serve(io.StringIO("".join(json.dumps(one) + "\n" for one in asked)), replies)
    made, sampled, unknown = map(json.loads, replies.getvalue().splitlines())
    assert made == {}
    assert unknown == {"error": "KeyError: 'nothing'"}
    current, delayed = sampled["results"]
    assert (current["recipe"], delayed["recipe"]) == ("fp8-current", "fp8-delayed")
    assert 0 < current["calls"] < delayed["calls"]
    assert min(row["host_us"] for row in (current, delayed)) > 0


def test_lpq_from_another_tree_is_noticed(tmp_path: Path) -> None:
    check_tree(ROOT)
    with pytest.raises(RuntimeError, match=r"lpq.* is from .*, and not from"):
        check_tree(tmp_path)


@pytest.mark.starts
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git")
def test_a_commit_is_packed_with_words_or_its_subject(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(by_commit, "PACKED", ("pyproject.toml", "plugins/identity"))
    by_commit.pack(tmp_path / "packed", ["HEAD=the last", "HEAD"])
    with tarfile.open(tmp_path / "packed") as file:
        told = file.extractfile("commits.json")
        assert told is not None
        (first, second), names = json.load(told), file.getnames()
    assert first["new"] == "the last"
    assert second["new"] not in ("", "the last")
    assert first["commit"] == second["commit"]
    assert f"{first['commit']}/pyproject.toml" in names
    assert not [name for name in names if name.startswith(f"{first['commit']}/lpq/")]
