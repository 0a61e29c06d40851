"""The cost of lpq, measured beside bf16 and beside the other libraries that are installed, in one run.

    python -m benchmarks            # all parts; --help lists them

Each part measures into a plain dictionary; ``tables`` prints it, ``plots`` draws it, and it is written as JSON with a
record of the machine.
"""
