"""Abstract tests over what a format declares, one subject a module; see ``lpq.testing`` for how to run them.

The argument of a test says what it runs for: ``family``, each format; ``quantizer``, each of its options;
``side``, the quantizer of each operand that these have; ``partner``, each installed format. A format lists
what it cannot do in its quantizer class::

    known_failures: ClassVar[dict[str, str]] = {"test_zeros_stay_zeros": "this grid has no zero"}
"""

# ruff: noqa: F403
from lpq.testing.conformance.test_aten import *
from lpq.testing.conformance.test_declaration import *
from lpq.testing.conformance.test_directions import *
from lpq.testing.conformance.test_encoding import *
from lpq.testing.conformance.test_hybrid import *
from lpq.testing.conformance.test_kernels import *
from lpq.testing.conformance.test_layout import *
from lpq.testing.conformance.test_linear import *
from lpq.testing.conformance.test_shards import *
from lpq.testing.conformance.test_slices import *
from lpq.testing.conformance.test_tensor import *
from lpq.testing.conformance.test_tracing import *
from lpq.testing.conformance.test_writes import *

__all__ = [name for name, value in globals().items() if name.startswith("test_") and callable(value)]
