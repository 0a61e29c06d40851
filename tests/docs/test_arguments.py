"""Every parameter of a public function is explained under ``Args:``; a single one may be in the first sentence."""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from reference_page import DIRECTIVE, PAGES, rendered, resolve
from test_house import files, found_in, parsed

PUBLIC = (
    "lpq", "lpq.calibration", "lpq.checkpoint", "lpq.distributed", "lpq.engines", "lpq.nn", "lpq.observe", "lpq.optim",
    "lpq.recipes",
)  # fmt: skip
METHODS = (
    "lpq.engines.Export.__call__", "lpq.engines.Export.stream", "lpq.optim.MasterWeights", "lpq.optim.QuantizedStates",
)  # fmt: skip
"""What is called like a function, and is none."""
GOING = ("export_file",)
"""Functions that will be removed in the next version."""


@functools.cache
def functions() -> dict[str, Callable[..., Any]]:
    """List the functions that the packages and the pages of the reference have, by one of their names: also those that
    a page renders as members of a module."""
    names = [f"{module}.{name}" for module in PUBLIC for name in importlib.import_module(module).__all__]
    texts = [page.read_text() + "\n" for page in PAGES]
    names += [path for text in texts for match in DIRECTIVE.finditer(text) for path in rendered(match[1], match[2])]
    found = {id(value): (path, value) for path in names if inspect.isfunction(value := resolve(path))}
    found |= {id(value): (path, value) for path in METHODS for value in [resolve(path)]}
    return {path: value for path, value in found.values() if path.rpartition(".")[2] not in GOING}


def unexplained(function: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """Return the parameters and the names under ``Args:``, where these differ."""
    parameters = [
        "*" * (p.kind is p.VAR_POSITIONAL) + "**" * (p.kind is p.VAR_KEYWORD) + p.name
        for p in inspect.signature(function).parameters.values()
        if p.name != "self"
    ]
    first, _, text = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    if not text and len(parameters) == 1 and f"``{parameters[0]}``" in first.partition(". ")[0]:
        return [], []
    told = re.findall(r"^ {4}(\*{0,2}\w+): \S", text, re.MULTILINE)
    return ([], []) if parameters == told else (parameters, told)


@pytest.mark.parametrize("path", functions())
def test_each_parameter_is_explained_in_its_place(path: str) -> None:
    assert unexplained(functions()[path]) == ([], [])


def test_a_model_is_the_first_argument() -> None:
    names = {
        path: [name for name in inspect.signature(f).parameters if name != "self"] for path, f in functions().items()
    }
    with_model = {path: own for path, own in names.items() if "model" in own}
    assert len(with_model) > 20
    assert {path: own for path, own in with_model.items() if own[0] != "model"} == {}


def test_a_parameter_that_is_not_explained_is_noticed() -> None:
    def silent(x: int) -> None:
        """Do nothing."""

    def swapped(x: int, *, y: int = 0) -> None:
        """Do nothing.

        Args:
            y: A number.
            x: A number.
        """

    def told(x: int, *rest: int, **options: int) -> None:
        """Do nothing.

        Args:
            x: A number.
            *rest: Numbers.
            **options: Numbers
                by their names.
        """

    assert unexplained(silent) == (["x"], [])
    assert unexplained(swapped) == (["x", "y"], ["y", "x"])
    assert unexplained(told) == ([], [])
    assert len(functions()) > 100
    modules = {"lpq.formats.blocks", "lpq.formats.parts", "lpq.registry", "lpq.registry.hookspecs"}
    assert modules <= {path.rpartition(".")[0] for path in functions()}


def models_behind(source: str) -> list[str]:
    """The functions in a source that take a model behind something else."""
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef):
            own = [*node.args.posonlyargs, *node.args.args]
            names = [arg.arg for arg in own if arg.arg not in ("self", "cls")]
            types = {arg.arg: ast.unparse(arg.annotation) for arg in own if arg.annotation is not None}
            if "model" in names[1:] and types.get("model") in ("nn.Module", "Model", "GPT"):
                found.append(node.name)
    return found


def test_a_model_is_the_first_argument_inside_of_lpq_too() -> None:
    """But for hooks of other frameworks, options of commands, and ``export_file``, which is going."""
    modules = [path for path in files("lpq/**/*.py") if path.parent.name not in ("integrations", "cli")]
    found = found_in(modules, lambda path: models_behind(path.read_text()))
    assert found == {"lpq/checkpoint/former_names.py": ["export_file"]}
    assert models_behind("def f(self, path: Path, model: nn.Module): ...\ndef g(model: Model, path): ...") == ["f"]
