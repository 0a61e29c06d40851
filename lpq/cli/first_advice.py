"""The line with which ``lpq doctor`` begins: the recipe for this machine, and what is missing for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

import torch

from lpq.bench.native import capability, to_begin_with
from lpq.cli.kernels import Served
from lpq.kernels import cuda
from lpq.kernels.table import ENVIRONMENT

EMULATED = "Any recipe runs here, emulated, to see its effect on a model, and none saves time"
HIP = getattr(torch.version, "hip", None)


def advice(device: torch.device, *, has_cuda_core: bool) -> str:
    """Advise which recipe to begin with on a device, and what to install for it."""
    sm = capability(device)
    first = to_begin_with(sm)
    if not first:
        return f"{EMULATED}: {_why_emulated(device, sm)}."
    others = f", then {' or '.join(first[1:])}" if first[1:] else ""
    missing = _missing(device, has_cuda_core)
    need = f"Missing: {missing}." if missing else "Nothing is missing."
    return f"Begin with {first[0]}{others}, whose codes this GPU multiplies: lpq.convert(model, {first[0]!r}). {need}"


def refused(every: Sequence[Served], device: torch.device) -> str | None:
    """Say that LPQ_KERNELS leaves no kernel for some of these operations, and the remedy; None if all run."""
    errors = [served for served in every if served.error is not None]
    if not errors:
        return None
    forced = os.environ[ENVIRONMENT]
    return (
        f"{ENVIRONMENT}={forced} leaves no kernel for {len(errors)} of {len(every)} operations on {device}, as for "
        f"{errors[0].op} of {' and '.join(errors[0].operands)}, and what needs one of them does not run. Allow the "
        f"reference as well: {ENVIRONMENT}={forced},reference. Or unset it."
    )


def _why_emulated(device: torch.device, sm: int | None) -> str:
    if sm is not None:
        return f"a GPU of compute capability {sm / 10:.1f} multiplies no such codes, as GPUs from 8.9 on do"
    if device.type == "cuda":
        return "lpq multiplies codes on NVIDIA's GPUs alone"
    if torch.version.cuda is None and HIP is None and shutil.which("nvidia-smi"):
        return "an NVIDIA driver is here, but this torch is built without CUDA; install a torch with CUDA"
    if torch.cuda.is_available():
        return "this is the CPU; leave out --device for the GPU"
    count = torch.cuda.device_count()
    return f"PyTorch counts {count} GPUs and cannot use them, as said below" if count else "PyTorch sees no GPU"


def _missing(device: torch.device, has_cuda_core: bool) -> str | None:
    """Say why no kernel runs on a GPU, and the remedy; None if kernels run."""
    if not has_cuda_core:
        return f"cuda-core, without which encoding is slow: {cuda.INSTALL}"
    why = cuda.why_not(device)
    return f"{why}: {cuda.INSTALL}" if why is not None and cuda.INSTALL not in why else why
