"""Finding formats and recipes: what is imported when, who owns a name, what ``LPQ_LOAD_PLUGINS`` hides; and threads
that look up and register at once."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from forking import python

import lpq
from lpq import registry
from lpq.importing import after_import
from lpq.registry import FormatSpec, KernelSpec
from lpq.registry.errors import PluginError, PluginHidden, PluginMissing, UnknownFormat, UnknownRecipe

RECIPES = """
@hookimpl
def lpq_register_recipes():
    return [RecipeSpec(name=name, summary="", recipe="base") for name in NAMES]
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_what_a_layer_that_trains_imports_beside_torch() -> None:
    """Not the compiler, which takes longer than all of lpq: here its import fails, which the last call shows. Neither
    DTensor by private names of torch, nor anything of CUDA by the table of kernels, nor of Hugging Face's libraries."""
    light = "autograd, compiling, cuda, dispatch, memory, operators, optimizers, pytree, tensors, wrappers"
    code = f"""
        import sys, torch
        sys.modules["torch._dynamo"] = None
        before = {{*sys.modules}}
        from lpq.torch_private import {light}
        print([name for name in {{*sys.modules}} - before if name.startswith("torch")])
        import lpq.kernels.table
        print("lpq.kernels.nvrtc_cache" in sys.modules)
        import lpq.integrations.transformers
        model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        lpq.convert(model, "nvfp4")
        model(torch.ones(32, 32)).sum().backward()
        imported = {{name.partition(".")[0] for name in {{*sys.modules}} - before}}
        print([name for name in ("cuda", "peft", "transformers") if name in imported])
        torch.compile(model)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "True", "[]"], done.stderr
    assert re.search(r"ModuleNotFoundError: .*torch\._dynamo", done.stderr)


@pytest.mark.parametrize("module", ["formats", "tensor", "operations"])
def test_a_module_of_lpq_may_be_the_first_to_import_torch(module: str) -> None:
    """The end of that import is no time to import what lies above the module."""
    assert run(f"import sys, lpq.{module}; print('torch' in sys.modules)") == "True"


def test_a_file_loads_in_a_process_that_only_imported_lpq(tmp_path: Path) -> None:
    path = tmp_path / "tensor.pt"
    saved = lpq.quantizer("mxfp8").quantize(torch.randn(32, 64))
    torch.save(saved, path)
    layer, program = lpq.convert(torch.nn.Linear(32, 32, bias=False), "mxfp8"), tmp_path / "program.pt2"
    x = torch.ones(16, 32)
    torch.export.save(torch.export.export(layer, (x,)), program)
    expected = [str(saved.dequantize().sum().item()), str(layer(x).sum().item())]
    run_program = f"torch.export.load({str(program)!r}).module()(torch.ones(16, 32)).sum().item()"
    code = f"""
import pickle, torch
load = lambda: torch.load({str(path)!r}, weights_only=True)
try:
    load()
except pickle.UnpicklingError as error:
    print("weights_only" in str(error))
import lpq  # which lets torch read it
print(load().dequantize().sum().item())
print({run_program})
"""
    assert run(code).splitlines() == ["True", *expected]
    code = f"""
import importlib.util, sys
import lpq
assert importlib.util.find_spec("torch").loader.is_package("torch") and "torch" not in sys.modules
import torch  # after lpq, which then lets it read the file
print(torch.load({str(path)!r}, weights_only=True).dequantize().sum().item())
print({run_program})
print([name for name in ("encode_groups", "multiply_groups") if hasattr(torch.ops.lpq, name)])  # of grouped layers
print(torch.__loader__ is torch.__spec__.loader, [f for f in sys.meta_path if "lpq" in type(f).__module__])
"""
    assert run(code).splitlines() == [*expected, "['encode_groups', 'multiply_groups']", "True []"]


def test_what_is_to_follow_an_import_follows_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "awaited.py").write_text("import done\ndone.said.append('imported')")
    said: list[str] = []
    monkeypatch.setitem(sys.modules, "done", types.SimpleNamespace(said=said))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = [*sys.meta_path]
    after_import("awaited", lambda: said.append("then"))
    assert importlib.util.find_spec("awaited") is not None
    assert said == []
    importlib.import_module("awaited")
    assert said == ["imported", "then"]
    assert sys.meta_path == before
    after_import("awaited", lambda: said.append("now"))
    assert said[2:] == ["now"]
    del sys.modules["awaited"]


def test_every_public_name_is_listed_and_typed() -> None:
    assert dir(lpq) == sorted([*lpq.__all__, *lpq._SUBMODULES, "__version__"])
    assert set(lpq.__all__) == set(lpq._MODULE_OF)
    for name in lpq._SUBMODULES:
        assert getattr(lpq, name) is sys.modules[f"lpq.{name}"]
    assert {"testing", "train"} <= set(lpq._SUBMODULES)
    assert lpq.registry is registry
    assert lpq.quantizer is registry.quantizer


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("covert", "; did you mean 'convert'?"), ("Polcy", "; did you mean 'Policy'?"),
        ("CONVERT", "; did you mean 'convert'?"),
        ("calibrat", "; did you mean 'calibrate' or 'calibration'?"), ("unlike_any", ""), ("__versoin__", ""),
    ],
)  # fmt: skip
def test_a_misspelt_public_name_says_what_was_meant(name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(lpq, name)
    assert str(raised.value) == f"module 'lpq' has no attribute {name!r}{hint}"
    assert (raised.value.name is None) is (hint != "")  # of an error with a name Python suggests in a traceback, too


def test_asking_whether_lpq_has_a_name_imports_nothing_for_names_with_underscores() -> None:
    ask = "[hasattr(lpq, n) for n in ('__wrapped__', '__path__', '_repr_html_', '__file__')]"
    code = f"import inspect, sys, lpq; before = {{*sys.modules}}; print({ask}, inspect.unwrap(lpq) is lpq)"
    assert run(f"{code}; print({{*sys.modules}} - before)") == "[False, True, False, True] True\nset()"
    assert not hasattr(lpq, "covert")
    assert getattr(lpq, "covert", None) is None
    with pytest.raises(ImportError, match="cannot import name 'covert' from 'lpq'"):
        exec("from lpq import covert")
    assert importlib.import_module("lpq.bench").__name__ == "lpq.bench"  # a module, and no public name


def test_a_plugin_that_is_installed_meanwhile_is_found(site, monkeypatch) -> None:
    """By its name and in lists, and what is loaded already stays; so is one whose missing module is installed."""
    needs = "import needed_by_it\n" + site.format("lacking")
    site.install("lacking", "1", {"lacking": "lacking_plugin"}, {"lacking_plugin": needs})
    base, known = registry.format("base"), registry.kernels("gemm", ("new", "new"))
    with pytest.raises(UnknownFormat):
        registry.format("new")
    with pytest.raises(PluginError, match="needed_by_it, which is not installed"):
        registry.format("lacking")
    kernel = """
@hookimpl
def lpq_register_kernels():
    return KernelSpec(op="gemm", impl="x:y", backend="torch", formats=("new", "new"))
"""
    monkeypatch.setattr(registry, "refresh", lambda: None)  # which the site would call
    site.install("acme", "1", {"new": "new_plugin"}, {"new_plugin": site.format("new") + kernel, "needed_by_it": ""})
    assert registry.format("new").name == "new"
    assert registry.format("lacking").name == "lacking"
    assert {"base", "new", "lacking"} <= registry.formats().keys()
    assert registry.format("base") is base
    assert (len(known), len(registry.kernels("gemm", ("new", "new")))) == (0, 1)


@pytest.mark.parametrize("line", ["{folder}", "import sys; sys.path.append({folder!r})"])
def test_a_plugin_that_is_installed_meanwhile_in_editable_mode_is_found(line: str, site, monkeypatch) -> None:
    """Its modules are elsewhere, which Python learns when it starts."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = site.path / "sources"
    folder.mkdir()
    (folder / "new_plugin.py").write_text(site.format("new"))
    (site.path / "new.pth").write_text(line.format(folder=str(folder)) + "\n")
    with pytest.raises(UnknownFormat):
        registry.format("new")
    site.install("acme", "1", {"new": "new_plugin", "gone": "gone_plugin"})
    (site.path / "acme-1.dist-info" / "RECORD").write_text("new.pth,,\nacme-1.dist-info/METADATA,,\n")
    assert registry.format("new").name == "new"
    assert str(folder) in sys.path
    with pytest.raises(PluginError, match="importing gone_plugin raised ModuleNotFoundError"):
        registry.format("gone")


def test_a_lookup_imports_one_plugin(site) -> None:
    for name in ("one", "two"):
        source = site.format(name) + f"NAMES = ['{name}', '{name}-fast']\n" + RECIPES
        site.install(name, "1", {name: f"{name}_plugin"}, {f"{name}_plugin": source})
    assert registry.format("one").name == "one"
    assert site.imported() == {"one_plugin"}
    assert registry.recipe_spec("two-fast").name == "two-fast"
    assert site.imported() == {"one_plugin", "two_plugin"}
    assert registry.quantizer("base") == registry.quantizer("base()")
    assert site.imported() == {"one_plugin", "two_plugin", "base_plugin", "base_quantizer"}


def test_making_a_quantizer_imports_one_plugin(site) -> None:
    """Its text and its format are found with the class that was loaded by name, not by listing all formats."""
    site.install("spy", "1", {"spy": "spy_plugin"}, {"spy_plugin": site.format("spy")})
    made = registry.quantizer("base(rht=true)")
    assert registry.spec_string(made) == "base(rht=true)"
    assert registry.format_of(type(made)) is registry.format("base")
    assert site.imported() == {"base_plugin", "base_quantizer"}
    registry.refresh()  # what was loaded is forgotten: only the list of formats knows the class
    assert registry.format_of(type(made)) is registry.format("base")
    assert "spy_plugin" in site.imported()


def test_making_an_installed_quantizer_imports_one_plugin(site) -> None:
    elsewhere = type(site)(site.path / "elsewhere")
    elsewhere.install("spy", "1", {"spy": "spy_plugin"}, {"spy_plugin": site.format("spy")})
    code = f"""
import sys
sys.path[sys.path.index({str(site.path)!r})] = {str(elsewhere.path)!r}
import lpq
print(lpq.quantizer("nvfp4(rht=true)"), lpq.quantizer("mxfp8"))
print("spy_plugin" in sys.modules, "spy" in lpq.registry.formats(), "spy_plugin" in sys.modules)
"""
    done = python(code)
    assert done.status == 0, done.err
    assert done.out.splitlines() == ["nvfp4(rht=true) mxfp8", "False True True"]


def test_the_longest_name_owns(site) -> None:
    wide = site.format("acme", "acme_fast_wide") + "NAMES = ['acme-fast-wide', 'acme-fast']\n" + RECIPES
    site.install("acme", "1", {"acme": "acme_plugin"}, {"acme_plugin": wide})
    narrow = site.format("acme_fast") + "NAMES = ['acme_fast']\n" + RECIPES
    site.install("acme-fast", "1", {"acme_fast": "acme_fast_plugin"}, {"acme_fast_plugin": narrow})
    assert registry.format("acme_fast").quantizer.startswith("acme_fast_")
    assert site.imported() == {"acme_fast_plugin"}
    # What the longer name does not have is still found with the plugin that does.
    assert registry.format("acme_fast_wide").quantizer.startswith("acme_quantizer")
    assert registry.recipe_spec("acme-fast").name == "acme-fast"


def test_a_broken_plugin_with_a_longer_name_takes_nothing_away(site) -> None:
    site.install("acme", "1", {"acme": "acme_plugin"}, {"acme_plugin": site.format("acme", "acme_fast_wide")})
    site.install("acme-fast", "1", {"acme_fast": "acme_fast_plugin"}, {"acme_fast_plugin": "1 / 0"})
    assert registry.format("acme_fast_wide").name == "acme_fast_wide"
    with pytest.raises(PluginError, match="plugin acme_fast "):
        registry.format("acme_fast_other")


def test_did_you_mean(site) -> None:
    site.install("mxfp8", "1", {"mxfp8": "m"}, {"m": site.format("mxfp8") + "NAMES = ['mxfp8-fast']\n" + RECIPES})
    site.install("nvfp4", "1", {"nvfp4": "n"}, {"n": "1 / 0"})
    for text, meant in (("mxpf8", "mxfp8"), ("MXFP8", "mxfp8"), ("mxfp8_", "mxfp8"), ("nvpf4", "nvfp4")):
        with pytest.raises(UnknownFormat, match=f"no format '{text}' here: did you mean '{meant}'"):
            registry.format(text)
    with pytest.raises(UnknownRecipe, match="no recipe 'mxfp8-fest' here: did you mean 'mxfp8-fast'"):
        registry.recipe_spec("mxfp8-fest")
    with pytest.raises(UnknownFormat, match="choose from base, mxfp8, nvfp4"):
        registry.format("qqq")


def test_refresh_sees_a_new_distribution(site) -> None:
    with pytest.raises(UnknownFormat):
        registry.quantizer("acme")
    assert registry.kernels("quantize", ("acme",)) == ()
    site.install(
        "acme", "1", {"acme": "acme_plugin"},
        {"acme_plugin": site.format("acme") + "@hookimpl\ndef lpq_register_kernels():\n    return KernelSpec("
         "op='quantize', impl='k:f', backend='torch', formats=('acme',))\n",
         "acme_quantizer": (site.path / "base_quantizer.py").read_text()},
    )  # fmt: skip
    assert registry.quantizer("acme").block == "1x16"
    assert len(registry.kernels("quantize", ("acme",))) == 1


@pytest.mark.parametrize(
    ("value", "usable", "hidden"), [
        (None, {"base", "one", "two"}, set()), ("", {"base"}, {"one", "two"}), (" ", {"base"}, {"one", "two"}),
        ("two", {"base", "two"}, {"one"}), ("one, two,", {"base", "one", "two"}, set()),
        ("base", {"base"}, {"one", "two"}),
    ]
)  # fmt: skip
def test_load_plugins_limits_third_parties(
    site, monkeypatch: pytest.MonkeyPatch, value: str | None, usable: set[str], hidden: set[str]
) -> None:
    if value is not None:
        monkeypatch.setenv("LPQ_LOAD_PLUGINS", value)
    for name in ("one", "two"):
        site.install(f"{name}-dist", "3", {name: f"{name}_plugin"}, {f"{name}_plugin": site.format(name)})
    assert set(registry.formats()) == usable
    assert site.imported() == {f"{name}_plugin" for name in usable}
    assert {p.name for p in registry.plugins() if p.status == "hidden"} == hidden
    for name in hidden:
        with pytest.raises(PluginHidden) as caught:
            registry.quantizer(name)
        for part in (f"plugin {name} ({name}-dist 3)", f"LPQ_LOAD_PLUGINS={value} leaves it out", f"add {name} to"):
            assert part in str(caught.value)


def test_load_plugins_names_what_is_not_installed(site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPQ_LOAD_PLUGINS", "acme")
    registry.refresh()
    assert list(registry.formats()) == ["base"]
    assert {p.name: p.status for p in registry.plugins()} == {"base": "ok", "acme": "missing"}
    with pytest.raises(PluginMissing, match=r"plugin acme \(not installed\).*LPQ_LOAD_PLUGINS=acme names it"):
        registry.quantizer("acme_fast")


@pytest.mark.parametrize("limit", [None, ""])
def test_a_format_can_be_tried_without_packaging_it(site, monkeypatch: pytest.MonkeyPatch, limit: str | None) -> None:
    if limit is not None:
        monkeypatch.setenv("LPQ_LOAD_PLUGINS", limit)
        registry.refresh()
    module = types.ModuleType("notebook")
    exec(site.format("mine").replace("mine_quantizer", "base_quantizer"), module.__dict__)
    assert registry.register(module, name="mine").builtin is False
    assert registry.quantizer("mine").block == "1x16"
    exec(site.format("mine", "mine_b").replace("mine_quantizer", "base_quantizer"), module.__dict__)
    registry.register(module, name="mine")
    assert list(registry.formats()) == ["base", "mine_b"]
    with pytest.raises(UnknownFormat):  # what was remembered of the first is forgotten
        registry.quantizer("mine")
    registry.refresh()
    assert list(registry.formats()) == ["base"]


def test_what_is_registered_by_hand_is_checked_at_once(site) -> None:
    with pytest.raises(PluginError, match=r"plugin mine \(registered in this process\).*implements no hook"):
        registry.register(types.ModuleType("empty"), name="mine")
    with pytest.raises(PluginError, match=r"plugin mine .*: 'empty' is a text\. Remedy: import the module"):
        registry.register("empty", name="mine")
    with pytest.raises(PluginError, match=r"plugin base \(lpq 9.9\).*its name cannot be taken"):
        registry.register(types.ModuleType("empty"), name="base")
    assert [p.name for p in registry.plugins()] == ["base"]


def test_a_plugin_converts_what_it_wants(site) -> None:
    source = (
        "from lpq.registry import hookimpl\n@hookimpl\ndef lpq_convert_module(module, fqn):\n"
        "    return f'acme {fqn}' if module == 'attention' else None\n"
    )
    site.install("acme", "1", {"acme": "acme_plugin"}, {"acme_plugin": source})
    for _ in range(2):
        assert registry.convert_module("attention", "block.0", "bf16") == "acme block.0"
        assert registry.convert_module("linear", "block.1", "bf16") is None


def test_threads_load_a_plugin_once(site) -> None:
    slow = "import time\ntime.sleep(0.2)\n" + site.format("acme")
    site.install("acme", "1", {"acme": "acme_plugin"}, {"acme_plugin": slow})
    assert registry.format("base")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(registry.format, ["acme"] * 4))
    assert all(spec is found[0] for spec in found)


def test_resolve() -> None:
    assert registry.resolve("collections.abc:Mapping.get").__name__ == "get"
    for text, words in (
        ("no_colon", "write it as 'package.module:attribute'"),
        ("json:nothing", "has no attribute 'nothing'"),
        ("no_such_library:x", "No module named 'no_such_library'"),
    ):
        with pytest.raises(ImportError, match=words):
            registry.resolve(text)


@pytest.mark.parametrize("ending", ["", "raise OSError('no disk')", "plugin"], ids=["imported", "not", "by its hooks"])
def test_tables_of_modules_are_made_by_torchs_defaults(site, ending: str) -> None:
    """Whatever a program has set when it first uses a format, such as bf16 or the meta device; that stays set."""
    hooks = ending == "plugin"  # its own module may have the table, or import what has it
    source = f"import torch\nTABLE = torch.arange(4) / 3\n{site.format('late') if hooks else ending}\n"
    site.install("late", "1", {"late": "late_table"} if hooks else {}, {"late_table": source})
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode(), torch.device("meta"):
            if hooks:
                assert "late" in registry.formats()
            if ending and not hooks:
                with pytest.raises(ImportError, match="no disk"):
                    registry.resolve("late_table:TABLE")
            else:
                table = registry.resolve("late_table:TABLE")
                assert (table.dtype, table.device.type, table.is_inference()) == (torch.float32, "cpu", False)
            ones = torch.ones(1)
            assert (ones.dtype, ones.device.type, ones.is_inference()) == (torch.bfloat16, "meta", True)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_distribution_named_in_place_of_its_plugin(site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("log6-formats", "1.0", {"log6": "log6_plugin"}, {"log6_plugin": site.format("log6")})
    monkeypatch.setenv("LPQ_LOAD_PLUGINS", "log6-formats")
    registry.refresh()
    with pytest.raises(PluginMissing, match="log6-formats is a distribution: name its plugin, log6, in LPQ_LOAD_PLUG"):
        registry.format("log6-formats")


# ------------------------------------------------------------------------------------------ threads


class Acme:
    """A plugin as one would try it in a notebook."""

    def __init__(self, format: str, summary: str = "", classes: str = "base_quantizer") -> None:
        quantizer, storage = f"{classes}:FakeQuantizer", f"{classes}:FakeStorage"
        self.spec = FormatSpec(name=format, summary=summary, effective_bits=8, quantizer=quantizer, storage=storage)

    @registry.hookimpl
    def lpq_register_formats(self) -> FormatSpec:
        return self.spec


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def test_what_threads_register_at_once_is_all_there(site) -> None:
    """The registry is made on first use, and here all threads are first."""
    for _ in range(5):
        registry.refresh()
        names = [f"acme{number}" for number in range(8)]
        together = Barrier(len(names))

        def register(name: str, together: Barrier = together) -> None:
            together.wait()
            registry.register(Acme(name), name=name)

        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(register, names))
        assert list(registry.formats()) == ["base", *names]


def test_one_thread_asks_while_another_registers(site, restless: None) -> None:
    """It finds what is there all the time, and the other registers what is right and what is not."""
    empty = types.ModuleType("empty")

    def register() -> None:
        for number in range(300):
            registry.register(Acme(f"base_{number % 50}x"), name=f"base_{number % 50}x")
            with pytest.raises(PluginError, match="implements no hook"):
                registry.register(empty, name=f"base_{number % 50}")

    with ThreadPoolExecutor(1) as pool:
        registering = pool.submit(register)
        while not registering.done():
            assert registry.format("base").name == "base"
            assert registry.quantizer_class("base").__name__ == "FakeQuantizer"
            assert registry.plugins()[0].name == "base"
            assert "base" in registry.formats()
            with pytest.raises(UnknownFormat, match="there is no format 'zzz' here"):
                registry.format("zzz")
        registering.result()


def test_what_a_plugin_asks_while_it_is_registered_is_not_remembered(site) -> None:
    """It was answered without the plugin itself."""
    kernel = KernelSpec(op="quantize", impl="k:f", backend="torch", formats=("base",))

    class Asking:
        @registry.hookimpl
        def lpq_register_kernels(self) -> KernelSpec:
            assert registry.kernels("quantize", ("base",)) == ()
            return kernel

    registry.register(Asking(), name="acme")
    assert registry.kernels("quantize", ("base",)) == (kernel,)


def test_a_plugin_is_replaced_while_a_class_of_it_is_imported(site) -> None:
    """The class is the quantizer of the format that there is now."""
    source = (site.path / "base_quantizer.py").read_text()
    waiting = (
        f"import pathlib, time\nwhile not pathlib.Path({str(site.path / 'go')!r}).exists():\n    time.sleep(0.01)\n"
    )
    (site.path / "slow_quantizer.py").write_text(waiting + source)
    registry.register(Acme("acme", "the first", "slow_quantizer"), name="acme")
    with ThreadPoolExecutor(1) as pool:
        importing = pool.submit(registry.quantizer_class, "acme")
        while not importing.done() and "slow_quantizer" not in sys.modules:
            time.sleep(0.01)
        registry.register(Acme("acme", "the second", "slow_quantizer"), name="acme")
        (site.path / "go").touch()
        found = importing.result()
    assert registry.format_of(found).summary == "the second"
