"""Kernels in CUDA C++, of any plugin, compiled at first use and launched on torch's current stream.

A plugin writes a ``.cu`` file with an ``extern "C" __global__`` function, makes a ``CudaKernel`` of it once, and calls
``launch`` from the callable that its ``KernelSpec`` (``backend="cuda"``, ``requires=("cuda.core",)``) names. The page
on writing a plugin has an example.

Each set of macros is compiled once for an architecture. A macro needs a name of its own: the compiler's headers use
short ones such as ``T``. A file beside the source or in ``csrc/common`` can be included, by its name or by a macro
of the launch. A launch waits for nothing, and can be captured in a CUDA graph once its kernel was launched before, or
made ``ready``.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import threading
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch

from lpq import registry
from lpq.kernels import native
from lpq.kernels.errors import KernelError
from lpq.kernels.nvrtc_cache import compiler_version, compiles_for, csrc, cubin
from lpq.torch_private import cuda as torch_cuda

NEEDED = "cuda.core"
"""The module that the ``KernelSpec`` of such a kernel requires."""
INSTALL = 'pip install "lpq[cuda]"'
"""The command that installs it."""
SLOTS = {"P": "Q", "q": "q", "i": "i4x", "I": "I4x", "f": "f4x", "d": "d"}
"""The letters of parameters, and how an argument lies in its 8 bytes, in the notation of ``struct``: ``P`` is a
pointer, ``q`` a ``long long``, ``i`` an ``int``, ``I`` an ``unsigned int``, ``f`` a ``float``, ``d`` a ``double``."""
MOST_THREADS = 1024
"""The most threads of a block, on every GPU."""
SUCCESS, NO_CONTEXT = 0, 201
HOPPER = (9, 0)
"""The first compute capability whose kernels may follow each other without a gap."""


class CudaKernel:
    """One function of a CUDA C++ source."""

    def __init__(
        self, source: str | Path, name: str, arguments: str, *, threads: int, shared: int = 0, waits: bool = False
    ) -> None:
        """``source`` may be relative to lpq's ``csrc``; ``arguments`` has a letter of ``SLOTS`` for each parameter.
        Letters in brackets are the fields of one, a struct of 8 bytes for each field.

        ``shared`` is the size in bytes of the dynamic shared memory of a block. ``waits`` means that the kernel begins
        with ``wait_for_the_one_before()`` of ``order.cuh``: from Hopper on it is then put in place while the kernel
        before it ends, which saves a microsecond or two.
        """
        self.source = csrc() / source
        self.name = name
        _check(f"{self.source.name}: {name}", self.source, arguments, threads, shared)
        self.threads = threads
        self.shared = shared
        self.waits = waits
        self.letters = arguments
        self._slots = struct.Struct("<" + "".join(SLOTS[a] for a in arguments if a not in "()"))
        self._places = _places(arguments)
        self._launches: dict[tuple[int, tuple[str, ...]], Launch] = {}

    def launch(self, device: int, macros: tuple[str, ...], blocks: int, *arguments: float) -> None:
        """Run ``blocks`` blocks of threads on a device; none if there are no blocks. Pointers are integers."""
        if blocks == 0:
            return
        if type(macros) is not tuple:
            raise KernelError(f"{self.source.name}: macros={macros!r} is no tuple, such as ('FAST=1', 'WIDE')")
        launch = self._launches.get((device, macros)) or self._load(device, macros)
        try:
            launch(*arguments, blocks=blocks)
        except struct.error as error:
            raise KernelError(
                f"{self.source.name}: {self.name} takes the arguments {self.letters!r} and was launched with "
                f"{arguments}: {error}"
            ) from error

    def bind(self, device: int, macros: tuple[str, ...], blocks: int) -> Callable[..., None]:
        """Prepare a launch of ``blocks`` blocks once; each call of the result passes the arguments only. The kernel is
        compiled and loaded here.
        """
        if blocks == 0:
            return lambda *arguments: None
        launch = self._launches.get((device, macros)) or self._load(device, macros)
        return Launch(self, launch.loaded, device, blocks).in_c()

    def ready(self, device: int) -> None:
        """Compile and load it now, without macros, for launches that a CUDA graph will record."""
        if (device, ()) not in self._launches:
            self._load(device, ())

    def _load(self, device: int, macros: tuple[str, ...]) -> Launch:
        try:
            from cuda.core import Device, ObjectCode
        except ImportError as error:
            raise KernelError(
                f"{self.source.name}: compiling {self.name} takes cuda-core: {INSTALL}. A KernelSpec "
                f"with requires=({NEEDED!r},) is passed over where that is missing"
            ) from error
        with torch.cuda.device(device):
            Device(device).set_current()
            code = ObjectCode.from_cubin(cubin(self.source, macros, architecture(device)))
            overlaps = self.waits and torch.cuda.get_device_capability(device) >= HOPPER
            loaded = _Loaded(code.get_kernel(self.name), overlaps)
            loaded.allow_shared(self.shared, device)
            launch = Launch(self, loaded, device, 0)
        return self._launches.setdefault((device, macros), launch)  # one for all threads: code may go with its object


class Launch:
    """A launch that is the same each time, but for its arguments and maybe its blocks. Threads take turns."""

    def __init__(self, kernel: CudaKernel, loaded: _Loaded, device: int, blocks: int) -> None:
        how = _How(kernel, loaded.overlaps)
        how.config.gridDimX = blocks
        self.loaded, self._kernel, self._how, self._device = loaded, kernel, how, device
        self._pack, self._bytes = kernel._slots.pack_into, how.arguments.bytes
        self._run = functools.partial(_driver_launch(), how.config.getPtr(), loaded.function)
        self._pointers = how.arguments.pointers
        self._turn = threading.Lock()

    def in_c(self) -> Callable[..., None]:
        """Return the same launch as a call from C, if that is possible; errors are raised here."""
        driver = native.address_of(_driver_launch())
        if driver is None or (calls := native.calls()) is None:
            return self
        letters = "".join(a for a in self._kernel.letters if a not in "()")
        first = bytes(place // 8 for place in self._kernel._places)
        made: Callable[..., None] = calls.Launch(
            driver, self._how.config.getPtr(), self.loaded.function, letters, first, self._device,
            torch_cuda.current_device, torch_cuda.current_stream, self,
        )  # fmt: skip
        return made

    def __call__(self, *arguments: float, blocks: int | None = None) -> None:
        """Launch it on the current stream of its device. Pointers are integers."""
        if torch_cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self(*arguments, blocks=blocks)
        stream = torch_cuda.current_stream(self._device)
        with self._turn:
            self._pack(self._bytes, 0, *arguments)
            if blocks is not None:
                self._how.config.gridDimX = blocks
            if stream != self._how.stream:  # to set it takes half a microsecond
                self._how.config.hStream = self._how.stream = stream
            status = self._run(self._pointers, None)
            if status == NO_CONTEXT:  # torch has not used the device in this thread yet
                from cuda.core import Device

                Device(self._device).set_current()
                status = self._run(self._pointers, None)
        if status != SUCCESS:
            of = self._kernel
            raise KernelError(
                f"{of.source.name}: launching {of.name} with {self._how.config.gridDimX} blocks of {of.threads} "
                f"threads failed: CUDA error {status}"
            )
        return None


@functools.cache
def _driver_launch() -> Callable[..., int]:
    """Return the driver's own launch, which takes the host less time than the bindings: these inspect each argument."""
    call: Any = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    call.argtypes, call.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    return cast("Callable[..., int]", call)


class _Loaded:
    """A kernel on a device, ready to be launched by the driver's own call."""

    def __init__(self, kernel: Any, overlaps: bool) -> None:
        self.kernel = kernel  # keeps the code loaded
        self.function = int(kernel.handle)
        self.overlaps = overlaps

    def allow_shared(self, size: int, device: int) -> None:
        """Allow blocks this much dynamic shared memory, as is needed above 48 KiB."""
        from cuda.bindings import driver

        wanted = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(wanted, size, self.kernel.handle, driver.CUdevice(device))
        if status != SUCCESS:
            raise KernelError(f"{size} bytes of shared memory for a block are more than this GPU has: {status!r}")


class _How:
    """How a kernel is launched: all that stays the same is filled in once."""

    def __init__(self, of: CudaKernel, overlaps: bool) -> None:
        from cuda.bindings import driver

        self.arguments = _Arguments(of._slots.size, of._places)
        self.stream = 0
        self.config = driver.CUlaunchConfig()
        self.config.gridDimY = self.config.gridDimZ = 1
        self.config.blockDimX, self.config.blockDimY, self.config.blockDimZ = of.threads, 1, 1
        self.config.sharedMemBytes = of.shared
        if overlaps:
            overlap = driver.CUlaunchAttribute()
            overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            self.config.attrs, self.config.numAttrs = [overlap], 1


class _Arguments:
    """The arguments of a launch in the driver's form: an address for each parameter."""

    def __init__(self, size: int, places: tuple[int, ...]) -> None:
        self.bytes = ctypes.create_string_buffer(size)
        start = ctypes.addressof(self.bytes)
        self.array = (ctypes.c_void_p * len(places))(*(start + place for place in places))
        self.pointers = ctypes.addressof(self.array)


def _check(what: str, source: Path, letters: str, threads: int, shared: int) -> None:
    """Raise, where a kernel is defined, for faults that would fail at its first launch, or read wrong memory."""
    if not source.is_file():
        raise KernelError(f"{what}: there is no file {source}")
    if unknown := sorted(set(letters) - {*SLOTS, "(", ")"}):
        raise KernelError(
            f"{what}: the arguments {letters!r} have {', '.join(unknown)}; a letter is one of {', '.join(SLOTS)}"
        )
    brackets = "".join(letter for letter in letters if letter in "()")
    if brackets.replace("()", "") or "()" in letters:
        raise KernelError(f"{what}: the brackets of the arguments {letters!r} do not enclose the fields of structs")
    if not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
        raise KernelError(f"{what}: a block has 1 to {MOST_THREADS} threads, and not {threads!r}")
    if not isinstance(shared, int) or shared < 0:
        raise KernelError(f"{what}: shared={shared!r} is no number of bytes")


def _places(arguments: str) -> tuple[int, ...]:
    """Where each parameter begins among the packed arguments, in bytes; a struct is one parameter."""
    sizes = [8 * len(fields or letter) for fields, letter in re.findall(r"\((\w+)\)|(\w)", arguments)]
    return tuple(accumulate(sizes, initial=0))[:-1]


@registry.cached
def why_not(device: torch.device) -> str | None:
    """Why no kernel of this kind can run on a GPU: NVRTC is missing, or does not support the GPU. None: kernels can
    run."""
    try:
        version = compiler_version()
    except KernelError as error:
        return str(error).partition("\n")[0]  # the rest is a library's, and every kernel prints this
    major, minor = torch.cuda.get_device_capability(device)
    if compiles_for(10 * major + minor):
        return None
    return (
        f"NVRTC, which compiles the CUDA kernels, is of CUDA {version} and compiles nothing for compute "
        f"capability {major}.{minor}: install a newer one"
    )


def architecture(device: int) -> str:
    """The architecture to compile for; from Hopper on with the instructions that only this GPU has."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if (major, minor) >= HOPPER else ''}"
