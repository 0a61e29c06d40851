"""What a release is made of: builds of equal bytes, workflows that call targets of make, and old names that end."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]
SOURCES = [path for folder in ("lpq", "plugins") for path in sorted((ROOT / folder).rglob("*.py"))]
WARNS = ROOT / "lpq" / "registry" / "warning.py"


parsed = functools.cache(ast.parse)
"""Each source once: nobody changes a tree."""

# ---------------------------------------------------------------------------------------------- old names


def ends(code: str) -> Iterator[str]:
    """The versions in which old names end, as calls in this code say."""
    for node in ast.walk(parsed(code)):
        if isinstance(node, ast.keyword) and node.arg == "gone_in" and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def after(version: str) -> str:
    major, minor, *_ = version.split(".")
    return f"{major}.{int(minor) + 1}"


def test_every_old_name_ends_in_the_next_version() -> None:
    found = {path.relative_to(ROOT).as_posix(): {*ends(path.read_text())} for path in SOURCES}
    found = {name: versions for name, versions in found.items() if versions}
    assert {"lpq/moved.py", "lpq/checkpoint/former_names.py"} <= {*found}
    late = {name: versions for name, versions in found.items() if versions != {after(VERSION)}}
    assert late == {}, (
        f"this is {VERSION}: take the old names away that end in it, and let others end in {after(VERSION)}"
    )


def test_an_old_name_that_stays_is_noticed() -> None:
    assert [*ends('deprecate("a", gone_in="0.2", now="call b")\nkeep_moved(names, gone_in="0.3")')] == ["0.2", "0.3"]
    assert (after("0.1.0"), after("0.2.3"), after("1.9.0")) == ("0.2", "0.3", "1.10")


def test_no_deprecation_goes_around_the_function_that_names_the_version() -> None:
    assert [path for path in SOURCES if "DeprecationWarning" in code_of(path)] == [WARNS]


def code_of(path: Path) -> set[str]:
    return {node.id for node in ast.walk(parsed(path.read_text())) if isinstance(node, ast.Name)}


# ---------------------------------------------------------------------------------------------- builds


def wheel_of_a_copy(target: Path, seconds: int, mode: int) -> Path:
    """Build the wheel of a copy of the sources whose files have this time and these rights."""
    names = ("lpq", "plugins", "csrc", "benchmarks", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE")
    for name in names:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, target / name)
    for path in target.rglob("*.py"):
        path.chmod(mode)
        os.utime(path, (seconds, seconds))
    code = "import hatchling.build as b; print(b.build_wheel('.'))"
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=target, env=environment, check=True, capture_output=True, text=True
    )
    return target / done.stdout.splitlines()[-1]


def test_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = wheel_of_a_copy(tmp_path / "a", 1_000_000_000, 0o600)
    other = wheel_of_a_copy(tmp_path / "b", 1_700_000_000, 0o644)
    assert one.name == other.name == f"lpq-{VERSION}-py3-none-any.whl"
    assert one.read_bytes() == other.read_bytes()


def metadata_of(target: Path, address: str | None) -> tuple[list[str], str]:
    """The lines of the metadata of this tree, built with this address, and the README in it."""
    environment = {name: value for name, value in os.environ.items() if name != "LPQ_REPO_URL"}
    code = f"import hatchling.build as b; b.build_wheel({str(target)!r})"
    environment |= {} if address is None else {"LPQ_REPO_URL": address}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True)
    with zipfile.ZipFile(target / f"lpq-{VERSION}-py3-none-any.whl") as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields, _, text = archive.read(name).decode().partition("\n\n")
    assert "\nDescription-Content-Type: text/markdown\n" in f"{fields}\n"
    return fields.splitlines(), text


def relative(text: str) -> list[str]:
    """The links and pictures that lead somewhere only beside the README."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [link for link in re.findall(r'\]\(([^)]+)\)|src="([^"]+)"', prose) for link in link if link
            and not link.startswith(("https://", "#"))]  # fmt: skip


def test_the_readme_of_a_release_has_links_that_work_anywhere(tmp_path: Path) -> None:
    address = "https://example.org/team/lpq"
    fields, text = metadata_of(tmp_path, f"{address}/")
    assert sorted(line for line in fields if line.startswith("Project-URL")) == [
        f"Project-URL: Changelog, {address}/blob/v{VERSION}/CHANGELOG.md",
        f"Project-URL: Documentation, {address}/blob/v{VERSION}/docs/index.md",
        f"Project-URL: Issues, {address}/issues",
        f"Project-URL: Source, {address}",
    ]
    own = (ROOT / "README.md").read_text()
    assert len(relative(own)) > 20
    assert relative(text) == []
    assert f'src="{address}/raw/v{VERSION}/docs/assets/train.svg"' in text
    assert f"]({address}/blob/v{VERSION}/docs/performance.md)" in text
    assert text.replace(f"{address}/raw/v{VERSION}/", "").replace(f"{address}/blob/v{VERSION}/", "") == own


def test_without_an_address_the_readme_stays_as_it_is(tmp_path: Path) -> None:
    fields, text = metadata_of(tmp_path, None)
    assert text == (ROOT / "README.md").read_text()
    assert not [line for line in fields if line.startswith("Project-URL")]


@pytest.mark.parametrize("target", ["install", "train"])
def test_make_ends_with_how_to_use_what_it_installed(target: str) -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", target], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert "source .venv/bin/activate; then python -m lpq" in done.stdout.splitlines()[-1]


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()


# ---------------------------------------------------------------------------------------------- workflows and forms


def forms(folder: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="workflows are read where PyYAML is installed (mkdocs brings it)")
    return {path.name: yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github" / folder).glob("*.yml"))}


def made(workflow: dict[str, Any]) -> set[str]:
    """The targets of make that a workflow's steps name."""
    steps = [step for job in workflow["jobs"].values() for step in job.get("steps", ())]
    words = [
        word for step in steps for line in re.findall(r"\bmake (.+)", step.get("run", "")) for word in line.split()
    ]
    return {word for word in words if "=" not in word}


def test_workflows_call_targets_of_make() -> None:
    targets = {*re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    called = {name: made(workflow) for name, workflow in forms("workflows").items()}
    assert called == {
        "docs.yml": {"docs", "publish-docs"}, "release.yml": {"dist", "sbom", "publish-docs"},
        "tests.yml": {"test", "lint", "types", "check-example", "test-vllm"},
    }  # fmt: skip
    assert set().union(*called.values()) <= targets


def test_lint_reads_all_of_githubs_files() -> None:
    """By a linter that has their schemas; ``make lint`` installs it."""
    make = ["make", "--no-print-directory", "--dry-run", "lint"]
    said = subprocess.run(make, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    linted = {word for line in said.splitlines() if "check-jsonschema --" in line for word in line.split()[3:]}
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / ".github").rglob("*") if path.is_file()}
    assert linted == {
        ".github/workflows/*.yml", "CITATION.cff", *(name for name in files if "/workflows/" not in name)
    }  # fmt: skip


def test_a_report_of_a_fault_has_what_doctor_says() -> None:
    fields = {field.get("id"): field for field in forms("ISSUE_TEMPLATE")["fault.yml"]["body"]}
    assert "python -m lpq doctor --json" in fields["doctor"]["attributes"]["description"]
    assert fields["doctor"]["validations"]["required"] is True
