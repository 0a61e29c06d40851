"""Only the files of ``lpq/torch_private`` have private names of torch, and each name has a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import pytest
from test_house import ROOT, files, imports, short
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel

PRIVATE = re.compile(r"_[A-Za-z]\w*")
FOR_MODULES = {"_parameters", "_buffers", "_modules", "_apply", "_save_to_state_dict", "_load_from_state_dict"}
"""Names that ``nn.Module`` has for its subclasses, and ``ParallelStyle`` ``_apply``."""
OF_OTHERS = {"_replace", "_asdict", "_fields", "_name_or_path", "_apply_gate"}
"""Names of Python's tuples, and of Hugging Face's models."""


def own_names(sources: Iterable[str]) -> set[str]:
    """The names that these sources give to members of classes and attributes of ``self``."""
    names: set[str] = set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.ClassDef):
            names |= {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
            names |= {ast.unparse(m.target) for m in node.body if isinstance(m, ast.AnnAssign)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def names_of_torch() -> set[str]:
    """The private names that the files of ``lpq/torch_private`` use, as attributes, imports and strings."""
    names: set[str] = set()
    for path in files("lpq/torch_private/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.alias):
                names |= {*node.name.split(".")}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return {name for name in names if PRIVATE.fullmatch(name)}


def private_strings(source: str, names: Collection[str]) -> list[str]:
    """The strings of a source that are one of these names, or its end in the name of a module or an operator."""
    strings = (n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return [s for s in strings if s.strip(".").rpartition(".")[2] in names - FOR_MODULES]


def overridden(module: ModuleType) -> list[str]:
    """The private methods of torch's classes that classes of this module override."""
    found = []
    for made in vars(module).values():
        if isinstance(made, type) and made.__module__ == module.__name__:
            of_torch = {name for c in made.__mro__ if c.__module__.partition(".")[0] == "torch" for name in vars(c)}
            ours = [c for c in made.__mro__ if c.__module__.startswith("lpq") and ".torch_private." not in c.__module__]
            methods = {n: m for c in ours for n, m in vars(c).items() if PRIVATE.fullmatch(n)}
            kinds = FunctionType, staticmethod, classmethod, property
            private = (n for n, m in methods.items() if isinstance(m, kinds) and n in of_torch - FOR_MODULES)
            found += [f"{made.__name__}.{name}" for name in private]
    return found


def torch_private_names(source: str, own: Collection[str]) -> list[str]:
    """Names of torch beginning with an underscore: of modules, of what they hold, and of attributes of its objects."""
    tree = ast.parse(source)
    heads: dict[str, bool] = {}
    """List the imports, by whether they are torch's."""
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            module = getattr(node, "module", None) or alias.name
            heads[alias.asname or alias.name.split(".")[0]] = module.split(".")[0] == "torch"
    ours = {*own, *FOR_MODULES, *OF_OTHERS}
    found = [name for name in imports(tree, "", types=True) if re.match(r"torch\b.*\._[A-Za-z]", name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            head = ast.unparse(node).partition(".")[0]
            if heads.get(head, node.attr not in ours):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and PRIVATE.fullmatch(name.value) and name.value not in ours:
                found.append(ast.unparse(node))
    return found


def test_private_names_of_torch_are_in_one_place() -> None:
    paths = files("lpq/**/*.py", "plugins/**/*.py")
    here = [p for p in paths if not short(p).startswith("lpq/torch_private/")]
    assert len(paths) > len(here) > 200
    own = own_names(path.read_text() for path in here)
    found = {short(path): torch_private_names(path.read_text(), own) for path in here if path.parts[-2] != "templates"}
    assert {path: names for path, names in found.items() if names} == {}


def test_no_string_is_such_a_name() -> None:
    paths = [p for p in files("lpq/**/*.py", "plugins/**/*.py") if not short(p).startswith("lpq/torch_private/")]
    names = names_of_torch()
    assert {"_schema", "_orig_mod", "_foreach_copy_", "_dynamo"} < names
    found = {short(path): private_strings(path.read_text(), names) for path in paths}
    assert {path: strings for path, strings in found.items() if strings} == {}
    assert private_strings("NAMES = '_orig_mod.', 'torch._dynamo', 'a _schema', '_ours'", names) == [
        "_orig_mod.",
        "torch._dynamo",
    ]


def test_no_private_method_is_overridden_elsewhere() -> None:
    found = {}
    for path in files("lpq/**/*.py"):
        if path.name not in ("__init__.py", "__main__.py") and "testing" not in path.parts:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            try:
                found[name] = overridden(import_module(name))
            except ModuleNotFoundError as error:  # of a framework, which is imported where it is used
                if "integrations" not in path.parts or str(error.name).startswith("lpq"):
                    raise
    assert len(found) > 200
    assert {name: methods for name, methods in found.items() if methods} == {}


def test_a_private_method_that_is_overridden_is_noticed() -> None:
    class Style(ColwiseParallel):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            return module

        @staticmethod
        def _prepare_input_fn(*_: Any) -> Any:
            return ()

    module = ModuleType("lpq.nn.styles")
    Style.__module__, module.Style = module.__name__, Style  # type: ignore[attr-defined]
    assert overridden(module) == ["Style._prepare_input_fn"]


def test_each_of_them_has_a_test() -> None:
    """Every name of every file, in ``tests/torch_private``, in a file that names the versions of torch."""
    versions = "in torch 2.11 and 2.13"
    tested = "\n".join(t for path in files("tests/torch_private/*.py") if versions in (t := path.read_text()))
    for path in files("lpq/torch_private/*.py"):
        tree = ast.parse(path.read_text())
        public = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        public |= {ast.unparse(node.target) for node in tree.body if isinstance(node, ast.AnnAssign)}
        for node in tree.body:
            if isinstance(node, ast.Assign) and not ast.unparse(node.value).startswith("TypeVar("):
                name = ast.unparse(node.targets[0])
                public |= set(ast.literal_eval(node.value)) if name == "__all__" else {name}
        untested = {name for name in public if name[0] != "_" and not re.search(rf"\b{name}\b", tested)}
        assert untested <= {"Allocate", "Hooks"}, path


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._get_tracing_state()", ["torch._C._get_tracing_state", "torch._C"]),
        ("import torch._dynamo as d", ["torch._dynamo"]),
        ("def f():\n    from torch.nn.functional import _pad", ["torch.nn.functional._pad"]),
        ("if TYPE_CHECKING:\n    from torch._tensor import T", ["torch._tensor.T"]),
        ("from torch import Tensor\nTensor._ours", ["Tensor._ours"]),
        ("x.untyped_storage()._cdata", ["x.untyped_storage()._cdata"]),
        ("getattr(x, '_local_tensor', x)", ["getattr(x, '_local_tensor', x)"]),
        ("import os, sys\nos._exit(sys._getframe())\nself._ours = x._ours\nlayer._parameters, t._replace(a=1)", []),
    ],
)
def test_a_private_name_of_torch_is_noticed(source: str, found: list[str]) -> None:
    own = own_names(["class A:\n    def f(self, t):\n        self._ours = t._cdata = t"])
    assert torch_private_names(source, own) == found
