"""Batch normalization whose statistics are shared by every device that trains."""

from . import functional, graph, ops, parallel
from ._build import __version__
from ._ops import ops as _ops
from .convert import convert_sync_batchnorm, revert_sync_batchnorm
from .errors import DivergenceError
from .fold import fold
from .nn import SyncBatchNorm

__all__ = [
    "DivergenceError",
    "SyncBatchNorm",
    "__version__",
    "convert_sync_batchnorm",
    "cpu_instruction_set",
    "fold",
    "functional",
    "graph",
    "ops",
    "parallel",
    "revert_sync_batchnorm",
]


def cpu_instruction_set() -> str:
    """The vector code in use: "avx512", "avx2" or "reference". Results never depend on it."""
    return _ops.cpu_instruction_set()
