"""Rules of the whole house: imports point down, the core names no format, and the wheel is complete."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PLUGINS: dict[str, str] = PYPROJECT["project"]["entry-points"]["lpq.plugins"]

FLOORS = {
    "importing": 1, "registry": 1, "torch_private": 1, "formats": 2, "kernels": 2, "files": 3, "operations": 3,
    "emulation": 4, "tensor": 4, "core": 5, "recipes": 6, "distributed": 7, "nn": 8, "optim": 9, "checkpoint": 9,
    "calibration": 9, "engines": 9, "observe": 9, "bench": 10, "testing": 10, "integrations": 10, "cli": 11,
    "train": 11, "__main__": 12, "moved": 12,
}  # fmt: skip
TOP = 10
"""From this floor on a module may use lpq as a user does: ``import lpq``."""
BESIDE = {
    ("checkpoint", "optim"), ("observe", "optim"), ("engines", "checkpoint"),
    ("calibration", "engines"), ("calibration", "checkpoint"), ("train", "cli"),
}  # fmt: skip
"""Parts of one floor of which the first may import the second."""
FOR_PLUGINS = {"registry", "torch_private", "core", "formats", "kernels", "operations", "emulation"}
NAMELESS = (
    "formats", "kernels", "files", "operations", "emulation", "tensor", "core", "nn", "distributed", "optim",
    "checkpoint", "calibration", "engines", "observe", "integrations",
)  # fmt: skip
"""The parts that know no format."""
NOT_OURS = re.compile(r"\.git|\.venv(-vllm)?|site|runs|dist|build|__pycache__|\.(mypy|ruff|pytest)_cache|\.hypothesis")


T = TypeVar("T")


def files(*patterns: str) -> list[Path]:
    """The project's files, without what was installed or built."""
    found = [p for pattern in patterns for p in ROOT.glob(pattern)]
    ours = [p for p in found if not any(map(NOT_OURS.fullmatch, p.relative_to(ROOT).parts))]
    return sorted(p for p in ours if p.is_file())


@functools.cache
def parsed(source: str) -> ast.Module:
    """Each source once for all tests: nobody changes a tree."""
    return ast.parse(source)


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def found_in(paths: Iterable[Path], search: Callable[[Path], T]) -> dict[str, T]:
    """The findings of a search, by file, where there are any."""
    found = {short(path): search(path) for path in paths}
    assert found, "there is no file to search"
    return {path: what for path, what in found.items() if what}


def imports(tree: ast.AST, package: str, *, types: bool = False) -> Iterator[str]:
    """Every module that a source imports at run time, wherever in it; ``package`` is where it lies. ``types``: and what
    it imports for its types."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            continue  # nothing else has a statement in it
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        if isinstance(node, ast.If) and typing_only and not types:
            yield from imports(ast.Module(node.orelse, []), package)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node, package, types=types)


def parts_used(source: str, package: str) -> set[str]:
    """The parts of lpq that a source imports, for types too; ``lpq`` itself if it uses the public names."""
    used: set[str] = set()
    for name in imports(parsed(source), package, types=True):
        head, *rest = name.split(".")
        if head == "lpq":
            used.add(rest[0] if rest and (rest[0] in FLOORS or (ROOT / "lpq" / rest[0]).is_dir()) else "lpq")
    return used


def wrong_imports(source: str, part: str) -> list[str]:
    """The imports of a module of this part that it may not have."""
    wrong = []
    for used in sorted(parts_used(source, f"lpq.{part}")):
        if used == "lpq":
            allowed = FLOORS[part] >= TOP
        else:
            allowed = used == part or FLOORS[used] < FLOORS[part] or (part, used) in BESIDE
        wrong += [] if allowed else [used]
    return wrong


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "lpq").with_suffix("").parts[0]


# ---------------------------------------------------------------------------------------------- imports


def of_lpq() -> list[Path]:
    """Every module of it but ``lpq`` itself."""
    return [path for path in files("lpq/**/*.py") if part_of(path) != "__init__"]


def test_imports_point_down() -> None:
    assert {part_of(path) for path in of_lpq()} <= set(FLOORS), "a part has no floor"
    assert found_in(of_lpq(), lambda path: wrong_imports(path.read_text(), part_of(path))) == {}


@pytest.mark.parametrize(
    ("part", "source", "wrong"),
    [
        ("core", "from lpq.nn import Linear", ["nn"]),
        ("core", "from lpq import recipes", ["recipes"]),
        ("core", "def f():\n    import lpq.cli", ["cli"]),
        ("core", "import lpq", ["lpq"]),
        ("core", "from lpq import quantizer", ["lpq"]),
        ("core", "from lpq.kernels import choose", []),
        ("core", "if TYPE_CHECKING:\n    from lpq.nn import Linear", ["nn"]),
        ("core", "if TYPE_CHECKING:\n    pass\nelse:\n    from lpq.nn import Linear", ["nn"]),
        ("kernels", "from lpq.core import Quantizer", ["core"]),
        ("nn", "from ..train import run", ["train"]),
        ("cli", "from lpq.train.runs import resolve", ["train"]),
        ("train", "import lpq\nfrom lpq.nn import Linear", []),
    ],
)
def test_an_import_that_points_up_is_noticed(part: str, source: str, wrong: list[str]) -> None:
    assert wrong_imports(source, part) == wrong


STRING = re.compile(r"(lpq(?:\.\w+)+)(:[\w.]+)?")
"""An import string, or the name of a module."""


def wrong_strings(source: str, part: str) -> list[str]:
    """Import strings, and names of modules, in a module of this part that point to one that it may not import."""
    strings = (n.value for n in ast.walk(parsed(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    found = map(STRING.fullmatch, strings)
    named = [(m[0], m[1]) for m in found if m and (m[2] or m[1].split(".")[1] in FLOORS)]
    return [whole for whole, module in named if wrong_imports(f"import {module}", part)]


def test_no_import_string_points_up() -> None:
    """Those of ``lpq`` itself name what a user asks for."""
    assert found_in(of_lpq(), lambda path: wrong_strings(path.read_text(), part_of(path))) == {}


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("KernelSpec(op='gemm', impl='lpq.nn.linear:Linear.forward')", ["lpq.nn.linear:Linear.forward"]),
        ("registry.resolve('lpq.optim:MasterWeights')", ["lpq.optim:MasterWeights"]),
        ("import_module('lpq.testing.expect')", ["lpq.testing.expect"]),
        ("COMMANDS = {'train': ('lpq.train.commands.train', 'Train.')}", ["lpq.train.commands.train"]),
        ("registry.resolve('lpq.registry.lookup:formats')", []),
        ("print('lpq.nn: it is below', 'lpq.convert')", []),
    ],
)
def test_an_import_string_that_points_up_is_noticed(source: str, wrong: list[str]) -> None:
    assert wrong_strings(source, "recipes") == wrong


def graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Which of these modules imports which others, types included; a package's name ends in ``.__init__``."""
    edges: dict[str, set[str]] = {}
    for module, source in sources.items():
        edges[module] = set()
        # ``lpq`` itself names for type checkers what a user asks for.
        for name in imports(parsed(source), module.rpartition(".")[0], types=module != "lpq.__init__"):
            near = (name, f"{name}.__init__", name.rpartition(".")[0], f"{name.rpartition('.')[0]}.__init__")
            edges[module] |= {*filter(sources.__contains__, near[:2])} or {*filter(sources.__contains__, near[2:])}
    return edges


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The modules that import each other, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in edges[module]:
            if other not in order:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == order[module]:
            at = stack.index(module)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for module in edges:
        if module not in order:
            visit(module)
    return [circle for circle in found if len(circle) > 1 or circle[0] in edges[circle[0]]]


def test_no_modules_import_each_other() -> None:
    """Neither inside a package nor across packages, and not for types either."""
    roots = [ROOT / "lpq", *ROOT.glob("plugins/*/lpq_*"), *ROOT.glob("examples/*/lpq_*")]
    sources = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts): path.read_text()
        for root in roots
        for path in files(f"{root.relative_to(ROOT)}/**/*.py")
    }
    assert len(sources) > 200
    assert circles(graph(sources)) == []


def test_modules_that_import_each_other_are_noticed() -> None:
    sources = {
        "lpq.a.__init__": "from lpq.a.x import f",
        "lpq.a.x": "def f():\n    from lpq.a import y",
        "lpq.a.y": "if TYPE_CHECKING:\n    from lpq.a.z import Z",
        "lpq.a.z": "from . import x",
        "lpq.b": "from lpq.a import f\nimport lpq.a.x, torch",
    }
    assert circles(graph(sources)) == [["lpq.a.x", "lpq.a.y", "lpq.a.z"]]
    assert circles(graph({**sources, "lpq.a.z": "from lpq.a import f"})) == [
        ["lpq.a.__init__", "lpq.a.x", "lpq.a.y", "lpq.a.z"]
    ]
    assert circles(graph({**sources, "lpq.a.z": "import lpq.b"})) == [[*sorted(sources)]]
    assert circles(graph({**sources, "lpq.a.z": ""})) == []


def plugins_imported(path: Path, package: str) -> set[str]:
    heads = {name.split(".")[0] for name in imports(parsed(path.read_text()), package)}
    return {head for head in heads if head.startswith("lpq_")}


def test_a_plugin_imports_the_registry_the_core_and_the_kernel_table_only() -> None:
    """But for the module of the layers that it puts in the place of others."""

    def not_its_own(path: Path) -> set[str]:
        own = path.relative_to(ROOT).parts[2]
        allowed = FOR_PLUGINS | {"nn", "recipes"} if path.name == "layers.py" else FOR_PLUGINS
        return parts_used(path.read_text(), own) - allowed | plugins_imported(path, own) - {own}

    assert found_in(files("plugins/**/*.py", "examples/*/lpq_*/**/*.py"), not_its_own) == {}


def test_no_part_of_lpq_imports_a_plugin() -> None:
    assert found_in(files("lpq/**/*.py"), lambda path: plugins_imported(path, f"lpq.{part_of(path)}")) == {}


def test_no_format_is_named_where_none_may_be() -> None:
    nameless = files(*(f"lpq/{part}/**/*.py" for part in NAMELESS))
    assert found_in(nameless, lambda path: formats_named(path.read_text())) == {}


def formats_named(text: str) -> list[str]:
    names = {*PLUGINS} - {"bf16", "emulation"}  # a name of PyTorch's, and a plugin that brings no format
    return [name for name in sorted(names) if name in text.lower()]


def test_a_format_that_is_named_is_noticed() -> None:
    assert formats_named("if isinstance(storage, NVFP4Storage): ...") == ["nvfp4"]
    assert formats_named("# as for hybrids") == ["hybrid"]


def in_a_fresh_process(code: str) -> set[str]:
    """The top-level modules that are imported once ``code`` has run."""
    listing = "import sys; print('\\n', *sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", f"{textwrap.dedent(code)}\n{listing}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import lpq, sys; assert 'lpq.registry' not in sys.modules",
        "import lpq.registry as r; r.formats(), r.recipes(), r.plugins()",
        "import lpq; lpq.__version__, dir(lpq)",
        "import lpq, sys; [hasattr(m, '__file__') for m in [*sys.modules.values()]]",  # as inspect asks
    ],
)
def test_importing_and_listing_needs_no_torch(code: str) -> None:
    assert not in_a_fresh_process(code) & {"torch", "triton", "numpy", "rich", "typer", "lpq_mxfp8.quantizer"}


def test_a_heavy_import_would_be_noticed() -> None:
    assert {"typer", "lpq"} <= in_a_fresh_process("import lpq; from lpq.__main__ import main")


# ---------------------------------------------------------------------------------------------- files


def longer(path: Path) -> int:
    """The lines of a file that has too many."""
    lines = len(path.read_text().splitlines())
    return lines if lines > 500 else 0


def test_a_file_is_short_and_says_what_it_is_for() -> None:
    modules = files("lpq/**/*.py", "plugins/**/*.py", "tests/**/*.py", "examples/**/*.py")
    assert found_in(modules, longer) == {}
    assert found_in(modules, lambda path: not path.read_text().startswith('"""')) == {}, "no docstring"


def test_a_cuda_source_is_short_and_says_what_it_is_for() -> None:
    sources = files("csrc/**/*.cu", "csrc/**/*.cuh")
    assert found_in(sources, longer) == {}
    assert found_in(sources, lambda path: not path.read_text().startswith("// ")) == {}, "no purpose in the first line"


def test_the_median_file_is_no_longer_than_about_150_lines() -> None:
    lengths = sorted(len(p.read_text().splitlines()) for p in files("lpq/**/*.py", "plugins/**/*.py"))
    assert lengths[len(lengths) // 2] <= 150


def test_the_name_of_a_class_means_one_thing() -> None:
    """But for ``Part``, which published pages have with two meanings."""
    found = [node.name for path in of_lpq() for node in parsed(path.read_text()).body if isinstance(node, ast.ClassDef)]
    assert {"Linear"} <= {name for name in found if found.count(name) == 1}
    assert {name for name in found if name[0] != "_" and found.count(name) > 1} == {"Part"}


FACTORIES = {"zeros", "ones", "empty", "rand", "randn", "linspace", "logspace", "eye"}


def of_default_dtype(source: str) -> list[str]:
    """Calls that make tensors in whatever torch's default dtype is; those on the device meta are for their shapes."""
    calls = [n for n in ast.walk(parsed(source)) if isinstance(n, ast.Call)]
    made = [call for call in calls if ast.unparse(call.func).removeprefix("torch.") in FACTORIES]
    given = [{one.arg for one in call.keywords} for call in made]
    texts = [ast.unparse(call) for call, names in zip(made, given, strict=True) if not names & {"dtype", None}]
    return [text for text in texts if text.startswith("torch.") and "device='meta'" not in text]


def test_no_tensor_has_the_default_dtype() -> None:
    """A library or a user may have set it to bf16. The kit has its own test, with plugins."""
    ours = [p for p in files("lpq/**/*.py", "plugins/*/lpq_*/**/*.py") if "testing" not in p.parts]
    assert found_in(ours, lambda path: of_default_dtype(path.read_text())) == {}
    assert of_default_dtype("torch.zeros((), device=x.device)") == ["torch.zeros((), device=x.device)"]
    assert of_default_dtype("torch.ones(2, dtype=x.dtype), torch.empty(2, **how), zeros(2)") == []


def test_each_part_has_a_folder_of_tests() -> None:
    parts = {path.parent.name for path in files("lpq/*/__init__.py")}
    assert parts <= {path.parent.name for path in files("tests/*/test_*.py")}


def test_no_two_files_of_tests_have_one_name() -> None:
    """Their folders are no packages, so a name is a module's, whichever folder it lies in."""
    names = [path.name for path in files("tests/**/*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))


def test_no_file_has_a_path_of_somebodys_machine() -> None:
    machine = re.compile(r"(?<![\w.])/(?:" + "|".join(("work", "root", "home", "Users")) + r")/\w")
    here = Path(__file__)
    text_files = files("*", "lpq/**/*", "plugins/**/*", "tests/**/*", "docs/**/*", "examples/**/*", ".ci/*")
    for path in text_files:
        if path.suffix not in (".npz", ".png", ".pyc") and path != here:
            found = machine.search(path.read_text(encoding="utf-8"))
            assert not found, f"{path.relative_to(ROOT)}: {found}"
    assert machine.search("see /" + "home/me/lpq")


# ---------------------------------------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    build("wheel", target)
    (built,) = target.glob("*.whl")
    return built


def build(kind: str, target: Path) -> None:
    code = f"import hatchling.build as b; b.build_{kind}({str(target)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def missing_plugins(wheel: Path) -> set[str]:
    """The plugins that the wheel's own entry points name and that it does not hold."""
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        (entry_points,) = (name for name in held if name.endswith(".dist-info/entry_points.txt"))
        text = archive.read(entry_points).decode()
    section = text.partition("[lpq.plugins]")[2].partition("[")[0]
    targets = dict(re.findall(r"^(\S+) = (\S+)$", section, re.MULTILINE))
    return {
        name
        for name, module in targets.items()
        if not {f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py"} & held
    } | (set(PLUGINS) - set(targets))


def test_the_wheel_is_pure_python_and_has_every_plugin(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert missing_plugins(wheel) == set()
    sources = {p.relative_to(ROOT / "lpq").as_posix() for p in files("lpq/**/*.py")}
    for path in files("plugins/**/*.py"):
        sources.add("../" + "/".join(path.relative_to(ROOT).parts[2:]))
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert {"lpq/" + s if not s.startswith("../") else s[3:] for s in sources} <= held
    assert {"lpq/py.typed", "lpq/cli/templates/pyproject.toml", "lpq/bench/llama-h100.json"} <= held
    assert not [name for name in held if name.startswith(("tests/", "examples/", "docs/"))]


def test_a_plugin_that_is_missing_from_the_wheel_is_noticed(wheel: Path, tmp_path: Path) -> None:
    broken = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(broken, "w") as part:
        for name in whole.namelist():
            if not name.startswith("lpq_mxfp8/"):
                part.writestr(name, whole.read(name))
    assert missing_plugins(broken) == {"mxfp8"}
    with zipfile.ZipFile(broken) as part:
        part.extractall(tmp_path / "installed")
    done = formats_installed_from(tmp_path / "installed")
    assert "mxfp8" not in done.stdout.split()
    assert "nvfp4" in done.stdout.split()
    assert "plugin mxfp8" in done.stderr


def install(wheel: Path, target: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    return target


def formats_installed_from(target: Path) -> subprocess.CompletedProcess[str]:
    """The formats where this folder has the only lpq: the environment's own one would serve as well."""
    libraries = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    code = f"""
        import sys, site
        sys.path += {libraries!r}
        site.addsitedir({str(target)!r})
        sys.path.insert(0, {str(target)!r})
        import lpq
        from lpq import registry
        print(lpq.__file__)
        print(*registry.formats())
        print(*(p.error for p in registry.plugins() if p.error), file=sys.stderr)
    """
    return subprocess.run(
        [sys.executable, "-S", "-c", textwrap.dedent(code)],
        cwd=target, env={"PATH": "", "PYTHONPATH": "", "LPQ_LOAD_PLUGINS": ""},
        capture_output=True, text=True, check=True,
    )  # fmt: skip


def built_in() -> set[str]:
    return {name for name, module in PLUGINS.items() if "." not in module}


def test_the_installed_wheel_lists_every_format(wheel: Path, tmp_path: Path) -> None:
    target = install(wheel, tmp_path / "installed")
    location, formats = formats_installed_from(target).stdout.splitlines()
    assert Path(location).is_relative_to(target)
    assert set(formats.split()) == built_in()


def test_the_editable_install_lists_every_format(tmp_path: Path) -> None:
    build("editable", tmp_path)
    (built,) = tmp_path.glob("*.whl")
    target = install(built, tmp_path / "installed")
    location, formats = formats_installed_from(target).stdout.splitlines()
    assert Path(location).is_relative_to(ROOT)
    assert set(formats.split()) == built_in()
