"""Plugins that load and go wrong later: in a kernel, in a class of a format, in the conversion of a module."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import lpq
from lpq import registry
from lpq.kernels import KernelError, choose
from lpq.registry import FormatSpec, KernelSpec, RecipeSpec, hookimpl
from lpq.registry.errors import ImportStringError, PluginError

CPU = torch.device("cpu")
KERNELS = """
    from lpq.registry import KernelSpec, hookimpl

    VALUE = 7

    def run(operand, dtype):
        return operand

    def raises(quantizer):
        raise ZeroDivisionError("oops")

    @hookimpl
    def lpq_register_kernels():
        common = dict(op="decode", formats=("base",), backend="torch", device="cpu")
        return [KernelSpec(**common, **fields) for fields in (FIELDS)]
"""
FAULTS = {
    "impl='acme_gone:run'": "'acme_gone:run' cannot be imported: ModuleNotFoundError: No module named 'acme_gone'",
    "impl='acme_plugin:gone'": "'acme_plugin:gone' cannot be imported: AttributeError",
    "impl='acme_exits:run'": "'acme_exits:run' cannot be imported: SystemExit: bye",
    "impl='no colon'": "'no colon' is not an import string",
    "impl='acme.plugin.run'": "'acme.plugin.run' is not an import string: write it as 'acme.plugin:run'",
    "impl='acme_plugin:VALUE'": "'acme_plugin:VALUE' is 7, which cannot be called",
    "impl='acme_plugin:run', why_not='acme_gone:f'": "'acme_gone:f' cannot be imported",
    "impl='acme_plugin:run', why_not='acme_plugin:raises'": "'acme_plugin:run' serves this raised ZeroDivisionError",
    "impl='acme_plugin:run', requires=('acme_bad.part',)": "'acme_plugin:run' serves this raised RuntimeError: bad",
}
GOOD = "dict(impl='acme_plugin:run', priority=-1),"


def install_kernels(site, fields: str) -> None:
    modules = {
        "acme_plugin": KERNELS.replace("FIELDS", fields),
        "acme_exits": "raise SystemExit('bye')",
        "acme_bad": "raise RuntimeError('bad')",
    }
    site.install("acme-formats", "1.2", {"acme": "acme_plugin"}, modules)


@pytest.mark.parametrize("fields", FAULTS)
def test_a_kernel_at_fault_is_passed_over(site, monkeypatch: pytest.MonkeyPatch, fields: str) -> None:
    monkeypatch.delenv("LPQ_KERNELS", raising=False)
    install_kernels(site, f"dict({fields}), {GOOD}")
    choice = choose("decode", ("base",), CPU)
    assert (choice.backend, choice.impl.__name__) == ("torch", "run")
    ((kernel, reason),) = choice.rejected
    assert choice.broken == (kernel,)
    assert reason.startswith("plugin acme (acme-formats 1.2) is at fault: ")
    assert FAULTS[fields] in reason


@pytest.mark.parametrize("fields", FAULTS)
def test_the_reference_serves_unless_it_is_excluded(site, monkeypatch: pytest.MonkeyPatch, fields: str) -> None:
    install_kernels(site, f"dict({fields}),")
    monkeypatch.delenv("LPQ_KERNELS", raising=False)
    choice = choose("decode", ("base",), CPU)
    assert (choice.backend, choice.impl, len(choice.rejected)) == ("reference", None, 1)
    monkeypatch.setenv("LPQ_KERNELS", "torch")
    with pytest.raises(KernelError, match="leaves no kernel for decode of base on cpu") as caught:
        choose("decode", ("base",), CPU)
    assert "plugin acme (acme-formats 1.2) is at fault: " in str(caught.value)
    assert FAULTS[fields] in str(caught.value)


def test_a_kernel_for_another_device_is_not_imported(site) -> None:
    install_kernels(site, "dict(impl='acme_exits:run'),")
    choice = choose("decode", ("base",), torch.device("meta"))
    ((_, reason),) = choice.rejected
    assert (reason, choice.broken) == ("runs on cpu, not on meta", ())


@pytest.mark.parametrize(
    ("role", "value", "words"),
    [
        ("quantizer", "json:loads", "has quantizer='json:loads', which is no class but <function loads"),
        ("quantizer", "json:JSONDecoder", "which is no dataclass with from_options"),
        ("storage", "json:loads", "has storage='json:loads', which is no class but <function loads"),
    ],
)
def test_a_class_that_is_none(site, role: str, value: str, words: str) -> None:
    source = site.format("acme").replace(f"acme_quantizer:Fake{role.title()}", value)
    site.install("acme-formats", "1.2", {"acme": "acme_plugin"}, {"acme_plugin": source})
    lookup = functools.partial(getattr(registry, f"{role}_class"), "acme")
    with pytest.raises(PluginError, match=r"plugin acme \(acme-formats 1\.2\) cannot be used: format acme") as caught:
        lookup()
    assert words in caught.value.cause
    assert role in caught.value.remedy.lower()
    assert registry.quantizer("base").margin == 0


@pytest.mark.parametrize(
    ("string", "cause"),
    [
        ("acme_p.formt:Fp6Storage", "No module named 'acme_p.formt' (did you mean 'acme_p.format'?)"),
        ("acme_p.format:FP6Storage", "has no attribute 'FP6Storage' (did you mean 'Fp6Storage'?)"),
        ("acme_p.format.Fp6Storage", "is not an import string: write it as 'acme_p.format:Fp6Storage'"),
        ("acme_q.format:Fp6Storage", "module acme_q, which is not installed (did you mean 'acme_p'?)"),
        ("acme_p.format:Zebra", "has no attribute 'Zebra'"),
    ],
)
def test_a_near_name_is_told_to_its_author(site, string: str, cause: str) -> None:
    modules = {"acme_p.__init__": site.format("acme").replace("acme_quantizer:FakeStorage", string)}
    modules["acme_p.format"] = "class Fp6Storage: ..."
    site.install("acme-formats", "1.2", {"acme": "acme_p"}, modules)
    with pytest.raises(PluginError) as caught:
        registry.storage_class("acme")
    assert caught.value.cause.endswith(cause)
    other = "acme_q" if "acme_q" in string else "--upgrade acme-formats, or report it to its authors"
    assert caught.value.remedy == f"correct it if it is yours; otherwise pip install {other}"


@pytest.mark.parametrize(
    ("fields", "cause", "remedy"),
    [
        ("holds='code'", "part weight has holds='code'", "write one of codes, scales, exponents, value"),
        ("shape=(1, 2)", "part weight has shape=(1, 2)", "write a function"),
        ("readers=['vLLM']", "scheme ACME has readers=['vLLM']", "write a tuple, as (x,), in which each x is a text"),
        ("config=None", "scheme ACME has config=None", "write a mapping"),
        ("", None, None),
    ],
)
def test_a_scheme_with_a_field_of_another_type(site, fields: str, cause: str | None, remedy: str | None) -> None:
    source = f"""
        from dataclasses import replace
        from lpq.registry import Part, Scheme

        def call(*arguments): ...

        part = Part(name="weight", dtype=None, shape=call, holds="codes")
        scheme = Scheme(
            layout="acme", title="ACME", serves=call, quantizer="acme", config={{}}, parts=(), write=call, read=call
        )
        if "{fields.partition("=")[0]}" in ("holds", "shape"):
            part = replace(part, {fields})
        else:
            scheme = replace(scheme, {fields})
        SCHEMES = (replace(scheme, parts=(part,)),)
    """
    spec = site.format("acme").replace('FakeStorage"', "FakeStorage\", schemes='acme_schemes:SCHEMES'")
    site.install("acme-formats", "1.2", {"acme": "acme_plugin"}, {"acme_plugin": spec, "acme_schemes": source})
    if cause is None:
        assert registry.schemes("acme")[0].title == "ACME"
        return
    with pytest.raises(PluginError, match="plugin acme") as caught:
        registry.schemes("acme")
    assert (caught.value.cause, caught.value.remedy) == (cause, remedy)


def test_a_place_is_told_where_it_is_the_plugins_own(site) -> None:
    """Not that of the registry's import, or of Python's."""
    sources = {
        "acme_gone:Q": None,
        "acme_plugin:gone": None,
        "acme_raises:Q": "(acme_raises.py, line 2)",
        "acme_imports:Q": "(acme_imports.py, line 1)",
    }
    modules = {"acme_raises": "x = 0\n1 / x\n", "acme_imports": "import acme_gone\n"}
    modules["acme_plugin"] = site.format("acme")
    site.install("acme-formats", "1.2", {"acme": "acme_plugin"}, modules)
    for string, place in sources.items():
        with pytest.raises(ImportStringError) as caught:
            registry.resolve(string)
        assert (", line " in str(caught.value)) == (place is not None)
        assert str(caught.value).endswith(place or "")


CONVERTS = """
    import functools
    from lpq.registry import hookimpl

    def decorator(function):
        @functools.wraps(function)
        def inner(*args):
            return function(*args)
        return inner

    @hookimpl
    @decorator
    def lpq_convert_module(module, fqn):
        if module == "NAME":
            return {}["key"]
        return "by NAME" if module == "for NAME" else None
"""


@pytest.mark.parametrize("decorated", [True, False])
def test_a_conversion_that_raises_names_its_plugin(site, decorated: bool) -> None:
    for name in ("first", "second", "third"):
        source = CONVERTS.replace("NAME", name).replace("" if decorated else "    @decorator\n", "")
        site.install(f"{name}-dist", "3.1", {name: f"{name}_plugin"}, {f"{name}_plugin": source})
    for name in ("first", "second", "third"):
        with pytest.raises(PluginError) as caught:
            registry.convert_module(name, "block.0", "recipe")
        error = caught.value
        assert (error.plugin, error.distribution, error.version) == (name, f"{name}-dist", "3.1")
        lines = (site.path / f"{name}_plugin.py").read_text().splitlines()
        line = next(number for number, text in enumerate(lines, 1) if '["key"]' in text)
        where = f"({name}_plugin.py, line {line})"
        assert error.cause == f"its lpq_convert_module raised KeyError: 'key' {where}, for the module 'block.0' (str)"
        assert isinstance(error.__cause__, KeyError)
        assert registry.convert_module(f"for {name}", "block.0", "recipe") == f"by {name}"
    assert registry.convert_module("linear", "block.0", "recipe") is None
    with pytest.raises(PluginError, match="for the model itself"):
        registry.convert_module("first", "", "recipe")


def test_a_plugin_around_a_conversion_is_not_blamed_for_it(site) -> None:
    around = types.ModuleType("around")
    exec(
        "from lpq.registry import hookimpl\n@hookimpl(wrapper=True)\ndef lpq_convert_module(module):\n"
        "    found = yield\n    return 1 // 0 if module == 'zero' else found\n",
        around.__dict__,
    )
    source = CONVERTS.replace("NAME", "first")
    site.install("first-dist", "3.1", {"first": "first_plugin"}, {"first_plugin": source})
    registry.register(around, name="around")
    for module, culprit in (("first", "first"), ("zero", "around")):
        with pytest.raises(PluginError) as caught:
            registry.convert_module(module, "block.0", "recipe")
        assert caught.value.plugin == culprit


def test_kernels_in_a_list_are_taken(register) -> None:
    kernel = KernelSpec.triton("decode", "acme:run", formats=("acme",))
    strings = {"quantizer": "acme:Q", "storage": "acme:S"}
    spec = FormatSpec(name="acme", summary="", **strings, effective_bits=8, kernels=[kernel])
    plugin = types.SimpleNamespace(lpq_register_formats=hookimpl(lambda: spec))
    register(plugin, name="acme")
    assert registry.kernels("decode", ("acme",)) == (kernel,)


@pytest.mark.parametrize("recipe", [lpq.recipe("mxfp8"), lpq.quantizer("mxfp8"), Path("careful.toml")], ids=str)
def test_a_recipe_is_anything_that_lpq_takes_for_one(recipe, register, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "careful.toml").write_text("fprop = 'mxfp8'\ndgrad = 'mxfp8'\nwgrad = 'mxfp8'\n")

    class Careful(RecipeSpec):
        """A spec with something of its author's own."""

        version: ClassVar[str] = "1"

    spec = Careful(name="acme", summary="", recipe=recipe)
    register(types.SimpleNamespace(lpq_register_recipes=hookimpl(lambda: spec)), name="acme")
    assert lpq.recipe("acme").products == lpq.recipe("mxfp8").products
    with pytest.raises(ImportStringError, match="is not an import string"):
        registry.resolve(int)
