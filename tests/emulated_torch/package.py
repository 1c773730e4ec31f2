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
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
with mock.patch.object(torch.ops, "load_library"):
    import syncbn
    from syncbn.exchange import agreement, transport
    from syncbn.ops import cuda_step
    from syncbn.step import adapters, in_one, training


class OnCuda:
    """In the place of torch.ops.syncbn."""

    def __getattr__(self, name):
        return lambda *arguments: on_cuda(name, *arguments)


@contextlib.contextmanager
def emulated():
    """Layers and batch_norm take the operators on CUDA, and no others."""
    with contextlib.ExitStack() as stack:
        for module in (agreement, transport, cuda_step, adapters, training):
            stack.enter_context(mock.patch.object(module, "ops", OnCuda()))
        stack.enter_context(mock.patch.object(in_one, "train_step", lambda *_: None))
        stack.enter_context(mock.patch.object(syncbn.ops, "_on_cuda", lambda _: True))
        yield
