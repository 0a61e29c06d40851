"""The commands of training, ``lpq train`` and ``lpq calibrate``; ``lpq.__main__`` lists them among the others."""
