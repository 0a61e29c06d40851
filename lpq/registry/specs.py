"""The specs by which a plugin describes itself: frozen data, with import strings in place of imports.

Listing formats must need neither torch nor a GPU, so nothing here refers to a tensor. An import string is
``"package.module:attribute"``; it is imported when its format, recipe or kernel is first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from lpq.registry.operations import TABLE
from lpq.registry.plugin_faults import ImportString, Positive

API_VERSION = 2
"""The version of the plugin interface. A plugin written for a later one is refused, in words."""
OLDEST_API_VERSION = 1
"""The earliest version that is still understood. A format of version 1 that declares a rotation by a name is refused
when it is looked up, with the new declaration in the message."""
INT64_COUNTS = 2
"""The version from which on counts are int64 tensors. Counts of a format of version 1 are in fp32; the core converts
them where they are measured and where they are handed back, so that ranks sum integers."""
OPERATIONS = tuple(TABLE)
"""The values that ``KernelSpec.op`` may have."""
BACKENDS = ("torch", "triton", "cuda")
"""The values that ``KernelSpec.backend`` may have."""
ANY = "*"
"""In place of the name of a format in ``KernelSpec.formats``, of both operands: whichever it is."""


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One faster implementation of one operation, for some format on some hardware.

    ``impl`` must equal the format's reference bit for bit (a product: up to the order of its sums).
    """

    op: str
    """The operation it serves, by its name in ``lpq.registry.operations.TABLE``."""
    impl: ImportString
    """Import string of the callable. ``lpq.operations.kernel_protocols`` has its Protocol for each operation; where the
    operation has a reference, it has the signature of that."""
    bind: ImportString | None = None
    """Import string of a function that makes all decisions for a shape once, for an operation that has a Protocol for
    it. A layer calls the returned function in place of ``impl``. None: it calls ``impl``, or the reference where there
    is a ``bind`` that returns None."""
    several: ImportString | None = None
    """Import string of a function that binds the kernel to several matrices, which then take one launch, for an
    operation that has a Protocol for it. None: each matrix has a launch of its own."""
    backend: str
    """The backend that runs it: ``torch``, ``triton`` or ``cuda``. ``LPQ_KERNELS`` names backends."""
    formats: tuple[str, ...] = ()
    """The format it serves; for ``gemm`` the formats of both operands, for ``measure`` and ``quantize`` one or two, the
    row operand's and the column operand's, ``(ANY, ANY)`` for any two. Empty: the format that lists it."""
    device: str = "cuda"
    """The type of the device it runs on."""
    min_sm: int | None = None
    """The least compute capability of an NVIDIA GPU, as ``90`` for 9.0; None: any. On AMD's GPUs whatever names one, or
    a greatest one, is passed over, and so is all of backend ``cuda``; Triton kernels are not."""
    max_sm: int | None = None
    """The greatest compute capability of an NVIDIA GPU; None: any."""
    requires: tuple[str, ...] = ()
    """Modules that must be importable, as ``("triton",)``. ``cuda.core`` stands for all that ``lpq.kernels.cuda``
    needs, with it for NVRTC, which must support the GPU."""
    priority: int = 0
    """Among usable kernels, the kernel with the highest priority runs. The reference has the lowest of all."""
    why_not: ImportString | None = None
    """Import string of ``f(*quantizers) -> str | None``: why these options are not served; None: they are. A GPU in
    question is the current one meanwhile."""
    rounds: bool = False
    """For ``measure`` and ``quantize``: it also takes ``dtype=``, to which it rounds a matrix in fp32 as it reads it. A
    weight with shards in fp32 that is multiplied in bf16 then needs no copy."""
    note: str = ""
    """A remark for users, as that it never ran on hardware: ``lpq doctor`` shows it."""
    api_version: int = API_VERSION
    """The interface version that the plugin was written for."""

    @classmethod
    def cuda(cls, op: str, impl: str, **others: Any) -> Self:
        """A kernel in CUDA C++, which ``lpq.kernels.cuda`` compiles: preferred, from compute capability 8.0 on."""
        usual: dict[str, Any] = {"backend": "cuda", "min_sm": 80, "requires": ("cuda.core",), "priority": 20}
        return cls(op=op, impl=impl, **(usual | others))

    @classmethod
    def triton(cls, op: str, impl: str, **others: Any) -> Self:
        """A kernel in Triton, which comes after kernels in CUDA C++, from compute capability 7.5 on and on AMD's
        GPUs."""
        usual: dict[str, Any] = {"backend": "triton", "min_sm": 75, "requires": ("triton",), "priority": 10}
        return cls(op=op, impl=impl, **(usual | others))


@dataclass(frozen=True, kw_only=True)
class FormatSpec:
    """One number format."""

    name: str
    """Its name, in the namespace of the plugin: plugin ``acme`` may register ``acme`` and ``acme_*``."""
    summary: str
    """One line for ``lpq formats``."""
    quantizer: ImportString
    """Import string of the ``Quantizer`` class, one for each format."""
    storage: ImportString
    """Import string of the ``Storage`` class."""
    effective_bits: Positive | None
    """Bits that one element costs in memory, scales included, with the default options, above 0; None: it depends."""
    kernels: Sequence[KernelSpec] = ()
    """Faster implementations; the reference needs no line here."""
    schemes: ImportString | None = None
    """Import string of a tuple of ``lpq.registry.Scheme``: how operands of this format lie in the files of inference
    engines, in one layout each. None: they cannot be exported."""
    api_version: int = API_VERSION
    """The interface version that the plugin was written for."""


@dataclass(frozen=True, kw_only=True)
class RecipeSpec:
    """One named recipe: which quantizer each operand of the three products gets."""

    name: str
    """Its name: plugin ``acme`` may register ``acme``, ``acme-*`` and ``acme_*``."""
    summary: str
    """One line for ``lpq recipes``."""
    recipe: Any
    """Anything that ``lpq.recipe`` takes: the grammar, or a mapping as a TOML file would give it."""
    aliases: tuple[str, ...] = ()
    """Its names in other libraries, in no namespace. Where nothing else has such a name, ``lpq.recipe`` takes this
    recipe and reports it. Capitals do not count."""
    api_version: int = API_VERSION
    """The interface version that the plugin was written for."""


@dataclass(frozen=True, kw_only=True)
class LayoutSpec:
    """One layout in which inference engines keep a quantized model in files."""

    name: str
    """Its name: plugin ``acme`` may register ``acme``, ``acme-*`` and ``acme_*``."""
    summary: str
    """One line for ``lpq export --help`` and for messages."""
    layout: ImportString
    """Import string of a subclass of ``lpq.registry.Layout``, which is made without arguments."""
    api_version: int = API_VERSION
    """The interface version that the plugin was written for."""
