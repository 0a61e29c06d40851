"""Calibrating a converted model: scales that were measured at each step become static ones, the same in any layout.

Four steps follow each other, and nothing is derived before the second is done: statistics are **collected** on each
rank, **reduced** over all ranks, **frozen** into the layers, and scales of blocks are **searched** where weights are
encoded.
"""

from lpq.calibration.calibrating import Calibrated, calibrate
from lpq.calibration.errors import CalibrationError, CalibrationWarning
from lpq.calibration.noise import Noise, layer_noise

__all__ = ["Calibrated", "CalibrationError", "CalibrationWarning", "Noise", "calibrate", "layer_noise"]
