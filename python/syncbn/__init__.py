"""Batch normalization whose statistics are shared by every device that trains."""

from . import functional, graph, ops, parallel, testing
from ._build import __version__
from ._check import check
from ._classes import register_conversion
from ._ops import ops as _ops
from .convert import convert_sync_batchnorm, revert_sync_batchnorm
from .errors import DivergenceError, ExchangeTimeout, PeerLost
from .fold import fold
from .join import join
from .nn import SyncBatchNorm
from .report import report
from .sharing import prepare, reset_groups, set_group, skip

__all__ = [
    "DivergenceError",
    "ExchangeTimeout",
    "PeerLost",
    "SyncBatchNorm",
    "__version__",
    "check",
    "convert_sync_batchnorm",
    "cpu_instruction_set",
    "fold",
    "functional",
    "graph",
    "join",
    "ops",
    "parallel",
    "prepare",
    "register_conversion",
    "report",
    "reset_groups",
    "revert_sync_batchnorm",
    "set_group",
    "skip",
    "testing",
]


def cpu_instruction_set() -> str:
    """The vector code in use: "avx512", "avx2" or "reference". Results never depend on it."""
    return _ops.cpu_instruction_set()
