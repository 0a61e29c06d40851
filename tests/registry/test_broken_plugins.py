"""A broken plugin breaks nobody else, and its error says who, why and what to do."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable

import pytest
import torch

from lpq import registry
from lpq.registry.errors import LpqError, PluginError, UnknownFormat

BITS = "write a finite number above 0 or None"
HEADER = "from lpq.registry import FormatSpec, KernelSpec, RecipeSpec, hookimpl\n"


def hook(name: str, answer: str, arguments: str = "") -> str:
    """The source of a plugin with one hook."""
    return f"{HEADER}@hookimpl\ndef lpq_{name}({arguments}):\n    return {answer}\n"


def spec(name: object = "acme", more: str = "") -> str:
    return f"FormatSpec(name={name!r}, summary='', quantizer='q:Q', storage='q:S', effective_bits=8{more})"


def formats(answer: str) -> str:
    return hook("register_formats", answer)


def recipes(name: str, recipe: str) -> str:
    return hook("register_recipes", f"RecipeSpec(name={name!r}, summary='', recipe={recipe!r})")


def kernel(**fields: object) -> str:
    fields = {"op": "quantize", "impl": "acme_k:run", "backend": "triton", **fields}
    return f"KernelSpec({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def listed(**fields: object) -> str:
    """A plugin whose format lists this kernel."""
    return formats(spec(more=f", kernels=({kernel(**fields)},)"))


def alone(**fields: object) -> str:
    """A plugin that registers this kernel by itself."""
    return hook("register_kernels", f"[{kernel(**fields)}]")


UPGRADE = "pip install --upgrade acme-formats"
BROKEN = {
    "raises at import": ("raise RuntimeError('boom')", "RuntimeError: boom", UPGRADE),
    "exits at import": ("raise SystemExit('bye')", "SystemExit: bye", UPGRADE),
    "needs a missing library": (
        "import no_such_library.part", "needs the module no_such_library, which is not installed",
        "pip install no_such_library",
    ),
    "needs a module that lpq does not have": (
        "import lpq.no_such_part", "needs the module lpq.no_such_part, which this lpq does not have",
        f"{UPGRADE}, or report it to its authors, for lpq as it is now",
    ),
    "is not a module of the distribution": (None, "No module named 'acme_plugin'", "pip install --upgrade"),
    "outside its namespace": (formats(spec("mxfp8")), "'mxfp8', outside its namespace", "name it acme or acme_*"),
    "a prefix is not a namespace": (formats(spec("acmed")), "'acmed', outside", "name it acme or acme_*"),
    "a recipe outside its namespace": (
        recipes("fast", "acme"), "'fast', outside its namespace", "name it acme or acme-* or acme_*"
    ),
    "not a name": (formats(spec("acme_x y")), "'acme_x y' is not a name", "letters, digits"),
    "a misspelt hook": (
        hook("register_format", spec()), "it implements lpq_register_format, which is not a hook",
        "did you mean 'lpq_register_formats'",
    ),
    "no hook": ("x = 1", "it implements no hook", "lpq_register_formats"),
    "a hook without its decorator": (
        formats(spec()).replace("@hookimpl", ""), "it implements no hook", "@lpq.registry.hookimpl"
    ),
    "a hook with wrong arguments": (
        hook("convert_module", "None", "modul"), "{'modul'}", "the arguments that lpq.registry.hookspecs gives it"
    ),
    "an old API version": (
        formats(spec(more=", api_version=0")), "is for plugin interface 0, and this lpq has 2", UPGRADE
    ),
    "a new API version": (formats(spec(more=", api_version=3")), "interface 3", "pip install --upgrade lpq"),
    "fields of another API": (
        formats(spec(more=", bits=8")), "lpq_register_formats raised TypeError", "--upgrade"
    ),
    "a format twice": (formats(f"[{spec()}, {spec()}]"), "registers 'acme' twice", "its own name"),
    "returns nothing": (formats("None"), "lpq_register_formats returned None", "return a FormatSpec or a list"),
    "returns something else": (formats("['acme']"), "lpq_register_formats returned ['acme']", "return a FormatSpec"),
    "a name that is no text": (formats(spec(7)), "a format has name=7", "write a text"),
    "kernels that are none": (
        formats(spec(more=", kernels=['x']")), "format acme has kernels=['x']",
        "write a tuple, as (x,), in which each x is a KernelSpec",
    ),
    "a class in place of its import string": (
        formats(spec().replace("'q:Q'", "FormatSpec")), "acme has quantizer=<class 'lpq.registry.specs.FormatSpec'>",
        "write an import string, as 'package.module:attribute' (did you mean 'lpq.registry.specs:FormatSpec'?)",
    ),
    "an object in place of an import string": (
        formats(spec().replace("'q:Q'", "hookimpl")), "format acme has quantizer=<", "write an import string",
    ),
    "a quantizer in place of its import string": (
        formats(spec().replace("'q:Q'", spec())), "format acme has quantizer=FormatSpec(", "write an import string",
    ),
    "something else in place of a kernel": (
        formats(spec(more=", kernels=(registry.Part(name='a', dtype=0, shape=0, holds=0),)")).replace(
            HEADER, f"{HEADER}from lpq import registry\n"
        ),
        "format acme has kernels=(Part(", "in which each x is a KernelSpec",
    ),
    "a function in place of its import string": (
        alone(formats=("a",)).replace("'acme_k:run'", "lpq_register_kernels"), "a kernel has impl=<function",
        "(did you mean 'acme_plugin:lpq_register_kernels'?)",
    ),
    "no storage": (formats(spec().replace("'q:S'", "None")), "format acme has storage=None", "write an import string"),
    "bits as a text": (formats(spec().replace("=8", "='6.25'")), "acme has effective_bits='6.25'", BITS),
    "bits that are no number": (formats(spec().replace("=8", "=float('nan')")), "acme has effective_bits=nan", BITS),
    "no bits": (formats(spec().replace("=8", "=0")), "acme has effective_bits=0", BITS),
    "fewer bits than none": (formats(spec().replace("=8", "=-4.5")), "acme has effective_bits=-4.5", BITS),
    "bits that are a truth": (formats(spec().replace("=8", "=True")), "acme has effective_bits=True", BITS),
    "a summary that is no text": (
        formats(spec().replace("=''", "=3")), "format acme has summary=3", "write a text"
    ),
    "schemes that are no import string": (
        formats(spec(more=", schemes=(3,)")), "format acme has schemes=(3,)", "'package.module:attribute' or None"
    ),
    "a version as a text": (
        formats(spec(more=", api_version='2'")), "format acme has api_version='2'", "write a whole number"
    ),
    "a layout without a summary": (
        hook("register_layouts", "registry.LayoutSpec(name='acme', summary=None, layout='a:B')").replace(
            HEADER, f"{HEADER}from lpq import registry\n"
        ),
        "layout acme has summary=None", "write a text",
    ),
    "a flag that is none": (
        listed(rounds="no"), "kernel acme_k:run has rounds='no'", "write True or False"
    ),
    "lists a kernel for another format": (
        listed(formats=("base",)), "format acme lists kernel acme_k:run, which is for base",
        "return kernels for other formats from lpq_register_kernels",
    ),
    "an unknown operation": (
        listed(op="quantise"), "kernel acme_k:run has op='quantise'", "change it (did you mean 'quantize'?)"
    ),
    "an unknown backend": (
        listed(backend="cudaa"), "kernel acme_k:run has backend='cudaa'", "change it (did you mean 'cuda'?)"
    ),
    "the reference as a backend": (
        alone(backend="reference", formats=("a",)), "kernel acme_k:run has backend='reference'",
        "choose from cuda, torch, triton",
    ),
    "a kernel of an old API version": (
        listed(api_version=0), "kernel acme_k:run is for plugin interface 0, and this lpq has 2", UPGRADE
    ),
    "a kernel of a new API version": (
        alone(api_version=3, formats=("a",)), "kernel acme_k:run is for plugin interface 3, and this lpq has 2",
        "pip install --upgrade lpq",
    ),
    "a priority that is no number": (listed(priority="a"), "kernel acme_k:run has priority='a'", "a whole number"),
    "a kernel for no format": (
        alone(), "kernel acme_k:run has formats=(), and its op is quantize",
        "name 1 or 2, as in KernelSpec(formats=('acme', ...))",
    ),
    "a kernel for a text": (
        alone(formats="a"), "kernel acme_k:run has formats='a'", "write a tuple, as (x,), in which each x is a text"
    ),
    "a product of one format": (
        alone(op="gemm", formats=("a",)), "kernel acme_k:run has formats=('a',), and its op is gemm",
        "name 2, as in KernelSpec(formats=('acme', ...))",
    ),
    "two formats that are decoded": (
        alone(op="decode", formats=("a", "b")), "kernel acme_k:run has formats=('a', 'b'), and its op is decode",
        "name 1, as in KernelSpec(formats=('acme',))",
    ),
    "a text that is required": (
        listed(requires="a"), "kernel acme_k:run has requires='a'", "write a tuple, as (x,), in which each x is a text"
    ),
    "a capability as it is spoken": (
        listed(min_sm=9), "kernel acme_k:run has min_sm=9", "write a compute capability of 9.0 as 90"
    ),
    "a capability that is no whole number": (
        listed(max_sm=9.0), "kernel acme_k:run has max_sm=9.0", "write a whole number or None"
    ),
    "a device with a number": (
        listed(device="a:0"), "kernel acme_k:run has device='a:0'",
        "name a type of device, as 'cuda', without a number",
    ),
    "a binding that nothing calls": (
        alone(op="decode", formats=("a",), bind="b"), "kernel acme_k:run has bind='b', and its op is decode",
        "leave it out: nothing calls it but for quantize, transpose, gemm, exact, remember, grouped_gemm",
    ),
    "several for an operation without": (
        listed(op="decode", several="b"), "kernel acme_k:run has several='b', and its op is decode",
        "leave it out: nothing calls it but for quantize, transpose",
    ),
    "a kernel that rounds where nothing is read": (
        alone(op="decode", formats=("a",), rounds=True), "kernel acme_k:run has rounds=True, and its op is decode",
        "only measure and quantize round",
    ),
}  # fmt: skip
"""A fault of a plugin: its source, and words of the cause and of the remedy."""


@pytest.fixture
def broken(site, request: pytest.FixtureRequest) -> str:
    """Plugin ``acme`` with one thing wrong, beside a good third party."""
    source = BROKEN[request.param][0]
    modules = {} if source is None else {"acme_plugin": source}
    site.install("acme-formats", "1.2", {"acme": "acme_plugin"}, modules)
    site.install("good-formats", "2.0", {"good": "good_plugin"}, {"good_plugin": site.format("good")})
    return request.param


@pytest.mark.parametrize("broken", BROKEN, indirect=True)
def test_a_broken_plugin_says_who_why_and_what_to_do_and_breaks_nobody_else(broken: str) -> None:
    assert list(registry.formats()) == ["base", "good"]
    assert registry.quantizer("base(rht=true)").rht is True
    assert registry.format("good").name == "good"
    assert registry.kernels("quantize", ("base",)) == ()
    status = {p.name: (p.builtin, p.status) for p in registry.plugins()}
    assert status == {"base": (True, "ok"), "acme": (False, "broken"), "good": (False, "ok")}
    assert registry.convert_module("module", "fqn", "recipe") is None
    registry.refresh()  # nothing was asked yet
    _, cause, remedy = BROKEN[broken]
    lookups: list[Callable[[], object]] = [
        lambda: registry.format("acme"),
        lambda: registry.format("acme_other"),
        lambda: registry.recipe_spec("acme-fast"),
        lambda: registry.quantizer("acme(block=1x16)"),
    ]
    for lookup in lookups:
        with pytest.raises(PluginError) as caught:
            lookup()
        error = caught.value
        assert (error.plugin, error.distribution, error.version) == ("acme", "acme-formats", "1.2")
        assert cause in error.cause
        assert remedy in error.remedy
        assert str(error).startswith("plugin acme (acme-formats 1.2) cannot be used: ")
        assert error.cause in str(error)
        assert error.remedy in str(error)


def test_its_error_is_raised_from_what_went_wrong(site) -> None:
    site.install("acme", "1", {"acme": "acme_plugin"}, {"acme_plugin": "1 / 0"})
    depths = set()
    for _ in range(3):  # a stored error that is raised again does not pile up tracebacks
        with pytest.raises(PluginError) as caught:
            registry.format("acme")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        depths.add(len(caught.traceback))
    assert len(depths) == 1


def test_errors_can_be_pickled(site) -> None:
    site.install("acme", "1", {"acme": "acme_plugin"}, {"acme_plugin": "1 / 0"})
    for text in ("acme", "nothing", "base(rht", "base(rht=true"):
        with pytest.raises(LpqError) as caught:
            registry.quantizer(text)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again)) == (type(caught.value), str(caught.value))


@pytest.mark.parametrize("value", ["acme-formats", "", "acme_plugin:register()"])
@pytest.mark.parametrize("hidden", [False, True])
def test_an_entry_point_that_names_no_module(site, value: str, hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As somebody writes it who takes the name of the distribution for the module's."""
    site.install("acme-formats", "1.2", {"acme": value}, {"acme_plugin": site.format("acme")})
    if hidden:
        monkeypatch.setenv("LPQ_LOAD_PLUGINS", "")
    registry.refresh()
    assert list(registry.formats()) == ["base"]
    cause = r"LPQ_LOAD_PLUGINS= leaves it out" if hidden else f"its entry point is {value!r}: it must name a module"
    with pytest.raises(PluginError, match=rf"^plugin acme \(acme-formats 1\.2\).*: {re.escape(cause)}"):
        registry.format("acme")


@pytest.mark.parametrize("text", [None, "Metadata-Version: 2.1\n"])
def test_a_distribution_without_metadata(site, text: str | None) -> None:
    """As an interrupted install leaves it. What its plugins bring is there, and their errors say where it lies."""
    site.install("acme-formats", "1.2", {"acme": "acme_plugin", "acme_b": "no_such_plugin"})
    site.install("acme-more", "1", {}, {"acme_plugin": site.format("acme")})
    found = site.path / "acme_formats-1.2.dist-info" / "METADATA"
    found.unlink()
    if text is not None:
        found.write_text(text)
    registry.refresh()
    assert list(registry.formats()) == ["base", "acme"]
    where = re.escape(f"plugin acme_b (a distribution without metadata in {site.path})")
    with pytest.raises(PluginError, match=rf"{where}.*; otherwise install another version of what brings it"):
        registry.recipe_spec("acme_b")


def test_two_distributions_with_one_name_clash_before_any_import(site) -> None:
    site.install("acme-one", "1.0", {"acme": "one"}, {"one": site.format("acme")})
    site.install("acme-two", "2.0", {"acme": "two", "other": "other_plugin"}, {"other_plugin": site.format("other")})
    with pytest.raises(PluginError) as caught:
        registry.format("acme")
    remedy = "pip uninstall acme-one or pip uninstall acme-two"
    for part in ("plugin acme", "acme-one 1.0 and acme-two 2.0", "same name", remedy):
        assert part in str(caught.value)
    assert site.imported() == set()
    assert list(registry.formats()) == ["base", "other"]


def test_a_clash_with_a_built_in_leaves_the_other_built_ins_alone(site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("evil", "1.0", {"base": "evil_plugin"}, {"evil_plugin": site.format("base")})
    with pytest.raises(PluginError, match=r"evil 1\.0.*Remedy: pip uninstall evil\."):
        registry.format("base")
    monkeypatch.setenv("LPQ_LOAD_PLUGINS", "")
    registry.refresh()
    assert registry.quantizer("base").block == "1x16"
    assert "evil_plugin" not in sys.modules


def test_one_distribution_found_twice_is_no_clash(site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("acme-formats", "1.0", {"acme": "acme_plugin"}, {"acme_plugin": site.format("acme")})
    again = type(site)(site.path / "second")
    again.install("acme-formats", "1.0", {"acme": "acme_plugin"})
    monkeypatch.syspath_prepend(again.path)
    registry.refresh()
    assert registry.format("acme").name == "acme"


def test_two_names_for_one_module(site) -> None:
    site.install("acme", "1", {"acme": "acme_plugin", "acme_b": "acme_plugin"}, {"acme_plugin": site.format("acme")})
    assert registry.format("acme").name == "acme"
    with pytest.raises(PluginError, match="same module as plugin acme"):
        registry.recipe_spec("acme_b")


def test_a_quantizer_that_cannot_be_imported(site) -> None:
    """Listing works; the error comes when the class is wanted, and names the plugin all the same."""
    site.install("acme-formats", "1.2", {"acme": "acme_plugin"}, {"acme_plugin": site.format("acme")})
    assert "acme" in registry.formats()
    with pytest.raises(PluginError, match=r"plugin acme \(acme-formats 1\.2\).*needs the module acme_quantizer"):
        registry.quantizer("acme")
    site.install("acme-more", "1", {}, {"acme_quantizer": "import no_such_library"})
    with pytest.raises(PluginError, match=r"needs the module no_such_library.*Remedy: pip install no_such_library\."):
        registry.quantizer("acme")
    assert registry.quantizer("base").margin == 0


def test_a_kernel_for_someone_elses_format(site) -> None:
    kernels = [kernel(priority=priority, formats=("base",)) for priority in (1, 2)]
    source = site.format("acme") + hook("register_kernels", f"[{', '.join(kernels)}]")
    site.install("acme-formats", "1.2", {"acme": "acme_plugin"}, {"acme_plugin": source})
    assert [k.priority for k in registry.kernels("quantize", ("base",))] == [2, 1]
    assert registry.kernels("decode", ("base",)) == ()
    assert registry.kernels("quantize", ("acme",)) == ()


def test_kernels_of_a_format(site) -> None:
    kernels = ", ".join((kernel(), kernel(op="gemm"), kernel(op="gemm", formats=("base", "acme"))))
    source = f"from dataclasses import replace\n{site.format('acme')}\nSPEC = replace(SPEC, kernels=({kernels}))\n"
    site.install("acme-formats", "1.2", {"acme": "acme_plugin"}, {"acme_plugin": source})
    for op, wanted in (("quantize", ("acme",)), ("gemm", ("acme", "acme")), ("gemm", ("base", "acme"))):
        (found,) = registry.kernels(op, wanted)
        assert found.formats == wanted
    assert registry.kernels("gemm", ("acme", "base")) == ()


def test_a_recipe_that_names_an_unknown_format_can_be_listed(site) -> None:
    """Only building it asks for the format: tests/recipes has the error that names the product."""
    source = recipes("acme-fast", "fprop=nothing, dgrad=base")
    site.install("acme-formats", "1.2", {"acme": "acme_plugin"}, {"acme_plugin": source})
    assert list(registry.recipes()) == ["acme-fast"]
    (_, text), *_ = registry.split_items(str(registry.recipe_spec("acme-fast").recipe))
    with pytest.raises(UnknownFormat, match="'nothing'"):
        registry.quantizer(text)
    assert registry.quantizer("base") is not None


def test_a_module_that_another_thread_imports_is_waited_for(site) -> None:
    source = """
        import threading, time
        from lpq import registry
        found = []
        thread = threading.Thread(target=lambda: found.append(registry.resolve("late_module:TABLE")))
        thread.start()
        time.sleep(0.1)
        TABLE = 1
    """
    site.install("late", "1", {}, {"late_module": source})
    assert registry.resolve("late_module:TABLE") == 1
    registry.resolve("late_module:thread").join()
    assert registry.resolve("late_module:found") == [1]


def test_two_threads_that_import_leave_the_default_dtype_of_the_program(site) -> None:
    outer = """
        import threading
        from lpq import registry
        begun, done = threading.Event(), threading.Event()
        thread = threading.Thread(target=registry.resolve, args=("late_inner:X",))
        thread.start()
        begun.wait(9)
    """
    inner = """
        from sys import modules
        modules["late_outer"].begun.set()
        modules["late_outer"].done.wait(9)
        X = 1
    """
    site.install("late", "1", {}, {"late_outer": outer, "late_inner": inner})
    torch.set_default_dtype(torch.bfloat16)
    try:
        registry.resolve("late_outer:done").set()
        registry.resolve("late_outer:thread").join()
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "skip": "in a rule of a policy it leaves layers alone", "none": "in a quantizer string it means None",
        "True": "in a quantizer string it means True", "inf": "in a quantizer string it means inf",
    }.items(),
)  # fmt: skip
def test_a_word_that_means_something_is_no_name(name: str, words: str) -> None:
    """A rule with a format by the name ``skip`` would leave its layers alone, without a word."""
    for made in (
        registry.FormatSpec(name=name, summary="", quantizer="q:Q", storage="q:S", effective_bits=8),
        registry.RecipeSpec(name="acme", summary="", recipe="mxfp8", aliases=(name,)),
    ):
        plugin = Answers(made)
        with pytest.raises(PluginError, match=rf"'{name}' cannot be a name: {words}. Remedy: use letters"):
            registry.register(plugin, name=made.name)


class Answers:
    """A plugin that registers one spec."""

    def __init__(self, made: registry.FormatSpec | registry.RecipeSpec) -> None:
        self.made = made

    @registry.hookimpl
    def lpq_register_formats(self) -> list[registry.FormatSpec]:
        return [self.made] if isinstance(self.made, registry.FormatSpec) else []

    @registry.hookimpl
    def lpq_register_recipes(self) -> list[registry.RecipeSpec]:
        return [self.made] if isinstance(self.made, registry.RecipeSpec) else []
