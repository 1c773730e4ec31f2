# SPDX-License-Identifier: Apache-2.0
"""The caller's groups, as torch.distributed knows them: by name, with their ranks and limit; and
what a process needs to know that has none of its own."""

import contextlib
import datetime
import functools
import gc
import os
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

#: Clocks count nanoseconds in 64 bits.
_LONGEST_TIMEOUT = 1e9

Group = dist.ProcessGroup | DeviceMesh | str | None

#: "auto" takes shared memory between processes of one node, "process_group" never does.
EngineName = Literal["auto", "process_group"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

#: In the place of a name: a group that this rank is not a member of.
OUTSIDE = "a group without this rank"

_LISTED = "expected one that torch.distributed's init_process_group or new_group made"


class Sharing(NamedTuple):
    """Says with whom a layer shares statistics, as a module keeps it: by names, not handles.

    name: a process group's name, None for the world. limit: the timeout in seconds, None for that
    of the process group.
    """

    name: str | None = None
    limit: float | None = None
    engine: EngineName = "auto"

    @property
    def timeout(self) -> float:
        """The limit in seconds, of a group that there is, or for which one was given."""
        return limit_of(resolve(self.name)) if self.limit is None else self.limit


# New names of groups that were made again.
renamed: dict[str, str] = {}


def initialized() -> bool:
    """Tells whether this process has a default group."""
    return dist.is_initialized()


def group_name(group: Group) -> str | None:
    """Gives the name by which torch.distributed knows the group; None, the world, stays None."""
    if group is None or isinstance(group, str):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"process_group: got a DeviceMesh of {group.ndim} axes, expected one of one axis, "
                "as mesh['name'] is"
            )
        member = group.get_coordinate() is not None
        outside: Any = dist.GroupMember.NON_GROUP_MEMBER  # to the stubs a number, and no group
        group = group.get_group() if member else outside
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return OUTSIDE
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"process_group: got {group!r}, expected a process group, its name, a DeviceMesh of "
            "one axis, or None"
        )
    name = ""
    with contextlib.suppress(RuntimeError, ValueError):
        name = group.group_name
    if not name:
        raise ValueError(f"process_group: got {group!r}, which has no name, {_LISTED}")
    return name


def sharing(
    group: Group, timeout: float | datetime.timedelta | None, engine: EngineName = "auto"
) -> Sharing:
    """Checks the arguments, and keeps the group's name."""
    if engine not in ENGINES:
        raise ValueError(f"engine: got {engine!r}, expected one of {ENGINES}")
    if timeout is None:
        return Sharing(group_name(group), None, engine)
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (number and 0 < seconds <= _LONGEST_TIMEOUT):
        raise ValueError(
            f"timeout: got {timeout!r}, expected a positive number of seconds, at most 1e9, or a "
            "timedelta"
        )
    return Sharing(group_name(group), float(seconds), engine)


def backends(group: dist.ProcessGroup) -> str:
    """Gives the backend of each device, such as "cpu:gloo,cuda:nccl"."""
    return dist.distributed_c10d._world.pg_backend_config.get(group, "")


def nccl_name(group: dist.ProcessGroup) -> str:
    """Gives the group's name if CUDA tensors go over NCCL in it (nccl, nccl2, nccl-lazy, ncclx),
    else ""."""
    return group.group_name if "cuda:nccl" in backends(group) else ""


def is_nccl_alone(name: str) -> bool:
    """Tells whether the group that nccl_name() names takes no other tensors than those on CUDA."""
    return name != "" and "cpu:" not in backends(resolve(name))


def device_of(name: str) -> torch.device:
    """Tells where that group takes tensors: PyTorch 2.15 binds it to a device."""
    bound = resolve(name).bound_device_id if exists(name) else None
    return bound or torch.device("cuda", torch.cuda.current_device())


_limits: "weakref.WeakKeyDictionary[dist.ProcessGroup, float]" = weakref.WeakKeyDictionary()


def limit_of(group: dist.ProcessGroup) -> float:
    """Gives the seconds that its own collectives wait, as it was made; where no backend tells,
    those of the default group, or else PyTorch's default."""
    if group not in _limits:
        _check_exchanges(group)
        alone = group == dist.group.WORLD
        _limits[group] = (
            dist.default_pg_timeout.total_seconds() if alone else limit_of(resolve(None))
        )
        for device in ("cpu", "cuda"):
            with contextlib.suppress(RuntimeError, AttributeError):
                backend = group._get_backend(torch.device(device))
                _limits[group] = min(backend.options._timeout.total_seconds(), _LONGEST_TIMEOUT)
                break
    return _limits[group]


def _check_exchanges(group: dist.ProcessGroup) -> None:
    if {backend.split(":")[-1] for backend in backends(group).split(",")} == {"fake"}:
        raise RuntimeError(
            f"process_group: got {group.group_name!r}, whose backend is 'fake' and exchanges "
            "nothing, expected one whose ranks are there, or sync=False"
        )


def resolve(name: str | None) -> dist.ProcessGroup:
    """Finds the process group of that name in this process; None is the world."""
    if name is None:  # without the search of dist.group.WORLD
        return dist.distributed_c10d._world.default_pg  # type: ignore  # where there is one
    if name == OUTSIDE:
        raise RuntimeError(
            "process_group: got a group that this rank is not a member of, expected one "
            "with this rank, which trains the layer"
        )
    while name in renamed:
        name = renamed[name]
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # a str
    except (RuntimeError, ValueError, LookupError) as error:
        raise RuntimeError(
            f"process_group: no process group named {name!r} in this process; was it destroyed, or "
            "the layer loaded in another job? Convert the model again with the group to use, or "
            "call syncbn.set_group"
        ) from error


def exists(name: str) -> bool:
    try:
        dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # a str
    except (RuntimeError, ValueError, LookupError):
        return False
    return True


@functools.cache
def _label(name: str, cuda: str) -> str:
    """Gives the name if all ranks have it: new_group counts or hashes alike on all of them. Where
    NCCL splits a group, the hash has this rank's number of groups in it."""
    return name if re.fullmatch(r"\d+" if cuda else r"\d+|[0-9a-f]{40}", name) else ""


#: By the caller's group: its members' global numbers, and the label of one of ours.
_compared: "weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[list[int], str | None]]" = (
    weakref.WeakKeyDictionary()
)


def keep(group: dist.ProcessGroup, limit: float, ranks: list[int], label: str) -> None:
    """Notes what is known of a group that this package has made."""
    _limits[group], _compared[group] = limit, (ranks, label)


def members(group: dist.ProcessGroup, cuda: str) -> tuple[list[int], str]:
    """Gives their global numbers, as torch.distributed lists them, and a label that tells the group
    from others of the same ranks, alike on all of them; groups whose names may differ between ranks
    share the label "". cuda: as nccl_name() has it. The numbers fit what the group says of itself:
    a library may have made it, or changed it since, without a word to torch.distributed."""
    if changes(group):
        return list(range(group.size())), f"{group.group_name}@{_generation(group)}"
    found = _compared.get(group)
    if found is None or len(found[0]) != group.size():
        found = _compared[group] = _compare(group)
    ranks, label = found
    return ranks, _label(group.group_name, cuda) if label is None else label


_changing: "weakref.WeakKeyDictionary[dist.ProcessGroup, bool]" = weakref.WeakKeyDictionary()


def changes(group: dist.ProcessGroup) -> bool:
    """Tells whether the group changes in place, by init_process_group(enable_reconfigure=True) of
    PyTorch 2.14 and later. What torch.distributed lists of it is what it was at first."""
    if group not in _changing:
        _changing[group] = False
        for device in ("cpu", "cuda"):
            with contextlib.suppress(RuntimeError, AttributeError):
                backend: Any = group._get_backend(torch.device(device))
                _changing[group] |= backend.options.enable_reconfigure
    return _changing[group]


def _generation(group: dist.ProcessGroup) -> str:
    """Gives what its members got for the last change: the same for all of them, and never twice.
    Handles are "backend:rank:uuid:...", of Gloo and of nccl2."""
    changing: Any = group  # PyTorch 2.11 has no such method
    uuid = [*changing.get_reconfigure_handle().split(":"), "", "", ""][2]
    if group is not dist.group.WORLD or not uuid.isdecimal():
        raise RuntimeError(
            f"process_group: got {group.group_name!r}, which changes in place and whose ranks are "
            "not known, expected the default group of Gloo or NCCL after its first reconfigure"
        )
    return uuid


def outlived(label: str) -> bool:
    """Tells whether it is the label of what a group that changes in place was before."""
    return "@" in label and label != members(resolve(None), "")[1]


def global_ranks(group: dist.ProcessGroup) -> list[int]:
    """Gives its members' global numbers."""
    return members(group, "")[0]


def _compare(group: dist.ProcessGroup) -> tuple[list[int], str | None]:
    _check_exchanges(group)
    size, rank, own_number = group.size(), group.rank(), dist.get_rank()
    try:
        ranks = dist.get_process_group_ranks(group)
    except LookupError as error:
        raise RuntimeError(
            f"process_group: got {group.group_name!r}, which torch.distributed does not list, "
            f"{_LISTED}"
        ) from error
    fits = len(set(ranks)) == len(ranks) == size and 0 <= rank < size
    if not fits or ranks[rank] != own_number or max(ranks) >= dist.get_world_size():
        raise RuntimeError(
            f"process_group: got {group.group_name!r} of {size} ranks with this process as rank "
            f"{rank}, but torch.distributed lists its ranks as {ranks} and this process as rank "
            f"{own_number}; expected the same of both, or sync=False"
        )
    return ranks, None


# The default group of the rank that this process was forked from, if it was.
_inherited: dist.ProcessGroup | None = None
_inherited_rank = ""


def _note_fork() -> None:
    global _inherited, _inherited_rank
    _inherited = dist.group.WORLD
    if _inherited is not None:
        _inherited_rank = f"rank {_inherited.rank()} of {_inherited.size()}"


def check_fork() -> None:
    """Raises RuntimeError where the groups are those of the rank that this process was forked from:
    its connections lead to ranks that would take what comes through them for that rank's words."""
    if _inherited is not None and dist.group.WORLD is _inherited:
        raise RuntimeError(
            f"syncbn: process {os.getpid()} was forked from {_inherited_rank} and has no part in "
            "its groups; expected evaluation mode or sync=False in it, or a process that is spawned"
        )


os.register_at_fork(after_in_child=_note_fork)

#: How many processes a launcher started, as it tells each of them. torchrun's comes first: it may
#: run inside of one of the others. Slurm's is that of the step, not of the allocation.
_SIZES = (
    *("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    *("FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "SLURM_STEP_NUM_TASKS", "DMLC_NUM_WORKER"),
)

#: Libraries that know of other processes without a default group: the module, where it is imported;
#: what texts call it; and how many processes it tells of once it is initialized.
_LIBRARIES: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    (
        "torch.distributed.rpc",
        "torch.distributed.rpc",
        lambda rpc: (
            rpc._is_current_rpc_agent_set() and len(rpc._get_current_rpc_agent().get_worker_infos())
        ),
    ),
    ("torch.distributed._dist2", "dist2", lambda dist2: dist2.current_process_group().size()),
    (
        "mpi4py.MPI",
        "mpi4py",
        lambda mpi: mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size(),
    ),
    ("horovod.torch", "Horovod", lambda hvd: hvd.is_initialized() and hvd.size()),
    ("deepspeed.comm", "DeepSpeed", lambda comm: comm.is_initialized() and comm.get_world_size()),
    ("ray.train", "Ray Train", lambda train: train.get_context().get_world_size()),
    (
        "accelerate.state",
        "Accelerate",
        lambda state: state.PartialState._shared_state.get("num_processes"),
    ),
    ("jax._src.distributed", "jax.distributed", lambda jax: jax.global_state.num_processes),
    ("torch_xla.runtime", "torch_xla", lambda runtime: runtime.world_size()),
)


def others_beside() -> str:
    """Says what tells that there are other processes; "" if nothing does."""
    for name in _SIZES:
        size = os.environ.get(name, "")
        if size.isdecimal():
            if int(size) > 1:
                return f"the environment has {name}={size}"
            break
    for name, library, size_of in _LIBRARIES:
        module = sys.modules.get(name)
        if module is not None:
            found: Any = None
            with contextlib.suppress(Exception):  # not initialized, or of another version
                found = size_of(module)
            if isinstance(found, int) and found > 1:
                return f"{library} tells of {found} processes"
    classes = [
        getattr(sys.modules.get(module), "Manager", None)
        for module in ("torchft", "torchft.manager")
    ]
    managers = tuple(cls for cls in classes if isinstance(cls, type))
    if managers and any(issubclass(type(object_), managers) for object_ in gc.get_objects()):
        return "torchft's Manager is there for other replicas"
    return ""


def alone_text(why: str) -> str:
    """Makes the text about layers that see nobody by accident."""
    return (
        f"statistics of this process alone, though {why}; expected a process group of all of them "
        "before training (torch.distributed.init_process_group), or sync=False"
    )
