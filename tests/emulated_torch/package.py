# SPDX-License-Identifier: Apache-2.0
"""The package of the source tree over the libraries that are loaded already."""

import contextlib
import pathlib
import sys
import types
from unittest import mock

import torch
from emulated import on_cuda

build = types.ModuleType("syncbn._build")
build.__file__, build.__version__, build.cuda_version = __file__, "0", None
sys.modules["syncbn._build"] = build
root = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(root / folder) for folder in ("python", "tests/python/support")]
with mock.patch.object(torch.ops, "load_library"):
    import syncbn  # noqa: F401  for those that import it from here
    from syncbn import ops
    from syncbn.exchange import agreement
    from syncbn.step import autograd, graph_operators, training

DOORS = ("forward_begin", "forward_finish", "backward_begin", "backward_finish")


@contextlib.contextmanager
def emulated():
    """Layers and batch_norm take the operators on CUDA, and no others."""
    with contextlib.ExitStack() as stack:
        for module in (agreement, autograd, graph_operators, ops, training):
            stack.enter_context(mock.patch.object(module, "ops", on_cuda))
        for name in DOORS:
            stack.enter_context(mock.patch.object(training, name, getattr(on_cuda, name)))
        yield
