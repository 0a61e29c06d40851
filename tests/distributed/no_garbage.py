"""Imported first by the process that ranks are forked from: searches for garbage take a quarter of its imports."""

import gc

gc.disable()  # until all is imported
