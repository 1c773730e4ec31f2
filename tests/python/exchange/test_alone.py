# SPDX-License-Identifier: Apache-2.0
"""A process that trains alone though others are there: one warning, and an error of strict reports.
torch.nn.SyncBatchNorm says nothing. Each case is a process of its own."""

import copy
import functools
import os
import sys
import tempfile
import traceback
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from torch import nn
from torch.distributed import rpc

import syncbn
from rank_runs import functions_of, join_group, new_store, quick_context, run_ranks
from syncbn.exchange import groups
from syncbn.parallel import SelfDataParallel


def model(**options) -> nn.Module:
    return syncbn.convert_sync_batchnorm(
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2), nn.BatchNorm1d(2)), **options
    )


def said(*steps) -> list[str]:
    """The warnings of syncbn in these steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in steps:
            step()
    texts = [str(w.message) for w in caught]
    return [text for text in texts if "statistics of this process alone" in text]


def train(layer, *rest):
    return layer(torch.randn(4, 2), *rest)


def strict_error(layer) -> str:
    try:
        syncbn.report(layer, strict=True)
    except RuntimeError as error:
        return str(error)
    return ""


def warns_once(text: str, layer=None, path: str = "1") -> None:
    layer = model() if layer is None else layer
    assert said(lambda: syncbn.report(layer), lambda: strict_error(layer)) == []
    (warning,) = said(*[lambda: train(layer)] * 3, lambda: train(model()))
    assert warning.startswith(f"{path}: statistics of this process alone, though ") and (
        text in warning
    ), warning
    note = warning.split(": ", 1)[1]
    assert note in strict_error(layer), strict_error(layer)
    assert note == syncbn.report(layer)[0].note


def is_quiet(layer=None) -> None:
    layer = model() if layer is None else layer
    assert said(*[lambda: train(layer)] * 3) == []
    assert "though" not in strict_error(layer)


def world_of_one() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def case_chosen():
    is_quiet()
    assert strict_error(model()).endswith("no process group")
    groups.looked = False
    os.environ.update(RANK="0", WORLD_SIZE="2")
    is_quiet(model(sync=False))
    assert strict_error(model(sync=False)) == ""
    world_of_one()
    chosen = (
        *(model(sync=False), model(group_size=1), model(group="node")),
        *(model(process_group=dist.group.WORLD), model(process_group=dist.new_group([0]))),
    )
    for layer in chosen:
        is_quiet(layer)
        assert strict_error(layer) == ""
        assert syncbn.report(layer)[0].note in ("one rank", "sync=False")
    warns_once("WORLD_SIZE=2")


#: Of launchers, each of which says so anew, as after a group of several ranks.
LAUNCHERS = (
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"),
    *("HOROVOD_SIZE", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "DMLC_NUM_WORKER", "WORLD_SIZE"),
)


def case_launchers():
    os.environ.update(WORLD_SIZE="1", OMPI_COMM_WORLD_SIZE="4", SLURM_STEP_NUM_TASKS="4")
    is_quiet()
    for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        del os.environ[name]
    # Slurm's are of the allocation.
    os.environ.update(WORLD_SIZE="many", SLURM_NTASKS="4", SLURM_PROCID="0", PMI_SIZE="")
    groups.looked = False
    is_quiet()
    for name in LAUNCHERS:
        groups.looked = False
        os.environ[name] = "3"
        warns_once(f"the environment has {name}=3")
        del os.environ[name]
    os.environ.update(RANK="0", WORLD_SIZE="2")
    groups.looked = False
    world_of_one()
    warns_once("WORLD_SIZE=2")


class Library:
    """A module that has any function: it answers with itself, or a size at the end."""

    def __init__(self, size, fails=False):
        self.answer, self.fails = size, fails
        self.global_state = types.SimpleNamespace(num_processes=size)
        self.Is_finalized = lambda: fails
        self.COMM_WORLD = types.SimpleNamespace(Get_size=lambda: size)

    def __getattr__(self, name):
        if self.fails:
            raise RuntimeError(name)
        return lambda: self.answer if "size" in name else self if "get" in name else True


LIBRARIES = {
    "horovod.torch": "Horovod",
    "deepspeed.comm": "DeepSpeed",
    "ray.train": "Ray Train",
    "torch_xla.runtime": "torch_xla",
    "mpi4py.MPI": "mpi4py",
    "jax._src.distributed": "jax.distributed",
}


def case_libraries():
    """Each says so anew; not with one process, or where it answers with an error."""
    for module, called in LIBRARIES.items():
        for size, fails in ((1, False), (3, False), (3, True)):
            groups.looked = False
            sys.modules[module] = Library(size, fails)
            if size == 3 and not (fails and "jax" not in module):
                warns_once(f"{called} tells of 3 processes")
            else:
                is_quiet()
        del sys.modules[module]
    manager = types.ModuleType("torchft.manager")
    vars(manager)["Manager"] = type("Manager", (), {})
    sys.modules["torchft.manager"] = manager
    groups.looked = False
    is_quiet()  # no manager lives
    groups.looked = False
    living = type("Derived", (manager.Manager,), {})()
    warns_once("torchft's Manager is there for other replicas")
    del living, sys.modules["torchft.manager"]
    PartialState(cpu=True)
    groups.looked = False
    is_quiet()
    PartialState._shared_state["num_processes"] = 2
    groups.looked = False
    world_of_one()
    is_quiet(model(sync=False))
    warns_once("Accelerate tells of 2 processes")


def case_other_callers():
    """Each says so once, as the first of a process."""
    os.environ["WORLD_SIZE"] = "2"
    assert said(lambda: train(model().eval())) == []
    layer = nn.Sequential(nn.Flatten(), nn.Sequential(syncbn.SyncBatchNorm(2)))
    warns_once("WORLD_SIZE=2", layer, "1.0")
    x, mean, var = torch.randn(4, 2), torch.zeros(2), torch.ones(2)
    devices = SelfDataParallel(model(), ["cpu"] * 2)
    assert "WORLD_SIZE=2" in strict_error(devices)
    operator = functools.partial(syncbn.ops.batch_norm, x, mean, var, var, mean, torch.tensor([0]))
    assert said(lambda: operator(is_infer=True)) == []
    function = functools.partial(syncbn.functional.sync_batch_norm, x, mean, var, training=True)
    compiled = torch.compile(model(), backend="aot_eager", fullgraph=True)
    for name, call in (
        ("1", functools.partial(devices, x)),
        ("1", functools.partial(compiled, x)),
        ("sync_batch_norm", function),
        ("syncbn.ops.batch_norm", operator),
    ):
        groups.looked = False
        (warning,) = said(call, call)
        assert warning.startswith(f"{name}: ")


ALONE = functions_of(sys.modules[__name__], "case_")


def gone(layer) -> None:
    (warning,) = said(*[lambda: train(layer)] * 2, lambda: train(model()))
    text = ": statistics of this process alone, though the process group with"
    assert warning.startswith(layer[1].state.name + text)


def pair_destroyed(rank, ports):
    """Before training, with layers that are copied afterwards; after it; and where there is then a
    group of one, as of a job that has shrunk."""
    layer = None
    for number, port in enumerate(ports):
        join_group(rank, 2, port)
        layer = model() if layer is None else layer
        if number > 0:
            assert said(functools.partial(train, layer)) == []
        dist.barrier()
        dist.destroy_process_group()
        if number < 2:
            assert said(functools.partial(train, layer.eval())) == []
            gone(copy.deepcopy(layer.train()) if number == 0 else layer.train())
    is_quiet(model(sync=False))
    world_of_one()
    is_quiet(layer)


def pair_others_are_left_out(rank, ports):
    """Of syncbn.join: one rank goes on, in a group of two."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    join_group(rank, 2, ports[0])
    layer = model()

    def epoch():
        with syncbn.join(layer):
            for _ in range(1 + 2 * rank):
                train(layer).sum().backward()
                syncbn.report(layer)

    assert said(epoch) == []
    dist.destroy_process_group()


def pair_of_rpc(rank, ports):
    """Without a process group, and with one of this worker alone."""
    path = Path(tempfile.gettempdir(), f"syncbn-rpc-{ports[0]}")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    is_quiet()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    groups.looked = False
    warns_once("torch.distributed.rpc tells of 2 processes")
    is_quiet(model(sync=False))
    groups.looked = False
    world_of_one()
    warns_once("torch.distributed.rpc tells of 2 processes")
    rpc.shutdown()
    groups.looked = False
    is_quiet()


PAIRS = functions_of(sys.modules[__name__], "pair_")


def _main(rank: int, name: str, ports: list[int], folder: str) -> None:
    torch.set_num_threads(1)
    try:
        ALONE[name]() if name in ALONE else PAIRS[name](rank, ports)
        outcome = "passed"
    except BaseException:
        outcome = traceback.format_exc()
    Path(folder, str(rank)).write_text(outcome)


@pytest.mark.parametrize("name", (*ALONE, *PAIRS))
def test_case(name, tmp_path):
    world = 1 if name in ALONE else 2
    stores = [new_store() for _ in range(3)]
    ports = [store.port for store in stores]
    run_ranks(quick_context(), _main, world, (name, ports, str(tmp_path)), 100)
    assert [Path(tmp_path, str(r)).read_text() for r in range(world)] == ["passed"] * world
