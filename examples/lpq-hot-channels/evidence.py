"""Errors of a product of which a few channels are hot, with and without them in bf16: the table of the README.

Run it where lpq and this plugin are installed: ``python evidence.py``.
"""

from __future__ import annotations

import torch
from lpq_hot_channels.finding import rules
from torch import Tensor, nn

import lpq

TOKENS, INPUTS, OUTPUTS = 2048, 1024, 1024
HOT, FACTOR = 0.02, 15
"""The part of the channels of the input that are hot, and how many times as large as others they are."""
SHARES = (0.01, 0.02, 0.09)
SEEDS = 4


def error(got: Tensor, wanted: Tensor) -> float:
    """The relative squared error."""
    return ((got - wanted).square().mean() / wanted.square().mean()).item()


def residuals(x: Tensor, w: Tensor, count: int) -> Tensor:
    """CHON's product: the channels stay in both operands, and the residuals of the hottest are multiplied beside."""
    x_, w_ = (
        lpq.quantizer(q).quantize(t, col=False).row.decode() for q, t in (("nvfp4", x), ("nvfp4(block=16x16)", w))
    )
    dx, dw = x - x_, w - w_
    score = dx.norm(dim=0) * w_.norm(dim=0) + x_.norm(dim=0) * dw.norm(dim=0)
    hot = score.topk(count).indices
    return x_ @ w_.T + dx[:, hot] @ w_[:, hot].T + x_[:, hot] @ dw[:, hot].T


@torch.no_grad()
def errors(seed: int) -> dict[str, float]:
    """The errors of the outputs of a layer."""
    torch.manual_seed(seed)
    x = torch.randn(TOKENS, INPUTS)
    x[:, torch.randperm(INPUTS)[: int(HOT * INPUTS)]] *= FACTOR
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False))
    w, wanted = model[0].weight.clone(), model(x)
    found = {}
    policies = {f"{share:.0%} of the channels in bf16": rules(model, [x], share) for share in SHARES}
    for name, policy in {"`nvfp4`": "nvfp4", **{k: {"rules": v} for k, v in policies.items()}}.items():
        again = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False))
        again[0].weight.copy_(w)
        found[name] = error(lpq.convert(again, policy)(x), wanted)
    for share in SHARES:
        found[f"the residuals of {share:.0%} beside, as in CHON"] = error(
            residuals(x, w, round(share * INPUTS)), wanted
        )
    return found


def table() -> dict[str, float]:
    """The mean errors over the seeds, by the names of the rows."""
    each = [errors(seed) for seed in range(SEEDS)]
    return {name: sum(found[name] for found in each) / SEEDS for name in each[0]}


if __name__ == "__main__":
    print("| forward product | error of the output |\n|---|---|")
    for name, found in table().items():
        print(f"| {name} | {found:.4f} |")
