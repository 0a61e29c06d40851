"""The host around CUDA kernels, with a driver that is imitated: which device, which code, how many blocks."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lpq import registry
from lpq.kernels import KernelError, cuda, host_to_device, tiles
from lpq.kernels.cuda import CudaKernel
from lpq.kernels.fresh import allocator
from lpq.operations.binding import Encoding
from lpq.operations.line_amaxes import measure_lines


class Driver:
    """Writes down what is launched: the function, the stream, and the device that was the current one."""

    CUdevice = int
    CUlaunchAttributeID = types.SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)
    CUfunction_attribute = types.SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __init__(self) -> None:
        self.current = 0
        self.loaded = 0
        self.launches: list[tuple[int, int, int]] = []
        self.status = 0
        self.loading = threading.Barrier(1)

    def cuKernelSetAttribute(self, *_: object) -> tuple[int]:
        return (0,)

    def CUlaunchAttribute(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(value=types.SimpleNamespace())

    def CUlaunchConfig(self) -> types.SimpleNamespace:
        config = types.SimpleNamespace(hStream=0)
        config.getPtr = lambda: config
        return config

    def launch(self, how: types.SimpleNamespace, function: int, *rest: int | None) -> int:
        self.how = how
        self.launches.append((function, how.hStream, self.current))
        return self.status

    def from_cubin(self, code: bytes) -> Any:
        self.loading.wait(10)  # all that load at once are past the look into what is loaded
        self.loaded += 1
        return types.SimpleNamespace(get_kernel=lambda name, handle=self.loaded: types.SimpleNamespace(handle=handle))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    imitated = Driver()

    @contextlib.contextmanager
    def device(where: int | torch.device) -> Iterator[None]:
        before, imitated.current = imitated.current, getattr(where, "index", where)
        yield
        imitated.current = before

    core = types.SimpleNamespace(
        Device=lambda index: types.SimpleNamespace(set_current=lambda: None),
        ObjectCode=types.SimpleNamespace(from_cubin=imitated.from_cubin),
    )
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setitem(sys.modules, "cuda.bindings", types.SimpleNamespace(driver=imitated))
    monkeypatch.setattr(cuda, "cubin", lambda *_: b"code")
    monkeypatch.setattr(cuda, "_driver_launch", lambda: imitated.launch)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("lpq.torch_private.cuda.current_device", lambda: imitated.current)
    monkeypatch.setattr("lpq.torch_private.cuda.current_stream", lambda index: 700 + index)
    return imitated


def test_a_launch_is_on_the_current_stream_of_its_device_whichever_is_current(driver: Driver) -> None:
    kernel = CudaKernel("common/amax.cu", "amax_parts", "PqP", threads=32)
    for current in (0, 1):
        driver.current = current
        for index in (0, 1):
            kernel.launch(index, (), 1, 0, 0, 0)
            assert driver.launches[-1] == (1 + index, 700 + index, index)
            assert driver.current == current
    assert driver.loaded == 2  # once for each device


def test_threads_that_load_a_kernel_at_once_launch_the_same_code(driver: Driver) -> None:
    """Code that nothing refers to any more may be unloaded while it still runs."""
    driver.loading = threading.Barrier(4)
    kernel = CudaKernel("common/amax.cu", "amax_parts", "PqP", threads=32)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: kernel.launch(0, (), 1, 0, 0, 0), range(4)))
    assert driver.loaded == 4  # they did
    assert len(driver.launches) == 4
    assert len({function for function, *_ in driver.launches}) == 1


def test_a_launch_that_fails_is_an_error_in_words(driver: Driver) -> None:
    """As in a process that was forked after its parent had used the GPU."""
    kernel = CudaKernel("common/amax.cu", "amax_parts", "PqP", threads=32)
    driver.status = 3
    with pytest.raises(KernelError, match=r"launching amax_parts with 2 blocks of 32 threads failed: CUDA error 3"):
        kernel.launch(0, (), 2, 0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "words"), [
        ({"source": "common/gone.cu"}, r"gone\.cu: amax_parts: there is no file .*gone\.cu"),
        ({"arguments": "PqzP*"}, r"'PqzP\*' have \*, z; a letter is one of P, q, i, I, f, d"),
        ({"arguments": "P(q"}, r"the brackets of the arguments 'P\(q' do not enclose"),
        ({"arguments": "P)q("}, "do not enclose"), ({"arguments": "P((q))"}, "do not enclose"),
        ({"arguments": "P()"}, "do not enclose"), ({"threads": 0}, "1 to 1024 threads, and not 0"),
        ({"threads": "256"}, "1 to 1024 threads, and not '256'"), ({"shared": 1.5}, "shared=1.5 is no number of bytes"),
        ({"threads": 2048}, "1 to 1024 threads, and not 2048"), ({"shared": -1}, "shared=-1 is no number of bytes"),
    ], ids=str
)  # fmt: skip
def test_what_cannot_be_launched_is_refused_where_it_is_written(changes: dict[str, Any], words: str) -> None:
    right = {"source": "common/amax.cu", "name": "amax_parts", "arguments": "P(qI)q", "threads": 32}
    CudaKernel(**right)
    with pytest.raises(KernelError, match=words):
        CudaKernel(**(right | changes))


def test_a_launch_with_other_arguments_is_an_error_in_words(driver: Driver) -> None:
    kernel = CudaKernel("common/amax.cu", "amax_parts", "PqP", threads=32)
    for arguments in ((0, 0), (0, 0, 0, 0), (0, 0.5, 0), (0, None, 0)):
        with pytest.raises(KernelError, match=r"amax_parts takes the arguments 'PqP' and was launched with \(0, "):
            kernel.launch(0, (), 1, *arguments)
    for macros in ("FAST=1", ["FAST=1"]):
        with pytest.raises(KernelError, match=r"macros=.*FAST=1.* is no tuple, such as \('FAST=1', 'WIDE'\)"):
            kernel.launch(0, macros, 1, 0, 0, 0)
    assert driver.launches == []


def test_a_launch_without_cuda_core_says_what_to_install(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    kernel = CudaKernel("common/amax.cu", "amax_parts", "PqP", threads=32)
    with pytest.raises(KernelError, match=r'amax\.cu: compiling amax_parts takes cuda-core: pip install "lpq\[cuda\]"'):
        kernel.launch(0, (), 1, 0, 0, 0)


@pytest.mark.parametrize("current", [0, 1])
def test_a_capture_is_noticed_on_the_device_that_is_sent_to(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, current: int
) -> None:
    driver.current = current
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: driver.current == 1)
    devices = [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)]
    assert [host_to_device.captured(device) for device in devices] == [False, False, True]
    assert driver.current == current


def test_what_is_recorded_is_sent_by_a_kernel_or_refused_in_words(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(
        host_to_device, "why_not", lambda spec, quantizers, device: "needs cuda.core, which is not installed"
    )
    registry.refresh()
    words = r"recorded in a CUDA graph here: .*, which needs cuda\.core, .*Call it outside"
    with pytest.raises(RuntimeError, match=words):
        host_to_device.on_device([1, 2], torch.int64, torch.device("cuda", 0))
    registry.refresh()
    monkeypatch.setattr(host_to_device, "why_not", lambda spec, quantizers, device: None)
    monkeypatch.setattr(
        host_to_device, "write_words", lambda numbers, device: (numbers.tolist(), device.index, driver.loaded)
    )
    loaded = driver.loaded
    sent: Any = host_to_device.on_device([1, 2], torch.int64, torch.device("cuda", 0))
    assert sent == ([1, 2], 0, loaded + 1)  # by a kernel that was loaded before
    registry.refresh()


@given(st.integers(0, 2000), st.sampled_from([torch.int64, torch.int32, torch.float32]), st.booleans())
def test_launches_carry_every_number_in_its_place(count: int, dtype: torch.dtype, twofold: bool) -> None:
    """By a kernel that is imitated: each launch writes so many of its words where it is told."""
    launched: list[int] = []

    def launch(self: CudaKernel, device: int, macros: tuple[str, ...], blocks: int, *arguments: float) -> None:
        to, *words, number = struct.unpack(f"<Q{host_to_device.WORDS}qq", self._slots.pack(*arguments))
        ctypes.memmove(to, struct.pack(f"<{number}q", *words[:number]), 8 * number)
        assert words[number:] == [0] * (host_to_device.WORDS - number)
        launched.append(number)

    numbers = torch.randint(-(1 << 31), 1 << 31, (count, 2) if twofold else (count,)).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaKernel, "launch", launch)
        patch.setattr(torch, "empty_like", lambda like, device: torch.full_like(like, -1, device=device))
        sent = host_to_device.write_words(numbers, torch.device("cpu"))
    assert sent.dtype == dtype
    assert torch.equal(sent, numbers)
    words = -(-numbers.nbytes // 8)
    assert sum(launched) == words
    assert len(launched) == -(-words // host_to_device.WORDS)


@pytest.mark.parametrize(
    ("waits", "capability", "overlaps"), [(True, (9, 0), True), (True, (8, 9), False), (False, (9, 0), False)]
)
def test_only_a_kernel_that_waits_is_put_in_place_before_the_last_one_has_ended(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, waits: bool, capability: tuple[int, int], overlaps: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    kernel = CudaKernel("common/amax.cu", "amax_parts", "PqP", threads=32, shared=64, waits=waits)
    kernel.launch(0, (), 5, 0, 0, 0)
    how = driver.how
    assert (how.gridDimX, how.gridDimY, how.gridDimZ) == (5, 1, 1)
    assert (how.blockDimX, how.blockDimY, how.blockDimZ, how.sharedMemBytes) == (32, 1, 1, 64)
    attributes = getattr(how, "attrs", [])
    assert len(attributes) == getattr(how, "numAttrs", 0) == overlaps
    assert all(a.id == 6 and a.value.programmaticStreamSerializationAllowed == 1 for a in attributes)
    kernel.launch(0, (), 7, 0, 0, 0)
    assert driver.how.gridDimX == 7


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The multiprocessors of each GPU."""
    found = [132, 148, 1]

    def properties(index: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(multi_processor_count=found[index])

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    tiles.multiprocessors.cache_clear()
    yield found
    tiles.multiprocessors.cache_clear()


def test_as_many_blocks_look_for_an_amax_as_the_gpu_runs_at_once(
    gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lpq_nvfp4.cuda import bind_rotated_parts

    blocks: list[int] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, device, macros, count, *_: blocks.append(count))
    monkeypatch.setattr(CudaKernel, "bind", lambda self, device, macros, count: lambda *_: blocks.append(count))
    monkeypatch.setattr("lpq_nvfp4.cuda.allocator", lambda device, dispatched: allocator(torch.device("cpu")))
    large, small = torch.empty(2048, 8192), torch.empty(8, 8)
    for index, count in enumerate(gpus):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda self, index=index: index)
        parts = tiles.amax_parts(large, torch.float32)
        e = Encoding(None, None, (2048, 8192), torch.float32, torch.float32, torch.device("cuda", index))
        rotated, plain = bind_rotated_parts(e, True)(large.data_ptr())
        assert plain is not None
        assert (len(parts), len(plain), len(rotated)) == (2 * count, 4 * count, 4 * count)
        assert len(tiles.amax_parts(small, torch.float32)) == 1
        assert len(tiles.amax_parts(large[:0], torch.float32)) == 1
        assert blocks == [2 * count, 4 * count, 1, 1]
        blocks.clear()


def test_amaxes_of_two_operands_are_tensors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps the statistics of one operand keeps nothing of the other; one launch zeroes both."""
    launches: list[tuple[float, ...]] = []

    def bind(self: CudaKernel, device: int, macros: tuple[str, ...], blocks: int) -> Any:
        return lambda *arguments: launches.append((blocks, *arguments))

    monkeypatch.setattr(CudaKernel, "bind", bind)
    x, side = torch.empty(2000, 5), registry.quantizer("fp8(scaling=row)")
    first, second = measure_lines(x, side, side, torch.float32)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert launches[0] == (2, first.data_ptr(), 2000, second.data_ptr(), 5)
    (alone,) = measure_lines(x, None, side, torch.float32)
    assert launches[2] == (1, alone.data_ptr(), 5, alone.data_ptr(), 5)


def test_a_gpu_is_asked_once_how_many_it_has(gpus: list[int]) -> None:
    assert tiles.at_once(1000, 2, 1) == 296
    gpus[1] = 7
    assert tiles.at_once(1000, 2, 1) == 296
    assert tiles.at_once(100, 2, 1) == 100
