"""Launches and products from C do what those in Python do, with a driver and a library that are imitated."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import forking
import pytest

from lpq.kernels import native
from lpq.kernels.code_cache import KernelCacheWarning
from lpq.kernels.cuda import SLOTS, _places

pytestmark = pytest.mark.starts
INF = float("inf")


class Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (("sizes", ctypes.c_uint * 7), ("stream", c_void_p), ("attributes", c_void_p), ("count", ctypes.c_uint))


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LPQ_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        native._made.cache_clear()
        found, why = native.calls(), native.why_not()
        if found is None:
            pytest.skip(f"{why}")
        assert native.address_of(lambda: 0) is None
        yield found
    native._made.cache_clear()


class Driver:
    """Writes down what it is told: sizes, stream, attributes, the function and the bytes of each parameter."""

    def __init__(self, letters: str) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.status, self.streams, self.device, self.slowly = 0, {0: 0x1111, 1: 1 << 63}, 1, []  # type: ignore[var-annotated]
        self.places = _places(letters)
        size = 8 * sum(a not in "()" for a in letters)
        ends = [*self.places[1:], size]

        @ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_void_p)
        def launch(config: int, function: int, parameters: int, extra: int | None) -> int:
            how = Config.from_address(config)
            at = (c_void_p * len(self.places)).from_address(parameters)
            raw = b"".join(
                ctypes.string_at(a, end - place) for a, place, end in zip(at, self.places, ends, strict=True)
            )
            self.told.append(([*how.sizes], how.stream, how.attributes, how.count, function, raw, extra))
            return self.status

        self.launch = launch
        self.config = Config((7, 1, 1, 256, 1, 1, 1024), 5, 0xABC0, 1)

    def bound(self, calls: Any, letters: str) -> Any:
        plain = "".join(a for a in letters if a not in "()")
        first = bytes(place // 8 for place in self.places)
        return calls.Launch(
            native.address_of(self.launch), ctypes.addressof(self.config), 0xF00, plain, first, 1,
            lambda: self.device, self.streams.__getitem__, lambda *arguments: self.slowly.append(arguments),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("letters", "arguments"), [
        ("PqifdI", (2**64 - 1, -(2**63), -(2**31), 0.1, -0.1, 2**32 - 1)), ("P(PPf)I", (1, 0, 3, INF, True)),
        ("(PPPqfI)(PPPqfI)(PPPqfI)", (1, 2, 3, 4, 3.4028234663852886e38, False) * 3), ("f", (3,)),
        ("q" * 60, tuple(range(-30, 30))),
    ]
)  # fmt: skip
def test_a_launch_packs_its_arguments_as_struct_does(letters: str, arguments: tuple[float, ...], calls: Any) -> None:
    driver = Driver(letters)
    driver.bound(calls, letters)(*arguments)
    packed = struct.pack("<" + "".join(SLOTS[a] for a in letters if a not in "()"), *arguments)
    assert driver.told == [([7, 1, 1, 256, 1, 1, 1024], 1 << 63, 0xABC0, 1, 0xF00, packed, None)]
    assert driver.slowly == []


@pytest.mark.parametrize(
    "arguments",
    [(1, 2), (1, 2, 3, 4), (-1, 2, 3), (1, 2**63, 3), (1, 2, 2**32), (1, 2, -1), (1.5, 2, 3), ("1", 2, 3)],
    ids=str,
)
def test_arguments_that_do_not_fit_are_left_to_python_which_has_words(arguments: tuple[Any, ...], calls: Any) -> None:
    driver = Driver("PqI")
    driver.bound(calls, "PqI")(*arguments)
    assert (driver.told, driver.slowly) == ([], [arguments])


def test_another_device_and_a_status_are_left_to_python(calls: Any) -> None:
    driver = Driver("Pf")
    launch = driver.bound(calls, "Pf")
    launch(1, 1e39)  # no float
    driver.device = 0
    launch(1, 2.0)
    driver.device, driver.status = 1, 201
    launch(1, 3.0)
    assert driver.slowly == [(1, 1e39), (1, 2.0), (1, 3.0)]
    assert len(driver.told) == 1


def test_no_code_of_python_runs_once_an_argument_is_refused(calls: Any) -> None:
    """An exception waits then, and Python's code takes none."""
    ran: list[str] = []

    class Number:
        def __index__(self) -> int:
            ran.append("here")
            return 2

    driver, number = Driver("PqI"), Number()
    launch = driver.bound(calls, "PqI")
    launch("1", number, 3)
    assert (driver.told, driver.slowly, ran) == ([], [("1", number, 3)], [])
    launch(1, number, 3)
    assert (len(driver.told), ran) == (1, ["here"])


def test_a_device_that_is_no_number_is_refused(calls: Any) -> None:
    with pytest.raises(TypeError, match="integer"):
        calls.Launch(1, ctypes.addressof(Config()), 1, "", b"", "cuda", *[lambda: 0] * 3)


@pytest.mark.parametrize("scaled", [True, False])
def test_a_product_sets_what_changes_and_multiplies(scaled: bool, calls: Any) -> None:
    """In threads that share it, too: nobody's scales come into another's product."""
    attributes: dict[int, int] = {}
    told: list[tuple[Any, ...]] = []
    inside = threading.Lock()

    @ctypes.CFUNCTYPE(c_int, c_void_p, c_int, c_void_p, c_size_t)
    def set_attribute(description: int, attribute: int, value: int, size: int) -> int:
        assert (description, size) == (0xD, 8)
        attributes[attribute] = c_void_p.from_address(value).value or 0
        return 0

    @ctypes.CFUNCTYPE(c_int, *[c_void_p] * 14, c_size_t, c_void_p)
    def matmul(*given: int | None) -> int:
        assert inside.acquire(blocking=False)
        alpha, beta = given[2] or 0, given[7] or 0
        factors = [ctypes.c_float.from_address(a).value for a in (alpha, beta)] if scaled else [alpha, beta]
        told.append((*given[:2], *factors, *given[3:7], *given[8:], dict(attributes)))
        inside.release()
        return 7 if given[3] == 0xBAD else 0

    run = calls.Product(
        native.address_of(matmul), native.address_of(set_attribute), 0xA, 0xD, 0x1, 0x2, 0x3, 0xE, 4096,
        17 if scaled else 0, 18, 8, 1, {1: 0x5}.__getitem__,
    )  # fmt: skip
    with ThreadPoolExecutor(4) as pool:
        assert not any(
            pool.map(lambda i: run(0x100 + i, 0x200 + i, 0x300 + i, 0x400 + i, 0x500 + i, 0x600 + i), range(40))
        )
    assert len(told) == 40
    for one in told:
        i = (one[6] or 0) - 0x100
        factors = (1.0, 0.0) if scaled else (0x300 + i, 0x304 + i)
        changed = {17: 0x400 + i, 18: 0x300 + i} if scaled else {8: 0x400 + i}
        out = (0x500 + i, 0x3, 0x500 + i, 0x3, 0xE, 0x600 + i, 4096, 0x5)
        assert one == (0xA, 0xD, *factors, 0x200 + i, 0x1, 0x100 + i, 0x2, *out, changed)
    assert run(1, 0xBAD, 3, 4, 5, 6) == 7
    with pytest.raises(TypeError, match="takes 6 addresses"):
        run(1, 2, 3)


def test_without_a_compiler_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no such luck >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("LPQ_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(broken))
    native._made.cache_clear()
    assert native.calls() is None
    assert "no such luck" in str(native.why_not())
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    native._made.cache_clear()
    assert native.why_not() == "there is no C compiler"
    native._made.cache_clear()


def test_a_debug_build_of_python_has_a_library_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have the same version to the letter, and its library has symbols that the usual Python lacks."""
    names: list[str] = []

    def asked(name: str, compile: Callable[[], bytes]) -> None:
        names.append(name)
        raise OSError

    monkeypatch.setattr(native.code_cache, "compiled", asked)
    for abi in ("cpython-311-x86_64", "cpython-311d-x86_64", "cpython-311-x86_64"):
        monkeypatch.setattr(native.sysconfig, "get_config_var", {"SOABI": abi}.get)
        native._made.cache_clear()
        native.calls()
    native._made.cache_clear()
    if not names:
        pytest.skip(f"{native.lacking()}")
    assert names[0] == names[2] != names[1]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda library: b"",
    "cut off behind a page": lambda library: library[:4096],
    "cut off before the last page": lambda library: library[:-4096],
    "zeros inside": lambda library: library[:4096] + bytes(4096) + library[8192:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_library_that_is_damaged_is_made_anew(
    damage: str, calls: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a full disk or a power failure leaves it: to load it would end each process of the user, by a signal."""
    (good,) = Path(os.environ["LPQ_CACHE_DIR"]).iterdir()
    damaged = tmp_path / good.name
    damaged.write_bytes(DAMAGES[damage](good.read_bytes()))
    monkeypatch.setenv("LPQ_CACHE_DIR", str(tmp_path))
    ended = forking.python("from lpq.kernels import native; native._made.cache_clear(); print(native.why_not())")
    assert (ended.status, ended.out) == (0, "None\n")
    assert damaged.read_bytes() == good.read_bytes()


def test_a_library_that_cannot_be_kept_is_made_for_this_process(
    calls: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LPQ_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    native._made.cache_clear()
    with pytest.warns(KernelCacheWarning, match="can be written by others"):
        assert native.calls() is not None
    assert not list(tmp_path.iterdir())
    native._made.cache_clear()
