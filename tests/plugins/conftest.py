"""The golden files: bytes that other implementations made, which the references must reproduce. Those of MXFP4 are by
NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

FILES = Path(__file__).parents[1] / "golden"


class Golden(Mapping[str, Tensor]):
    """The tensors of the file by name: ``INPUT/x`` in bf16, fp32 ones as they are, bytes as uint8."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self.tensors = {name: torch.from_numpy(arrays[name].copy()) for name in arrays.files}
        for name, tensor in self.tensors.items():
            if name.endswith("/x"):
                self.tensors[name] = tensor.view(torch.bfloat16)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The inputs by name."""
        return {name.removesuffix("/x"): x for name, x in self.tensors.items() if name.endswith("/x")}

    def buffers(self, name: str, encoding: str) -> dict[str, Tensor]:
        """The encoding that an input must have, buffer by buffer."""
        prefix = f"{name}/{encoding}/"
        return {key.removeprefix(prefix): t for key, t in self.tensors.items() if key.startswith(prefix)}


@pytest.fixture(scope="session")
def golden() -> Golden:
    return Golden(FILES / "formats_128x256.npz")


@pytest.fixture(scope="session")
def golden_eden() -> Golden:
    """MS-EDEN of rotated matrices, before scales are rounded stochastically."""
    return Golden(FILES / "nvfp4_eden_128x256.npz")


@pytest.fixture(scope="session")
def golden_variants() -> Golden:
    """NVFP4 by four over six and by rows, of some inputs of the other file."""
    return Golden(FILES / "nvfp4_variants_128x256.npz")


@pytest.fixture(scope="session")
def golden_mxfp4() -> Golden:
    """MXFP4 of the inputs of the first file."""
    return Golden(FILES / "mxfp4_128x256.npz")
