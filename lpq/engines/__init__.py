"""The files of inference engines: written from a model or a checkpoint, streamed, and read back."""

from lpq.engines.exporting import Export, Exported, export

__all__ = ["Export", "Exported", "export"]
