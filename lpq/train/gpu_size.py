"""The size of a run on a GPU that multiplies FP8, at which FP8 saves time. Layers narrower than about 4096 wait for the
host, in low precision as in bf16. Nothing here imports torch before it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lpq.train.config import TrainConfig

if TYPE_CHECKING:
    import torch

SIZE: Mapping[str, Any] = {"width": 4096, "heads": 32, "layers": 2, "seq": 1024, "batch": 8, "lr": 3e-4}
"""The model and its batch. The learning rate goes with the width."""
BESIDE: Mapping[str, Any] = {"checkpoint_every": 0}
"""A checkpoint of this size has almost 5 GiB."""
FP8_RECIPE = "fp8-current"


def defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that differ on the device of these options; an option of the size that is given keeps all."""
    if options.get("device", "auto") == "cpu":
        return {}
    from lpq.train.machine import multiplies_fp8, pick_device

    if not multiplies_fp8(pick_device(options.get("device", "auto"))):
        return {}
    settings = {} if options.keys() & SIZE.keys() else {**SIZE, **BESIDE}
    return settings if "policy" in options else {"recipe": FP8_RECIPE, **settings}


def note(config: TrainConfig, device: torch.device) -> str | None:
    """Return a remark about size and speed on this device; None on a CPU."""
    if device.type == "cpu":
        return None
    from lpq.train.machine import multiplies_fp8

    if not multiplies_fp8(device):
        return "This GPU multiplies no FP8: recipes change the numbers here and save no time."
    if all(getattr(config, name) == value for name, value in SIZE.items()):
        return (
            f"The model is {config.width} wide, as wide as it must be for FP8 to save time on this GPU. "
            "--width 128 trains the small one that a CPU gets."
        )
    return f"FP8 saves time on this GPU from a width of about {SIZE['width']}; this model's is {config.width}."
