"""Find the hot columns, which give the products most of their energy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

W, DY = "nvfp4(block=16x16)", "nvfp4(rht=true, stochastic=true)"


def nvfp4(channels: str) -> dict[str, dict[str, str]]:
    """NVFP4's training recipe, with these columns of x and w in bf16 in forward."""
    return {
        "fprop": {t: f'hot_channels(rest={q}, channels="{channels}")' for t, q in (("x", "nvfp4"), ("w", W))},
        "dgrad": {"dy": DY, "w": W},
        "wgrad": {"dy": DY, "x": "nvfp4(rht=true)"},
    }


@torch.no_grad()
def rules(
    model: nn.Module,
    batches: Iterable[Any],
    share: float = 0.02,
    recipe: Callable[[str], Mapping[str, Any]] = nvfp4,
    run: Callable[[nn.Module, Any], object] = lambda model, batch: model(batch),
) -> list[dict[str, Any]]:
    """A rule of a policy for each ``nn.Linear``, with the ``share`` of its columns j that have the largest
    ``‖x_j‖ ‖w_j‖`` over these batches."""
    energy: dict[str, Tensor] = {}
    hooks = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):

            def note(_: nn.Module, given: tuple[Tensor, ...], name: str = name) -> None:
                squares = given[0].detach().float().square().flatten(0, -2).sum(0)
                energy[name] = energy[name] + squares if name in energy else squares

            hooks.append(layer.register_forward_pre_hook(note))
    try:
        for batch in batches:
            run(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    found = []
    for name, squares in energy.items():
        weight: Any = model.get_submodule(name).weight
        scores = squares * weight.float().square().sum(0)
        hot = scores.topk(max(1, round(share * len(scores)))).indices.sort().values
        found.append({"match": name, "recipe": recipe(" ".join(map(str, hot.tolist())))})
    return found
