"""Files on the disk: files that are either whole or do not count, by a name, a claim or a manifest, and tensors in
safetensors."""
