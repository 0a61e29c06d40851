"""Facts about the inputs of a model's layers that belong to no quantizer."""

RECORD = "lpq_input_amax"
"""Where a model that was imported keeps the amax of the inputs of its layers, by name, for the next export."""
