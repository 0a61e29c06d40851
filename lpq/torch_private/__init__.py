"""Private names of torch, each under a plain name, one subject a file. No other file of lpq or its plugins has one.

``tests/torch_private`` checks for which versions they hold, and that they behave as lpq relies on. A name that a step
uses is bound and not wrapped, so that it adds no call.
"""
