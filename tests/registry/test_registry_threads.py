"""Threads that look up and register at once: each answer is of before or after, and nothing is lost."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from lpq import registry
from lpq.registry import FormatSpec, KernelSpec, PluginError
from lpq.registry.errors import UnknownFormat


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
    """Though the registry is made on first use, which is that of all of them."""
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
