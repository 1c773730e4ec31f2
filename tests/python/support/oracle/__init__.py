# SPDX-License-Identifier: Apache-2.0
"""Scalar oracle with unlimited integers: decides every bit of docs/numerics.md.

Tensors are float64 arrays whose values are representable in the type named by `dtype`, one of
"float16", "bfloat16", "float32", "float64". Results have the same form. A mask is True where an
element counts. Written from the contract alone; nothing here knows the C++ core.
"""

from .elementwise import normalize
from .exact import fma, fma32, rn_ratio
from .finalize import (
    Gradients,
    Moments,
    gradients,
    inverse_deviation,
    moments,
    r53,
    update_running,
)
from .formats import FORMATS, Format, format_of, round_to
from .layer import (
    Backward,
    Forward,
    backward,
    forward,
)
from .sums import integers_of, local_words, merge, words_of

__all__ = [
    "FORMATS",
    "Backward",
    "Format",
    "Forward",
    "Gradients",
    "Moments",
    "backward",
    "fma",
    "fma32",
    "format_of",
    "forward",
    "gradients",
    "integers_of",
    "inverse_deviation",
    "local_words",
    "merge",
    "moments",
    "normalize",
    "r53",
    "rn_ratio",
    "round_to",
    "update_running",
    "words_of",
]
