"""The files of inference engines: written from a model or a checkpoint, streamed, and read back."""

from lpq.engines.exporting import Export, Exported, export
from lpq.engines.loading import load_quantized

__all__ = ["Export", "Exported", "export", "load_quantized"]
