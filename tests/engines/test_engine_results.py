"""What vLLM made of lpq's files (``results/vllm.json``): of the files that lpq writes now, and as the page has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import served
from engines_table import BEGIN, END, PAGE, table
from served import Served

import lpq

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.filterwarnings("ignore::lpq.checkpoint.CheckpointWarning")]
KEPT = {Served(one["model"], one["layout"], one["weights"], one["inputs"]): one for one in served.results()["cases"]}


def test_each_way_in_which_files_lie_has_a_result() -> None:
    """A new scheme, or a new way of inputs, is one that vLLM has to be given: make test-vllm RECORD=1."""
    assert [*KEPT] == [case for case, _ in served.cases()]
    assert {case for case, one in KEPT.items() if one["outcome"] != "refused"} == {
        c for c, read in served.cases() if read
    }
    assert {one["outcome"] for one in KEPT.values()} == {"read and generated", "read", "refused"}


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_the_files_are_those_that_vllm_read(case: Served, tmp_path: Path) -> None:
    """Byte for byte, with what describes them; the record names the engine if it read them."""
    model = case.build()
    made = lpq.export(model, tmp_path / "x", **case.options(model))
    assert served.digest(tmp_path / "x") == KEPT[case]["digest"], "run make test-vllm RECORD=1"
    assert (served.ENGINE in made.readers) == (KEPT[case]["outcome"] != "refused")


def test_other_bytes_have_another_digest(tmp_path: Path) -> None:
    case = next(iter(KEPT))
    lpq.export(case.build(seed=1), tmp_path / "x", layout=case.layout)
    assert served.digest(tmp_path / "x") != KEPT[case]["digest"]


def test_the_table_of_the_page_is_made_of_the_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == table(), (
        "run PYTHONPATH=tests python tests/engines/engines_table.py"
    )
