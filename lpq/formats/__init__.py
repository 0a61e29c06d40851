"""What a number format is: its layout, how a matrix is encoded in it, and what the operands are."""

from lpq.formats.format import Quantizer, Storage
from lpq.formats.layout import Buffer, Stat, StateBuffer
from lpq.formats.random_bits import RandomBits

__all__ = ["Buffer", "Quantizer", "RandomBits", "Stat", "StateBuffer", "Storage"]
