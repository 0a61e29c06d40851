"""Abstract tests of a format against its declarations, one subject a module; see ``lpq.testing`` for how to run them.

The argument of a test names what it runs for: ``family``, each format; ``quantizer``, each of its options;
``side``, the quantizer of each operand that these have; ``partner``, each built-in format that needs no option.

A quantizer may declare two things to the kit, each as a class attribute or as a property that depends on its
options: ``known_failures``, the tests that it fails, with the reasons, and ``error_bound``, the relative RMS error of
normal values if that is more than its bits promise. The guide to plugins shows both.
"""

# ruff: noqa: F403
from lpq.testing.conformance.test_alike import *
from lpq.testing.conformance.test_aten import *
from lpq.testing.conformance.test_declaration import *
from lpq.testing.conformance.test_directions import *
from lpq.testing.conformance.test_encoding import *
from lpq.testing.conformance.test_groups import *
from lpq.testing.conformance.test_hybrid import *
from lpq.testing.conformance.test_kernels import *
from lpq.testing.conformance.test_layout import *
from lpq.testing.conformance.test_linear import *
from lpq.testing.conformance.test_parts import *
from lpq.testing.conformance.test_products import *
from lpq.testing.conformance.test_purity import *
from lpq.testing.conformance.test_ranks import *
from lpq.testing.conformance.test_rounding import *
from lpq.testing.conformance.test_slices import *
from lpq.testing.conformance.test_state import *
from lpq.testing.conformance.test_tensor import *
from lpq.testing.conformance.test_tracing import *
from lpq.testing.conformance.test_writes import *

__all__ = [name for name, value in globals().items() if name.startswith("test_") and callable(value)]
