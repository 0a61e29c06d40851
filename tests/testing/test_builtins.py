"""The formats that ship pass the conformance kit, in all their options, by the same door as anybody's."""

from lpq.testing.conformance import *  # noqa: F403

lpq_formats = ["fp8", "mxfp8", "nvfp4", "identity", "hybrid"]
