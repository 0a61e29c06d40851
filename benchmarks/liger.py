"""Liger's norms and SwiGLU in the modules of one model.

``apply_liger_kernel_to_llama`` would change the classes of all, and other contenders are measured in the same process.
"""

from __future__ import annotations

from importlib import import_module

from torch import nn


def with_own_norms(model: nn.Module) -> nn.Module:
    """Have Liger's kernels compute the norms and the activations of a Llama of Hugging Face's."""
    patches = import_module("liger_kernel.transformers.monkey_patch")
    mlp = import_module("liger_kernel.transformers.swiglu").LigerSwiGLUMLP
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            patches._patch_rms_norm_module(module)
        elif kind.endswith("MLP"):
            patches._bind_method_to_module(module, "forward", mlp.forward)
    return model
