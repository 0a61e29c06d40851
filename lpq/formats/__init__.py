"""Number formats: their layouts, how a matrix is encoded in one, and the operands that come out."""

from lpq.formats.format import Quantizer, Storage
from lpq.formats.layout import Buffer, Stat, StateBuffer
from lpq.formats.random_bits import RandomBits

__all__ = ["Buffer", "Quantizer", "RandomBits", "Stat", "StateBuffer", "Storage"]
