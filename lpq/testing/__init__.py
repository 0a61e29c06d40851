"""The conformance kit: what every number format must do, tested from what its plugin declares.

``lpq check FORMAT`` runs it, and so does ``pytest --pyargs lpq.testing.conformance --lpq-format FORMAT``. The
test suite of a plugin takes it in with two lines::

    from lpq.testing.conformance import *
    lpq_formats = ["FORMAT"]
"""
