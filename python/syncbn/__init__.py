# SPDX-License-Identifier: Apache-2.0
"""Batch normalization whose statistics are shared by every device that trains."""

from . import functional, graph, ops, parallel
from ._build import __version__
from .errors import DivergenceError, ExchangeTimeout, PeerLost
from .fingerprints import fingerprint
from .models.classes import register_conversion
from .models.convert import convert_sync_batchnorm, revert_sync_batchnorm
from .models.join import join
from .models.recording import record
from .models.report import check, report
from .models.sharing import prepare, reset_groups, set_group, skip
from .nn import SyncBatchNorm
from .operators import ops as _ops
from .shares import Shares

__all__ = [
    "DivergenceError",
    "ExchangeTimeout",
    "PeerLost",
    "Shares",
    "SyncBatchNorm",
    "__version__",
    "check",
    "convert_sync_batchnorm",
    "cpu_instruction_set",
    "fingerprint",
    "functional",
    "graph",
    "join",
    "ops",
    "parallel",
    "prepare",
    "record",
    "register_conversion",
    "report",
    "reset_groups",
    "revert_sync_batchnorm",
    "set_group",
    "skip",
]


def cpu_instruction_set() -> str:
    """Returns the vector code in use: "avx512_bf16", "avx512", "avx2", "neon" or "reference".

    Results never depend on it.
    """
    return _ops.cpu_instruction_set()
