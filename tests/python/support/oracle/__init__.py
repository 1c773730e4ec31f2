# SPDX-License-Identifier: Apache-2.0
"""Scalar oracle with unlimited integers: decides every bit of docs/numerics.md.

Tensors are float64 arrays whose values are representable in the type named by `dtype`, one of
"float16", "bfloat16", "float32", "float64". Results have the same form. A mask is True where an
element counts. Written from the contract alone; nothing here knows the C++ core.
"""

from .elementwise import normalize
from .exact import fma, fma32
from .finalize import inverse_deviation, r53, update_running
from .formats import format_of, round_to
from .layer import backward, forward
from .sums import integers_of, local_words

__all__ = ["backward", "fma", "fma32", "format_of", "forward", "integers_of", "inverse_deviation"]
__all__ += ["local_words", "normalize", "r53", "round_to", "update_running"]
