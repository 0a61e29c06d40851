"""Abstract tests over what a format declares, one subject a module; see ``lpq.testing`` for how to run them.

A test takes ``quantizer`` (it runs for each option of the format), ``family`` (once for a format) or ``partner`` (for each
installed format beside it). A format lists what it cannot do in ``known_failures`` of its quantizer class::

    known_failures: ClassVar[dict[str, str]] = {"test_zeros_stay_zeros": "the grid of this format has no zero"}
"""

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

__all__ = [name for name, value in globals().items() if name.startswith("test_") and callable(value)]  # noqa: PLE0605
