"""Files on the disk: what is whole or does not count, by a name, a claim or a manifest, and tensors in safetensors."""
