"""A warning points to the user's line, wherever in lpq it arises: here each is a line of this file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpq
from lpq.kernels.code_cache import KernelCacheWarning
from lpq.registry import warning
from lpq.registry.warning import warn
from lpq.tensor import PrecisionWarning

ROOT = Path(__file__).parents[2]
STAGES = {"rules": [{"match": "*", "recipe": "mxfp8", "until": 4}, {"match": "*", "recipe": "nvfp4"}]}


@contextmanager
def pointing(to: Callable[..., object], text: str, category: type[Warning] = UserWarning) -> Iterator[None]:
    """Warnings with this text are given inside, and they point into this function."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [w for w in caught if text in str(w.message)]
    assert {w.category for w in found} == {category}
    code = to.__code__
    assert {w.filename for w in found} == {code.co_filename}
    assert {w.lineno for w in found} <= {line for _, _, line in code.co_lines()}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def test_convert() -> None:
    def user() -> None:
        lpq.convert(net(), {"rules": [{"match": "zz", "recipe": "mxfp8"}, {"match": "*", "recipe": "mxfp8"}]})

    with pointing(user, "no layer matches 'zz'"):
        user()


@pytest.mark.parametrize("recipe", ["fp8", "tensorwise"])
def test_the_name_of_a_recipe(recipe: str) -> None:
    def user() -> None:
        lpq.convert(net(), recipe)

    with pointing(user, repr(recipe), lpq.recipes.RecipeWarning):
        user()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.starts)])
def test_a_step_that_does_not_move(compiled: bool) -> None:
    """Forward warns of it, and for a compiled one the optimizer; nothing of that is traced."""
    model = lpq.convert(net(), STAGES, steps=10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run: Callable[[Tensor], Tensor] = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    x = torch.ones(16, 32)

    def forward() -> Tensor:
        return run(x).sum()

    def step() -> None:
        optimizer.step()

    with pointing(step if compiled else forward, "the policy's step is 0 as before"):
        for _ in range(2):
            forward().backward()
            step()


def test_the_step_of_an_optimizer() -> None:
    model = lpq.convert(net(), "mxfp8", weights="quantized")
    optimizer = lpq.optim.MasterWeights(torch.optim.SGD(model.parameters(), 0.1))
    (model(torch.ones(16, 32)).sum() * torch.nan).backward()

    def user() -> None:
        optimizer.step()

    with pointing(user, "made weights NaN or infinite that are stored quantized: 0.weight, 1.weight"):
        user()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.starts)])
def test_an_operator_without_a_form_of_its_own(compiled: bool) -> None:
    tensor = lpq.quantizer("mxfp8").quantize(torch.ones(16, 32))

    def sine(x: Tensor) -> Tensor:
        return torch.sin(x)

    run = torch.compile(sine, fullgraph=True, backend="aot_eager") if compiled else sine

    def user() -> Tensor:
        return run(tensor)

    with pointing(user if compiled else sine, "aten.sin.default has no form", PrecisionWarning):
        user()


def test_what_is_written_to_the_weight_of_another_format() -> None:
    made = [lpq.convert(nn.Linear(32, 32), recipe, weights="quantized") for recipe in ("mxfp8", "nvfp4")]

    def user() -> None:
        made[0].load_state_dict(made[1].state_dict())

    with pointing(user, "they are rounded twice", PrecisionWarning):
        user()


def frame_of(package: str, called: Callable[[], None]) -> Callable[[], None]:
    """A function of a module of this package, which calls another one."""
    names: dict[str, Any] = {"__name__": f"{package}.part", "__package__": package, "called": called}
    if not package:
        names = {"called": called}
    exec(compile("def inner():\n    called()\n", f"{package}.py", "exec"), names)
    inner: Callable[[], None] = names["inner"]
    return inner


def test_frames_of_plugins_and_generated_code_are_passed_over() -> None:
    """A kernel of a plugin is compiled at the first forward; a module whose name only begins so is the user's."""
    last: Callable[[], None] = partial(warn, "kept nowhere", KernelCacheWarning)
    for package in ("lpq.kernels", "lpq_acme", "", "torch._dynamo", "torch", "lpq.nn"):
        last = frame_of(package, last)

    def user() -> None:
        last()

    with pointing(user, "kept nowhere", KernelCacheWarning):
        user()
    mine = frame_of("torchtitan.train", last)
    with pointing(mine, "kept nowhere", KernelCacheWarning):
        mine()


def test_in_a_thread_of_lpq_it_points_to_lpq() -> None:
    """Nothing of the user is on its stack; a thread that the user starts has the user's function there."""
    inside = frame_of("lpq.checkpoint", partial(warn, "written twice"))

    def user() -> None:
        inside()

    with pointing(inside, "written twice"), ThreadPoolExecutor(1) as pool:
        pool.submit(inside).result()
    with pointing(user, "written twice"):
        thread = threading.Thread(target=user)
        thread.start()
        thread.join()


def test_python_shows_a_text_once_for_each_line_of_the_user(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, lpq\n"
        "tensor = lpq.quantizer('mxfp8').quantize(torch.ones(16, 32))\n"
        "for _ in range(3):\n"
        "    torch.sin(tensor)\n"
        "torch.sin(tensor)\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    lines = [line.split(": ")[0] for line in ended.stderr.splitlines() if "PrecisionWarning" in line]
    assert lines == [f"{script}:4", f"{script}:5"]
    assert "\n  torch.sin(tensor)\n" in ended.stderr


def test_every_warning_goes_through_one_function() -> None:
    wrong = [
        f"{path}:{node.lineno}"
        for path in [*(ROOT / "lpq").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]
        if path != Path(warning.__file__)
        if re.search(r"\bwarnings\b", text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and node.attr in ("warn", "warn_explicit")
        and isinstance(node.value, ast.Name)
        and node.value.id == "warnings"
    ]
    assert wrong == []
