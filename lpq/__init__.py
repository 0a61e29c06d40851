"""lpq: low-precision training for PyTorch in which a number format is a plugin.

The public names are imported when they are first used (PEP 562): ``import lpq`` imports no torch and no plugin.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lpq.importing import after_import
from lpq.moved import keep_moved

if TYPE_CHECKING:
    from lpq import calibration as calibration
    from lpq import checkpoint as checkpoint
    from lpq import core as core
    from lpq import distributed as distributed
    from lpq import emulation as emulation
    from lpq import engines as engines
    from lpq import formats as formats
    from lpq import integrations as integrations
    from lpq import kernels as kernels
    from lpq import nn as nn
    from lpq import observe as observe
    from lpq import operations as operations
    from lpq import optim as optim
    from lpq import recipes as recipes
    from lpq import registry as registry
    from lpq import tensor as tensor
    from lpq import testing as testing
    from lpq import train as train
    from lpq.bench.search import search
    from lpq.calibration import calibrate
    from lpq.engines import export, load_quantized
    from lpq.formats import Quantizer, Storage
    from lpq.nn.conversion import convert, report
    from lpq.nn.fused_blocks import fuse, unfuse
    from lpq.nn.holding import hold_weights
    from lpq.nn.restoring import restore
    from lpq.nn.stepping import replan, set_step
    from lpq.operations import gemm
    from lpq.recipes import Policy, Recipe, policy, recipe
    from lpq.tensor import QuantizedTensor

    __version__: str

    def quantizer(text: str | Quantizer, /, **options: object) -> Quantizer:
        """Make the quantizer that a text describes. The registry has the function; it imports no torch, for types
        neither."""


_HOME = {
    "lpq.bench.search": ("search",),
    "lpq.calibration": ("calibrate",),
    "lpq.core": ("QuantizedTensor", "Quantizer", "Storage", "gemm"),
    "lpq.engines": ("export", "load_quantized"),
    "lpq.nn": ("convert", "fuse", "hold_weights", "replan", "report", "restore", "set_step", "unfuse"),
    "lpq.recipes": ("Policy", "Recipe", "policy", "recipe"),
    "lpq.registry": ("quantizer",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_SUBMODULES = (
    "calibration", "checkpoint", "core", "distributed", "emulation", "engines", "formats", "integrations", "kernels",
    "nn", "observe", "operations", "optim", "recipes", "registry", "tensor", "testing", "train",
)  # fmt: skip

__all__ = [
    "Policy",
    "QuantizedTensor",
    "Quantizer",
    "Recipe",
    "Storage",
    "calibrate",
    "convert",
    "export",
    "fuse",
    "gemm",
    "hold_weights",
    "load_quantized",
    "policy",
    "quantizer",
    "recipe",
    "replan",
    "report",
    "restore",
    "search",
    "set_step",
    "unfuse",
]


if not TYPE_CHECKING:  # a type checker that sees this takes any name for one of lpq's

    def __getattr__(name: str) -> Any:
        if name in _MODULE_OF:
            value = getattr(import_module(_MODULE_OF[name]), name)
        elif name in _SUBMODULES:
            value = import_module(f"lpq.{name}")
        elif name == "__version__":
            from importlib.metadata import version  # half of the time that `import lpq` would take

            value = version("lpq")
        else:
            raise _missing(name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES, "__version__"])


def _missing(name: str) -> AttributeError:
    """The error for a name that is not public. Tools ask every module for names with underscores, so none of those
    imports anything."""
    text = f"module 'lpq' has no attribute {name!r}"
    hint = "" if name.startswith("_") else import_module("lpq.registry.errors").near_names(name, __dir__())
    if hint:
        return AttributeError(f"{text}; {hint}", obj=sys.modules[__name__])  # obj, for Python to suggest no second time
    return AttributeError(text)


def _rebuild(*saved: Any) -> Any:
    """Make a quantized tensor that is in a file."""
    import_module("lpq.core")
    return import_module("lpq.tensor.quantized_tensor").rebuild(*saved)


def _prepared(*saved: Any) -> Any:
    """Make a weight that is in a file, and that FSDP2 is to gather quantized."""
    import_module("lpq.core")
    return import_module("lpq.distributed.shard").prepared_parameter(*saved)


def _register() -> None:
    """Have ``torch.load(path, weights_only=True)`` read files with quantized tensors and with prepared weights, and
    ``torch.export.load`` programs with lpq's operators, before lpq is used. Where torch is at hand it costs little. A
    module of lpq that imports torch itself is not there yet, and those above it cannot be imported."""
    if not any(name.startswith("lpq.") and name != "lpq.importing" for name in sys.modules):
        import_module("lpq.core")
    names = ("lpq.tensor.quantized_tensor.rebuild", "lpq.core.tensor.rebuild")  # the second in files of earlier builds
    functions = [*((_rebuild, name) for name in names), (_prepared, "lpq.distributed.shard.prepared_parameter")]
    import_module("torch.serialization").add_safe_globals(functions)


after_import("torch", _register)
keep_moved()
