"""Groups of ranks that exchange statistics: made once per set of ranks, and rebuilt on demand."""

import datetime
import logging
import os
import socket
import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from . import _forked, _shared_memory, _where

_log = logging.getLogger("syncbn")

#: Seconds that an exchange waits for the slowest rank.
DEFAULT_TIMEOUT = 300.0
#: Clocks count nanoseconds in 64 bits.
_LONGEST_TIMEOUT = 1e9

Group = dist.ProcessGroup | str | None


class Sharing(NamedTuple):
    """With whom a layer shares statistics, as a module keeps it: names, not handles.

    name: a process group's name, None for the world. engine: "auto" takes shared memory between
    processes of one node. limit: the timeout in seconds, as text, because torch.compile takes a
    number that differs between layers for a variable.
    """

    name: str | None = None
    limit: str = repr(DEFAULT_TIMEOUT)
    engine: str = "auto"

    @property
    def timeout(self) -> float:
        return float(self.limit)


ENGINES = ("auto", "process_group")

#: False: "auto" is "process_group", for tests of the framing over Gloo.
use_shared_memory = True


class Peers(NamedTuple):
    """The ranks that share a layer's statistics: a group of this package's own, by name."""

    group_name: str
    ranks: int
    rank: int  # this process's
    timeout: float
    #: shared memory of the ranks on this node, and the group of the nodes' first ranks, if there
    #: are several nodes and this rank is such a one
    shared: int | None = None
    nodes: int = 1
    leaders: str | None = None
    #: why there is no shared memory
    note: str = ""
    #: the caller's group of these ranks, if it exchanges CUDA tensors over NCCL; else "", and
    #: messages on CUDA go through the host
    cuda: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}"

    @property
    def any_length(self) -> bool:
        """Whether a message's length need not be agreed before: shared memory tells all ranks
        alike that lengths differ, where Gloo ends the process."""
        return self.shared is not None and self.nodes == 1

    @property
    def engine(self) -> str:
        if self.shared is None:
            return "gloo" if self.nodes == 1 else "gloo between nodes"
        return "shared memory" if self.nodes == 1 else "shared memory, gloo between nodes"

    def engine_on(self, device: torch.device) -> str:
        """The engine of messages on that device."""
        if device.type != "cuda":
            return self.engine
        return "nccl" if self.cuda else f"{self.engine}, through the host"


# The groups that this module made, by their ranks (global numbers, ascending), timeout, engine and
# the name of the group for CUDA tensors, which takes no part in making them.
_own_groups: dict[tuple[tuple[int, ...], float, str, str], Peers] = {}
# How many groups were made for these ranks: part of a name that must never come twice.
_made: dict[tuple[int, ...], int] = {}

# New names of groups that were made again.
_renamed: dict[str, str] = {}

# Ranks (global numbers) that take part in no exchange for now, and the groups without them.
_absent: frozenset[int] = frozenset()
_without_absent: list[tuple[tuple[int, ...], float, str, str]] = []


def group_name(group: Group) -> str | None:
    """The name under which torch.distributed knows the group; None stays None (the world)."""
    if group is None or isinstance(group, str):
        return group
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group: got a group that this rank is not a member of, expected one of its own"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"process_group: got {group!r}, expected a process group, its name, or None"
        )
    return group.group_name


def sharing(
    group: Group, timeout: float | datetime.timedelta | None, engine: str = "auto"
) -> Sharing:
    """Checked."""
    if engine not in ENGINES:
        raise ValueError(f"engine: got {engine!r}, expected one of {ENGINES}")
    if timeout is None:
        timeout = DEFAULT_TIMEOUT
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (number and 0 < seconds <= _LONGEST_TIMEOUT):
        raise ValueError(
            f"timeout: got {timeout!r}, expected a positive number of seconds, at most 1e9, or a "
            "timedelta"
        )
    return Sharing(group_name(group), repr(float(seconds)), engine)


def nccl_name(group: dist.ProcessGroup) -> str:
    """The group's name if CUDA tensors go over NCCL in it, else ""."""
    backends = dist.distributed_c10d._world.pg_backend_config.get(group, "")
    return group.group_name if "cuda:nccl" in backends else ""


def is_nccl_alone(peers: "Peers") -> bool:
    """Whether the caller's group takes no other tensors than those on CUDA."""
    if not peers.cuda:
        return False
    config = dist.distributed_c10d._world.pg_backend_config.get(resolve(peers.cuda), "")
    return "cpu:" not in config


def resolve(name: str | None) -> dist.ProcessGroup:
    """The process group of that name in this process; None is the world."""
    if name is None:
        return dist.group.WORLD
    while name in _renamed:
        name = _renamed[name]
    try:
        return dist.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, LookupError) as error:
        raise RuntimeError(
            f"process_group: no process group named {name!r} in this process; was it destroyed, or "
            "the layer loaded in another job? Convert the model again with the group to use, or "
            "call syncbn.set_group"
        ) from error


def exists(name: str) -> bool:
    try:
        dist.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, LookupError):
        return False
    return True


def _alive() -> list[dist.ProcessGroup]:
    """Keeps the groups, until destroy_process_group clears it: a group left over would hold the
    store's server, and with it a port that the next init_process_group may want."""
    return dist.distributed_c10d._world.tags_to_pg.setdefault("syncbn", [])


def _gloo_group(ranks: tuple[int, ...], name: str, timeout: float) -> dist.ProcessGroup:
    """A Gloo group under a name of our own. torch.distributed.new_group names a group by how many
    groups this process has, so ranks with different numbers of groups would wait for ever."""
    store = dist.PrefixStore(name, _where.store())
    rank, limit = ranks.index(dist.get_rank()), datetime.timedelta(seconds=timeout)
    backend = dist.ProcessGroupGloo(store, rank, len(ranks), timeout=limit)
    group = dist.ProcessGroup(store, rank, len(ranks))
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_group_name(name)
    torch._C._distributed_c10d._register_process_group(name, group)
    _alive().append(group)
    return group


def _by_node(group: dist.ProcessGroup) -> list[list[int]]:
    """The group's ranks by machine, machines by their first rank."""
    own = torch.zeros(256, dtype=torch.uint8, device="cpu")
    text = node_identity().encode()[:256]
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    nodes: dict[bytes, list[int]] = {}
    for rank, identity in enumerate(_shared_memory.gather(own, group)):
        nodes.setdefault(bytes(identity.tolist()), []).append(rank)
    return list(nodes.values())


def node_identity() -> str:
    """What ranks that may share memory have in common: the machine's running system."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"{socket.gethostname()}, process {os.getpid()}"


def _with_shared_memory(own: Peers, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> Peers:
    """The same with shared memory inside nodes, if all ranks of all nodes can have it."""
    nodes = _by_node(group)
    mine = next(node for node in nodes if own.rank in node)
    handle, why = None, "" if len(mine) > 1 else "it is the only rank of its node"
    local = group
    if len(nodes) > 1 and len(mine) > 1:
        local_ranks = tuple(ranks[r] for r in mine)
        local = _gloo_group(local_ranks, f"{own.group_name}/node{mine[0]}", own.timeout)
    if len(mine) > 1:
        handle, why = _shared_memory.open_group(local, own.timeout)
        if why and len(nodes) > 1:
            why = f"on its node, whose ranks count from 0: {why}"
    if len(nodes) > 1:  # all nodes alike, or none
        reasons = _shared_memory.gather_texts(why, group)
        refused = next((f"rank {r}: {text}" for r, text in enumerate(reasons) if text), "")
        if refused and handle is not None:
            _shared_memory.close(handle)
            handle = None
        why = refused
    if handle is None:
        return own._replace(nodes=len(nodes), note=why)
    leaders = None
    first = tuple(ranks[node[0]] for node in nodes)
    if len(nodes) > 1 and own.rank == mine[0]:
        leaders = f"{own.group_name}/nodes"
        _gloo_group(first, leaders, own.timeout)
    return own._replace(shared=handle, nodes=len(nodes), leaders=leaders)


def own_group(group_ranks: list[int], timeout: float, engine: str, cuda: str = "") -> Peers:
    """A group of the same ranks for exchanges alone, so that one that times out does not take the
    user's group with it. Made once per set of ranks; a collective call of its members. cuda: the
    user's group, if it has NCCL."""
    _forked.check()
    ranks = tuple(sorted(group_ranks))
    known = _own_groups.get((ranks, timeout, engine, cuda))
    if known is not None:
        if exists(known.group_name):
            return known
        _forget(known)  # it went with destroy_process_group
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "syncbn: the group of this layer is not made yet and cannot be made while compiling: "
            "convert the model after init_process_group, run one eager training step, or call "
            "syncbn.prepare(model) first"
        )
    _made[ranks] = _made.get(ranks, 0) + 1
    members = ranks if len(ranks) <= 8 else (*ranks[:3], "...", ranks[-1], len(ranks))
    name = f"syncbn/{'_'.join(map(str, members))}/{_made[ranks]}"
    group = _gloo_group(ranks, name, timeout)
    own = Peers(name, len(ranks), group.rank(), timeout, cuda=cuda)
    if engine == "auto" and len(ranks) > 1 and use_shared_memory:
        own = _with_shared_memory(own, group, ranks)
        if own.note and own.rank == 0:
            _log.warning("exchanging over Gloo, not through shared memory: %s", own.note)
    _own_groups[ranks, timeout, engine, cuda] = own
    _where.watch(name, own.rank, own.ranks)
    return own


def named(name: str) -> Peers:
    """The group of this package with that name, as traced graphs hold it."""
    for own in _own_groups.values():
        if own.group_name == name:
            return own
    raise RuntimeError(
        f"syncbn: a graph was traced with the group {name!r}, which this process does not have; "
        "expected tracing after convert_sync_batchnorm or syncbn.prepare(model) in this process"
    )


@torch.compiler.assume_constant_result
def peers(sharing: Sharing) -> Peers | None:
    """Whom to exchange with; None: nobody (no process group, or one rank)."""
    _forked.check()
    if not (dist.is_available() and dist.is_initialized()):
        if sharing.name is not None:
            resolve(sharing.name)
        return None
    group = resolve(sharing.name)
    if group.size() == 1:
        return None
    ranks, cuda = global_ranks(group), nccl_name(group)
    if not _absent.isdisjoint(ranks):
        ranks = sorted(set(ranks) - _absent)
        if len(ranks) == 1:
            return None
        cuda = ""  # NCCL makes no group without the ranks that are absent
        key = tuple(ranks), sharing.timeout, sharing.engine, cuda
        if key not in _own_groups:
            _without_absent.append(key)
    return own_group(ranks, sharing.timeout, sharing.engine, cuda)


def leave_out(ranks: Iterable[int]) -> None:
    """From now on peers() are those of a layer's group that are not in `ranks` (global numbers).
    Called by all other ranks between the same two exchanges; drops the groups made since the call
    before."""
    global _absent
    _forked.check()
    _absent = frozenset(ranks)
    while _without_absent:
        _drop(_own_groups.pop(_without_absent.pop()))


def global_ranks(group: dist.ProcessGroup) -> list[int]:
    """Its members' global numbers."""
    for (ranks, *_), own in _own_groups.items():
        if own.group_name == group.group_name:
            return list(ranks)
    return dist.get_process_group_ranks(group)


def _forget(own: Peers) -> None:
    if "torch._dynamo" in sys.modules and not torch.compiler.is_compiling():
        torch._dynamo.reset()  # compiled graphs hold names and handles of the group
    _drop(own)


def _drop(own: Peers) -> None:
    _where.forget(own.group_name)
    if own.shared is not None:
        _shared_memory.close(own.shared)
    inside = f"{own.group_name}/"  # a node's, and that between nodes
    _alive()[:] = [g for g in _alive() if not f"{g.group_name}/".startswith(inside)]


def rebuild() -> None:
    """Makes every group of this package anew; a collective call of the ranks of each."""
    _forked.check()
    old = sorted(_own_groups.items())  # one order on all ranks, so that none waits in a circle
    _own_groups.clear()
    for (ranks, *options), own in old:
        _forget(own)
        _renamed[own.group_name] = own_group(list(ranks), *options).group_name
