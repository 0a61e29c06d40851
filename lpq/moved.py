"""Published modules that moved: each is imported by its former name for one version, and using it warns."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "lpq.core.binding": "lpq.operations.binding", "lpq.core.blocks": "lpq.formats.blocks",
    "lpq.core.elements": "lpq.formats.elements", "lpq.core.exact": "lpq.emulation.bf16_gemm",
    "lpq.core.inverse": "lpq.formats.inverse", "lpq.core.layout": "lpq.formats.layout",
    "lpq.core.multiplicand": "lpq.operations.exact_form", "lpq.core.operations": "lpq.operations",
    "lpq.core.pairs": "lpq.operations.fused_pair", "lpq.core.philox": "lpq.formats.random_bits",
    "lpq.core.quantize": "lpq.operations.operands", "lpq.core.quantizer": "lpq.formats.format",
    "lpq.core.storage": "lpq.formats.format", "lpq.core.tensor": "lpq.tensor.quantized_tensor",
    "lpq.ops": "lpq.kernels", "lpq.ops.cubins": "lpq.kernels.nvrtc_cache", "lpq.ops.cuda": "lpq.kernels.cuda",
    "lpq.ops.errors": "lpq.kernels.errors", "lpq.ops.fresh": "lpq.kernels.fresh", "lpq.ops.table": "lpq.kernels.table",
    "lpq.ops.triton": "lpq.kernels.triton", "lpq.ops.triton.numbers": "lpq.kernels.triton.numbers",
}  # fmt: skip
"""The modules that pages for authors of plugins named in earlier builds, and where their names are now."""


def keep_moved() -> None:
    """Let modules be imported by their old names, too."""
    for name in sorted(MOVED):
        sys.modules[name] = module = _Moved(name, MOVED[name])
        parent, _, leaf = name.rpartition(".")
        if isinstance(owner := sys.modules.get(parent), _Moved):
            vars(owner)[leaf] = module


class _Moved(ModuleType):
    """A module with an old name: it has the content of the module that took its place, which is imported when it is
    used."""

    def __init__(self, name: str, now: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []
        self.__now = now

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # which somebody asks all modules for
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module = importlib.import_module(self.__now)
        if name == "__all__":  # which ``import *`` asks for
            return getattr(module, name, [own for own in vars(module) if not own.startswith("_")])
        value = getattr(module, name)
        deprecate = importlib.import_module("lpq.registry.warning").deprecate
        deprecate(f"{self.__name__}.{name}", gone_in="0.2", now=f"import it from {self.__now}")
        return value
