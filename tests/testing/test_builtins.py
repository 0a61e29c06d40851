"""The formats that ship pass the conformance kit, in all their options, by the same door as anybody's."""

from lpq import registry
from lpq.testing.conformance import *  # noqa: F403

lpq_formats = [name for plugin in registry.plugins() if plugin.builtin for name in plugin.formats]
# Options whose values are words, as the recipes have them, and column operands that are made of row operands:
lpq_formats += ["nvfp4(rht=true, search=four_over_six, norm=256)", "nvfp4(block=16x16, search=four_over_six, norm=256)"]
lpq_formats += ["nvfp4(scaling=row)", "nvfp4(scaling=row, search=four_over_six, error=mae, norm=256)"]
lpq_formats += ["nvfp4(scaling=row, stochastic=unbiased)", "nvfp4(stochastic=eden, scaling=delayed)"]
lpq_formats += ["hybrid(row=mxfp8, col=mxfp8, col_source=row)"]
lpq_formats += ["hybrid(row=nvfp4(search=four_over_six, norm=256), col=nvfp4(stochastic=eden), col_source=row)"]
