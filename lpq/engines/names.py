"""The names of the files of an exported model."""

CONFIG = "config.json"
JSON_FILES = (CONFIG, "hf_quant_config.json")
"""In which layouts describe themselves."""
ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def shard_name(number: int, count: int) -> str:
    """The file of the shard with this number, from 1 on."""
    return ONE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
