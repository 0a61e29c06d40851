"""Tables and quotations on pages say what the library does and says."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from snippets import PAGES, ROOT, TYPED

import lpq
from lpq import registry
from lpq.__main__ import COMMANDS
from lpq.cli.memory import WAYS, count_bytes
from lpq.cli.shapes import SHAPES
from lpq.distributed.shardability import operand_bytes
from lpq.formats import Quantizer
from lpq.formats.sections import why_not_row_by_row
from lpq.train.config import TrainConfig

FEATURES = 4096
STORED = [("stored quantized", recipe) for recipe in ("fp8-current", "mxfp8", "nvfp4")]
COLUMNS = [("bf16", "nvfp4"), ("gathered quantized", "nvfp4"), *STORED]
ROWS = {
    "weights of a rank": lambda m: m.weights,
    "fp32 masters": lambda m: m.masters,
    "moments": lambda m: m.moments,
    "gradients": lambda m: m.gradients,
    "all of these": lambda m: m.total,
    "whole weights gathered in a step": lambda m: m.forward + m.backward,
}


def test_the_numbers_are_those_of_the_command() -> None:
    found = [count_bytes(SHAPES["llama-3-8b"], lpq.recipe(recipe), WAYS[way], 8, {}) for way, recipe in COLUMNS]
    page = (ROOT / "docs" / "memory.md").read_text()
    for title, number in ROWS.items():
        (row,) = re.findall(rf"^\| {title} \|(.*)\|$", page, re.MULTILINE)
        assert [cell.strip() for cell in row.split("|")] == [f"{number(m) / 2**30:.2f}" for m in found], title


def shares_of_bf16(quantizer: Quantizer, row: bool, col: bool) -> float:
    return round(operand_bytes(quantizer, FEATURES, FEATURES, torch.bfloat16, row, col) / (2 * FEATURES**2), 2)


def test_shares_of_weights_hold_for_every_recipe() -> None:
    weights = {name: lpq.recipe(name).w for name in registry.recipes()}
    encoded = {name: w for name, w in weights.items() if not w.side("row").plain}
    gathered = {shares_of_bf16(w, *way) for w in encoded.values() for way in ((True, False), (False, True))}
    stored = {name: shares_of_bf16(w, True, True) for name, w in encoded.items()}
    kept = {name for name, w in encoded.items() if shares_of_bf16(w, False, True) == 1}
    assert kept == {f"{name}-fwd-bf16-bwd" for name in ("mxfp8", "mxfp4", "nvfp4")}
    of_gathers = f"{min(gathered):.2f} to {max(gathered - {1.0}):.2f} of bf16"
    for page in ("README.md", "docs/faq.md", "docs/memory.md"):
        assert (ROOT / page).read_text().count(of_gathers) == 1, page
    low, high = ([stored[name] for name in group] for group in (stored.keys() - kept, kept))
    of_low, of_high = (f"{min(shares):.2f} to {max(shares):.2f}" for shares in (low, high))
    said = f"{of_low} of bf16 is stored in place of 4 bytes a weight; {of_high} where backward has the weight in bf16"
    assert said in (ROOT / "docs" / "memory.md").read_text()


def test_the_small_model_is_what_the_command_trains() -> None:
    config, rows = TrainConfig(), inspect.signature(lpq.observe.numerics).parameters["rows"].default
    search, watch = (" ".join((ROOT / "docs" / f"{page}.md").read_text().split()) for page in ("search", "watch"))
    assert f"a model of `lpq train` is {config.width} wide by default" in search
    assert config.batch * config.seq == 4 * rows
    assert "In the small model of `python -m lpq train`, a quarter of whose tokens are looked at" in watch


# ---------------------------------------------------------------------------------------------- dispatch table


def test_it_is_what_formats_declare() -> None:
    """So it is for the column operand of each, made of the row operand."""
    section = (ROOT / "docs" / "moe.md").read_text().partition("### Rows that travel encoded")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| (\S+) \| ?(.*?) ?\|$", section, re.MULTILINE)
    assert len(rows) == 8
    for text, share, why in rows:
        quantizer = lpq.quantizer(f"hybrid(row={text}, col=identity, col_source=row)")
        reason = why_not_row_by_row(quantizer)
        bytes_sent = operand_bytes(quantizer, FEATURES, FEATURES, torch.bfloat16, True, False)
        assert why == (reason or ""), text
        assert share == (f"{bytes_sent / (2 * FEATURES**2):.2f}" if reason is None else "no"), text


def test_recipes_of_one_copy_make_column_operands_of_row_operands() -> None:
    every = {name: lpq.recipe(name) for name in registry.recipes()}
    found = {name for name, r in every.items() if why_not_row_by_row(r.x) is None and why_not_row_by_row(r.dy) is None}
    assert found == {"mxfp8-one-copy", "fp8-block-one-copy"}


# ---------------------------------------------------------------------------------------------- errors of rounding


def test_errors_of_rounding_are_those_of_nvfp4s_table() -> None:
    page = (ROOT / "docs" / "formats" / "nvfp4.md").read_text().partition("| relative squared error |")[2]
    rows = re.findall(r"^\| (?:`(\S+)`|nearest) \| (\S+) \| (\S+) \|$", page.partition("\n\n")[0], re.MULTILINE)
    assert len(rows) == 4
    torch.manual_seed(0)
    normal = torch.randn(1024, 1024)
    hot = normal.clone()
    hot[:, ::100] *= 20
    for options, *told in rows:
        q = lpq.quantizer(f"nvfp4({options})")
        for x, number in zip((normal, hot), told, strict=True):
            errors = [(q.quantize(x, seed=seed, col=False).dequantize() - x).square().mean() for seed in range(2)]
            assert float(sum(errors) / 2 / x.square().mean()) == pytest.approx(float(number), rel=0.03), options
    of = {options: [float(number) for number in told] for options, *told in rows}
    ratios = [eden / true for eden, true in zip(of["stochastic=eden"], of["stochastic=true"], strict=True)]
    sentences = " ".join((ROOT / "docs" / "numerics.md").read_text().split())
    assert "at {:.2f} times the squared error for normal values, and {:.2f} times where".format(*ratios) in sentences


# ---------------------------------------------------------------------------------------------- troubleshooting


REMEDIES = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
QUOTED = [words for row in REMEDIES for words in re.findall(r"`([^`]{10,})`", row) if " " in words]


@pytest.fixture(scope="module")
def source() -> str:
    """The library's text, with literals that follow each other as one."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "lpq").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_something_is_quoted() -> None:
    assert len(QUOTED) > 12


@pytest.mark.parametrize("words", QUOTED)
def test_the_words_are_those_of_the_library(words: str, source: str) -> None:
    assert words in source


# ---------------------------------------------------------------------------------------------- the command

COMMAND = re.compile(rf"(?:python )?-m lpq\b|\blpq (?:{'|'.join(map(re.escape, COMMANDS))})\b")


def first_command(text: str) -> str:
    """The first place in the text where a command of lpq is named; a comment and a heading, which the menu shows, are
    none."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    found = COMMAND.search(re.sub(r"^#.*$", "", text, flags=re.MULTILINE))
    return found[0] if found else ""


def test_a_page_names_the_command_first_as_it_works_anywhere() -> None:
    """``lpq`` alone is the printer queue of CUPS on many machines."""
    first = {page.relative_to(ROOT).as_posix(): first_command(page.read_text()) for page in PAGES}
    assert sum(bool(command) for command in first.values()) > 20
    assert {page: command for page, command in first.items() if command.startswith("lpq")} == {}


def test_a_command_that_is_named_in_short_first_is_noticed() -> None:
    assert first_command(f"# lpq train\n\n<!-- help of lpq train --> `lpq doctor`, `{TYPED}doctor`") == "lpq doctor"
    assert first_command(f"`{TYPED}doctor`, then `lpq doctor`") == "python -m lpq"
    assert first_command("lpq trains models by lpq.train") == ""
