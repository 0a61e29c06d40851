"""The sizes that are measured."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from lpq.bench.layers import LayerSize


@dataclass(frozen=True)
class Experts:
    """A linear layer for each expert, which gets ``tokens`` tokens."""

    experts: int
    tokens: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.experts}x{self.tokens}x{self.inputs}x{self.outputs}"

    @property
    def tensors(self) -> tuple[int, int, int]:
        """The elements of x, w and dy: what a step quantizes."""
        rows = self.experts * self.tokens
        return rows * self.inputs, self.experts * self.outputs * self.inputs, rows * self.outputs


GROUPED = (Experts(8, 2048, 4096, 14336), Experts(64, 512, 2048, 1408), Experts(8, 1024, 2048, 8192))
"""Experts of Mixtral, of models with many small ones, and of some between."""
LINEAR = (
    LayerSize(8192, 2048, 2048),
    LayerSize(8192, 4096, 4096),
    LayerSize(8192, 4096, 14336),
    LayerSize(8192, 14336, 4096),
    LayerSize(16384, 8192, 8192),
    LayerSize(16384, 8192, 28672),
)
"""Attention and feed-forward layers of models with 1, 8 and 70 billion parameters."""
QUICK = (LINEAR[0], LINEAR[1], LINEAR[4])
HOST = LayerSize(128, 128, 128)
"""So small that the GPU waits for the host."""


@dataclass(frozen=True)
class Stack:
    """A stack of blocks as Llama has them, without embedding and head."""

    blocks: int = 8
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    sequence: int = 4096
    batch: int = 2
    """Sequences on each rank."""

    def __str__(self) -> str:
        return (
            f"{self.blocks} blocks, hidden {self.hidden}, FFN {self.ffn}, {self.heads}/{self.kv_heads} heads, "
            f"sequence {self.sequence}, batch {self.batch}"
        )

    @property
    def tokens(self) -> int:
        """In a step of one rank."""
        return self.sequence * self.batch


@dataclass(frozen=True)
class Mixture(Stack):
    """A stack of blocks, each with experts in place of its feed-forward half."""

    experts: int = 8
    chosen: int = 2
    """To how many experts a token goes."""
    skew: float = 0.5
    """How much more often the first experts are chosen than the last: 0 for all alike."""

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.experts} experts of which {self.chosen} are chosen"


ONE_GPU = "one GPU"
"""The layout to which the others are compared."""
SHARED = {
    "": Stack(blocks=4),
    "mixtral": Mixture(blocks=1),
    "qwen3": Mixture(2, 2048, 768, 32, 4, experts=128, chosen=8),
}
"""Models that ranks share out in many ways: as wide as Llama's of 8B, and two with experts."""


@dataclass(frozen=True)
class Pair:
    """A layer whose outputs ranks share out, and one behind it whose inputs they do."""

    tokens: int = 8192
    """In a step of all ranks."""
    hidden: int = 4096
    ffn: int = 14336

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.hidden} to {self.ffn} to {self.hidden}"


@dataclass(frozen=True)
class Decoder:
    """A whole language model, with embedding and head."""

    layers: int = 16
    hidden: int = 2048
    batch: int = 4
    """Sequences."""
    sequence: int = 2048
    words: int = 32000
    width: int = 0
    """The features inside an MLP; 0: four times as many as outside."""
    experts: int = 0
    """The experts in place of each MLP, two of which a token goes to, as in Mixtral."""
    head: int = 64
    """The elements of a head."""

    @property
    def ffn(self) -> int:
        return self.width or 4 * self.hidden

    @property
    def heads(self) -> int:
        return max(1, self.hidden // self.head)

    @property
    def kv_heads(self) -> int:
        return max(1, self.heads // 4)

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.batch * self.sequence


MODELS = {
    "1b": Decoder(),
    "8b": Decoder(layers=32, hidden=4096, batch=1, sequence=8192, words=128256, width=14336, head=128),
}
"""Whole models by the number of their weights; the one of 8 billion has the sizes of Llama-3-8B."""

TINY = Stack(blocks=2, hidden=256, ffn=512, heads=4, kv_heads=2, sequence=64, batch=1)
"""For trying the benchmark itself."""
SMALL: dict[str, int] = {
    "layers": 2, "hidden": 128, "ffn": 256, "width": 256, "words": 256, "sequence": 64, "heads": 8, "kv_heads": 8,
    "head": 16,
}  # fmt: skip
"""The same options of a model, without those that say how ranks share it out."""
Model = TypeVar("Model", bound=Stack | Decoder)


def tiny(model: Model) -> Model:
    """The model in a size for trying the benchmark itself."""
    small: dict[str, Any] = {field.name: SMALL[field.name] for field in fields(model) if field.name in SMALL}
    return replace(model, **small)
