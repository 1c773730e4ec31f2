# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of torch.nn.SyncBatchNorm, of the wheel that is installed, moved to CPU and
Gloo, with this package's layer in the place of PyTorch's.

They are written for GPUs, and PyTorch's layer runs nowhere else, so that without this no machine
of CI can run them. Nothing of them is copied: the file is read to find them, and runs with other
names for what is of GPUs in the modules that it uses.
"""

import ast
import functools
import inspect
import os
import tempfile
import types
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import syncbn

INTERNAL = Path(torch.__file__).parent / "testing" / "_internal"
FILE = "distributed/distributed_test.py"
MENTIONS = ("SyncBatchNorm", "sync_batch_norm")


def files() -> list[str]:
    """Of PyTorch's test modules, those that say the layer's name."""
    found = []
    for path in INTERNAL.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if any(word in text for word in MENTIONS):
            found.append(str(path.relative_to(INTERNAL)))
    return found


@functools.cache
def tests() -> list[str]:
    """The tests that use the layer, themselves or in a method that they call, in their order."""
    tree = ast.parse((INTERNAL / FILE).read_text(encoding="utf-8"))
    methods = {f.name: f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)}
    names = {name: {_name(node) for node in ast.walk(f)} for name, f in methods.items()}
    users = {name for name, used in names.items() if used & set(MENTIONS)}
    while more := {name for name, used in names.items() if used & users} - users:
        users |= more
    return [name for name in methods if name in users and name.startswith("test_")]


def _name(node: ast.AST) -> str | None:
    return getattr(node, "attr", None) or getattr(node, "id", None)


class _Stand(types.ModuleType):
    """A module in which some names mean something else."""

    def __init__(self, module: types.ModuleType, **names) -> None:
        super().__init__(module.__name__)
        vars(self).update(names, _module=module)

    def __getattr__(self, name: str):
        return getattr(self._module, name)


def _ddp(module, device_ids=None, output_device=None, **options):
    return DistributedDataParallel(module, **options)


def _randn(*sizes, device=None, **options):
    return torch.randn(*sizes, **options)


def _exchanges(event_name, profiler):
    """What a profiler saw of this layer's exchange, where a test looks for the gathering that
    PyTorch's layer does: operators that write to shared memory. DDP has none of them."""
    assert event_name == "all_gather"
    names = [event.name for event in profiler.function_events]
    return [name for name in names if name.startswith("syncbn::shm_")]


_CUDA = _Stand(
    torch.cuda,
    set_device=lambda device: None,
    synchronize=lambda device=None: None,
    current_device=lambda: torch.device("cpu"),
)
_NN = _Stand(
    torch.nn,
    SyncBatchNorm=syncbn.SyncBatchNorm,
    parallel=_Stand(torch.nn.parallel, DistributedDataParallel=_ddp),
)
_TORCH = _Stand(
    torch, cuda=_CUDA, nn=_NN, randn=_randn, device=lambda *arguments: torch.device("cpu")
)


def _stay(thing, *arguments, **options):
    return thing


@functools.cache
def _module():
    """Imported where they run: it is for one backend and number of ranks, and switches flags of
    PyTorch's off for the whole process."""
    os.environ.update(
        BACKEND="gloo", WORLD_SIZE=str(dist.get_world_size()), TEMP_DIR=tempfile.gettempdir()
    )
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def run(name: str, rank: int, world: int) -> None:
    module = _module()

    class Moved(module.DistributedTest._DistTestBase, module.TestDistBackend):
        def _barrier(self, *arguments, **options):  # its own is for processes of its own
            dist.barrier()

    case = Moved(name)
    case.rank = rank
    # Below the decorators, which skip without GPUs, and test_ddp_sync_bn_training_vs_eval always:
    # PyTorch's layer fails it.
    test = inspect.unwrap(vars(module.DistributedTest._DistTestBase)[name])
    torch.manual_seed(1234)  # as their runner does: ranks make equal models
    stands = dict(
        torch=_TORCH, nn=_NN, DistributedDataParallel=_ddp, get_profiling_event=_exchanges
    )
    with (
        mock.patch.multiple(module, **stands),
        mock.patch.object(torch.Tensor, "cuda", _stay),
        mock.patch.object(torch.nn.Module, "cuda", _stay),
    ):
        test(case)


def cases() -> dict:
    return {name: functools.partial(run, name) for name in tests()}
