"""Times of linear layers on this machine, in bf16 and by recipes: the clock of ``lpq bench`` and of the benchmarks."""
