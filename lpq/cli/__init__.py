"""The library's commands. Each lives in a module of its own; ``lpq.__main__`` puts them together."""
