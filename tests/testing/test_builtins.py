"""The formats that ship pass the conformance kit, in all their options, by the same door as anybody's."""

from lpq import registry
from lpq.testing.conformance import *  # noqa: F403

lpq_formats = [name for plugin in registry.plugins() if plugin.builtin for name in plugin.formats]
lpq_formats += ["nvfp4(search=four_over_six, error=mae, norm=256)", "nvfp4(block=16x16, search=four_over_six)"]
lpq_formats += ["nvfp4(scaling=row)", "nvfp4(stochastic=eden, scaling=delayed)"]
