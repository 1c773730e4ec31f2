# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks that exchange statistics: made once per group of the caller's, and rebuilt on
demand."""

import contextlib
import datetime
import functools
import hashlib
import logging
import os
import re
import socket
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import DivergenceError
from . import after_fork, alone, connections, meeting, shared_memory, whereabouts

_log = logging.getLogger("syncbn")

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
    """With whom a layer shares statistics, as a module keeps it: names, not handles.

    name: a process group's name, None for the world. limit: the timeout in seconds, None for that
    of the process group.
    """

    name: str | None = None
    limit: float | None = None
    engine: EngineName = "auto"

    @property
    def timeout(self) -> float:
        """In seconds; of a group that there is, or for which a limit was given."""
        return limit_of(resolve(self.name)) if self.limit is None else self.limit


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
    #: seconds that the first exchange of a layer waits: at least as long as the caller's group
    patience: float = 0.0
    #: the caller's group of these ranks, if it exchanges CUDA tensors over NCCL; else "", and
    #: messages on CUDA go through the host
    cuda: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}"

    def over_host(self) -> "Peers":
        """The same ranks, whose messages on CUDA go through the host."""
        return self._replace(cuda="")


#: Of a group that this module makes: its ranks (global numbers, ascending), timeout, engine, the
#: caller's group as all its ranks name it, and the name of the group for CUDA tensors, which takes
#: no part in making it.
Key = tuple[tuple[int, ...], float, str, str, str]

_own_groups: dict[Key, Peers] = {}
# The last number in a name that begins like this: a name must never come twice.
_made: dict[str, int] = {}
# Groups that could not be made, as in _own_groups, with the patience of each.
_unmade: dict[Key, float] = {}

# New names of groups that were made again.
_renamed: dict[str, str] = {}

# Ranks (global numbers) that take part in no exchange for now, and the groups without them.
_absent: frozenset[int] = frozenset()
_without_absent: list[Key] = []


def group_name(group: Group) -> str | None:
    """The name under which torch.distributed knows the group; None stays None (the world)."""
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


def _backends(group: dist.ProcessGroup) -> str:
    """The backend of each device, such as "cpu:gloo,cuda:nccl"."""
    return dist.distributed_c10d._world.pg_backend_config.get(group, "")


def nccl_name(group: dist.ProcessGroup) -> str:
    """The group's name if CUDA tensors go over NCCL in it (nccl, nccl2, nccl-lazy, ncclx), else
    ""."""
    return group.group_name if "cuda:nccl" in _backends(group) else ""


def is_nccl_alone(peers: "Peers") -> bool:
    """Whether the caller's group takes no other tensors than those on CUDA."""
    return peers.cuda != "" and "cpu:" not in _backends(resolve(peers.cuda))


def device_of(peers: "Peers") -> torch.device:
    """Where the caller's NCCL group takes tensors: each of PyTorch 2.15 is bound to a device."""
    bound = resolve(peers.cuda).bound_device_id if exists(peers.cuda) else None
    return bound or torch.device("cuda", torch.cuda.current_device())


_limits: "weakref.WeakKeyDictionary[dist.ProcessGroup, float]" = weakref.WeakKeyDictionary()


def limit_of(group: dist.ProcessGroup) -> float:
    """Seconds that its own collectives wait, as it was made; PyTorch's default where no backend
    tells."""
    if group not in _limits:
        _check_exchanges(group)
        _limits[group] = dist.default_pg_timeout.total_seconds()
        for device in ("cpu", "cuda"):
            with contextlib.suppress(RuntimeError, AttributeError):
                backend = group._get_backend(torch.device(device))
                _limits[group] = min(backend.options._timeout.total_seconds(), _LONGEST_TIMEOUT)
                break
    return _limits[group]


def _check_exchanges(group: dist.ProcessGroup) -> None:
    if {backend.split(":")[-1] for backend in _backends(group).split(",")} == {"fake"}:
        raise RuntimeError(
            f"process_group: got {group.group_name!r}, whose backend is 'fake' and exchanges "
            "nothing, expected one whose ranks are there, or sync=False"
        )


def resolve(name: str | None) -> dist.ProcessGroup:
    """The process group of that name in this process; None is the world."""
    if name is None:
        return dist.group.WORLD  # type: ignore[return-value]  # where there is one
    if name == OUTSIDE:
        raise RuntimeError(
            "process_group: got a group that this rank is not a member of, expected one "
            "with this rank, which trains the layer"
        )
    while name in _renamed:
        name = _renamed[name]
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


def _alive() -> list[dist.ProcessGroup]:
    """Keeps the groups, until destroy_process_group clears it: a group left over would hold the
    store's server, and with it a port that the next init_process_group may want."""
    return dist.distributed_c10d._world.tags_to_pg.setdefault("syncbn", [])


def node_identity() -> str:
    """What ranks that may share memory have in common."""
    return meeting.node_identity() or f"{socket.gethostname()}, process {os.getpid()}"


def own_group(key: Key, patience: float, who: str | Callable[[], str] = "syncbn") -> Peers:
    """A group of the same ranks for exchanges alone, so that one that times out does not take the
    user's group with it. Made once per group of the user's; a collective call of its members.
    patience: the limit of the user's group, in seconds. who: for errors, the layer or function that
    needs the group, or what finds out.

    Raises ExchangeTimeout, PeerLost or DivergenceError on every rank if it cannot be made.
    """
    after_fork.check()
    known = _own_groups.get(key)
    if known is not None:
        if exists(known.group_name):
            return known
        _drop(_own_groups.pop(key))  # it went with destroy_process_group
    ranks, timeout, engine, label, cuda = key
    patience = max(timeout, patience)
    share = engine != "process_group" and len(ranks) > 1 and use_shared_memory
    shown = ranks if len(ranks) <= 8 else (*ranks[:3], "...", ranks[-1], len(ranks))
    base = f"syncbn/{label}/{'_'.join(map(str, shown))}"
    rank = ranks.index(dist.get_rank())
    made: list[connections.Connections] = []
    given_up: list[bool] = []

    def make(offers: list[meeting.Offer], place: str) -> tuple[str, int, str]:
        number = 1 + max(offer.value[0] for offer in offers)
        name, nodes = f"{base}/{number}", [offer.value[1] for offer in offers]
        # Gloo's own limit must not come first: its errors name nobody.
        limit = patience + 2 * meeting.CONNECTING
        made.append(connections.make(name, place, rank, nodes, limit, share))
        if given_up:  # meanwhile, and nobody takes it
            made.pop().close()
        return name, number, place

    way = "auto" if share else "process_group"
    asks = f"timeout={timeout:g}, engine={way!r}"
    who = who() if callable(who) else who
    offer = meeting.Offer(who, asks, (_made.get(base, 0), node_identity()))
    _unmade[key] = patience
    try:
        topic = f"syncbn/group/{label}"
        name, number, place = meeting.meet(topic, ranks, rank, patience, offer, make)
    except BaseException as error:
        if isinstance(error, DivergenceError):  # to be asked for in another way
            del _unmade[key]
        given_up.append(True)
        while made:
            made.pop().close()
        raise
    del _unmade[key]
    (formed,) = made
    formed.register()
    _limits[formed.groups[name]] = patience
    _alive().extend(formed.groups.values())
    _made[base] = number
    own = Peers(
        *(
            name,
            len(ranks),
            rank,
            timeout,
            formed.shared,
            formed.nodes,
            formed.leaders,
            formed.note,
        ),
        cuda=cuda,
        patience=patience,
    )
    if own.note and rank == 0:
        _log.warning("exchanging over Gloo, not through shared memory: %s", own.note)
    _own_groups[key] = own
    if len(ranks) > 1:
        alone.found_others()
    whereabouts.watch(name, rank, len(ranks), formed.store, place)
    return own


def named(name: str) -> Peers:
    """The group of this package with that name, as traced graphs hold it."""
    for own in list(_own_groups.values()):
        if own.group_name == name:
            return own
    raise RuntimeError(
        f"syncbn: a graph was traced with the group {name!r}, which this process does not have; "
        "expected tracing after convert_sync_batchnorm or syncbn.prepare(model) in this process"
    )


def peers(sharing: Sharing, who: str | Callable[[], str] = "syncbn") -> Peers | None:
    """Whom to exchange with; None: nobody (no process group, or one rank). who: as in own_group."""
    asked = asked_of(sharing)
    if asked is None:
        return None
    return own_group(*asked, who)


def asked_of(sharing: Sharing) -> tuple[Key, float] | None:
    """The group that peers() gives, and its patience; None: nobody."""
    after_fork.check()
    if not _initialized():
        if sharing.name is not None:
            resolve(sharing.name)
        return None
    group = resolve(sharing.name)
    cuda = nccl_name(group)
    ranks, label = members(group, cuda)
    if len(ranks) == 1:
        return None
    patience = limit_of(group)
    timeout = patience if sharing.limit is None else sharing.limit
    if not _absent.isdisjoint(ranks):
        ranks = sorted(set(ranks) - _absent)
        if len(ranks) == 1:
            return None
        cuda = ""  # NCCL makes no group without the ranks that are absent
        key = tuple(ranks), timeout, sharing.engine, label, cuda
        if key not in _own_groups:
            _without_absent.append(key)
    return (tuple(sorted(ranks)), timeout, sharing.engine, label, cuda), patience


def size(sharing: Sharing) -> int:
    """How many ranks peers() would be, without making their group."""
    if not _initialized():
        if sharing.name is not None:
            resolve(sharing.name)
        return 1
    return len(set(global_ranks(resolve(sharing.name))) - _absent)


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _sees_nobody(sharing: Sharing) -> bool:
    """Whether there is none but this rank in the default group, if there is one, which the layer
    has because nobody chose another."""
    return sharing.name is None and not (_initialized() and resolve(None).size() > 1)


def beside(sharing: Sharing) -> str:
    """What tells that a layer without peers has others beside it by accident; "" if nothing."""
    return alone.beside() if _sees_nobody(sharing) else ""


def training_peers(sharing: Sharing, who: str | Callable[[], str]) -> Peers | None:
    """The peers() of a call that trains; warns once of others that it does not see."""
    found = peers(sharing, who)
    if found is None and not alone.looked and _sees_nobody(sharing):
        alone.look(who() if callable(who) else who, _initialized())
    return found


@torch.compiler.assume_constant_result
def peers_of(*sharing) -> Peers | None:
    """Of an operator that trains, by a Sharing's fields: one that traced code has made has none in
    PyTorch 2.15."""
    return training_peers(Sharing(*sharing), "syncbn.ops.batch_norm")


def leave_out(ranks: Iterable[int]) -> None:
    """From now on peers() are those of a layer's group that are not in `ranks` (global numbers).
    Called by all other ranks between the same two exchanges; drops the groups made since the call
    before."""
    global _absent
    after_fork.check()
    _absent = frozenset(ranks)
    while _without_absent:
        key = _without_absent.pop()
        _unmade.pop(key, None)
        if key in _own_groups:
            _drop(_own_groups.pop(key))


@functools.cache
def _label(name: str, cuda: str) -> str:
    """new_group counts or hashes alike on all ranks. Where NCCL splits a group, the hash has this
    rank's number of groups in it."""
    return name if re.fullmatch(r"\d+" if cuda else r"\d+|[0-9a-f]{40}", name) else ""


#: By the caller's group: its members' global numbers, and the label of one of ours.
_compared: "weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[list[int], str | None]]" = (
    weakref.WeakKeyDictionary()
)


def members(group: dist.ProcessGroup, cuda: str) -> tuple[list[int], str]:
    """Their global numbers, as torch.distributed lists them, and a label that tells the group from
    others of the same ranks, alike on all of them; groups whose names may differ between ranks
    share the label "". cuda: as nccl_name() has it. The numbers fit what the group says of itself:
    a library may have made it, or changed it since, without a word to torch.distributed."""
    found = _compared.get(group)
    if found is None or len(found[0]) != group.size():
        found = _compared[group] = _compare(group)
    ranks, label = found
    return ranks, _label(group.group_name, cuda) if label is None else label


def global_ranks(group: dist.ProcessGroup) -> list[int]:
    """Its members' global numbers."""
    return members(group, "")[0]


def _compare(group: dist.ProcessGroup) -> tuple[list[int], str | None]:
    for (members_of_ours, _, _, label, _), own in list(_own_groups.items()):
        if own.group_name == group.group_name:
            return list(members_of_ours), label
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


def _drop(own: Peers) -> None:
    whereabouts.forget(own.group_name)
    if own.shared is not None:
        shared_memory.close(own.shared)
    inside = f"{own.group_name}/"  # a node's, and that between nodes
    _alive()[:] = [g for g in _alive() if not f"{g.group_name}/".startswith(inside)]


def _by_digest(keys: Iterable[Key]) -> dict[str, Key]:
    """By what all ranks of a group call it, in one order on all of them."""
    found: dict[str, Key] = {}
    for key in sorted(keys):
        number = sum(other[:4] == key[:4] for other in found.values())
        found[hashlib.sha256(repr((key[:4], number)).encode()).hexdigest()[:16]] = key
    return found


def rebuild(sharings: dict[Sharing, str] | None = None) -> None:
    """Makes the groups of this package anew, also those that could not be made, of which all ranks
    know; a collective call of all ranks. sharings: those of layers, by which name; DivergenceError
    on all ranks if not all ranks of a group have such a layer."""
    after_fork.check()
    meeting.skip_failed = True
    for key in [key for key, own in _own_groups.items() if not exists(own.group_name)]:
        _drop(_own_groups.pop(key))  # it went with destroy_process_group
    if not (dist.is_available() and dist.is_initialized()):
        _unmade.clear()
        return
    world, who = dist.get_world_size(), "syncbn.reset_groups"
    keys = _by_digest(key for key in {*_own_groups, *_unmade} if max(key[0]) < world)
    found = ((asked_of(sharing), name) for sharing, name in (sharings or {}).items())
    names = {asked[0]: name for asked, name in found if asked is not None}
    needs = {
        digest: (
            len(key[0]),
            f"{names[key]}, timeout={key[1]:g}, engine={key[2]!r}, {len(key[0])} ranks",
        )
        for digest, key in _by_digest(names).items()
    }
    value = {digest: len(key[0]) for digest, key in keys.items()}, needs
    limit = limit_of(resolve(None))
    offer = meeting.Offer(who, value=value)
    told = meeting.meet("syncbn/reset", tuple(range(world)), dist.get_rank(), limit, offer)
    lines = []
    for digest, (number, text) in dict(item for _, own in told for item in own.items()).items():
        ranks = [rank for rank, (_, own) in enumerate(told) if digest in own]
        if len(ranks) < number:
            lines.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}")
    if lines:
        text = "; ".join(sorted(lines))
        raise DivergenceError(
            f"{who}, rank {dist.get_rank()} of {world}: the ranks ask for different exchanges: "
            f"{text}; not all ranks of the group have such a layer"
        )
    old = {key: _own_groups.pop(key) for key in list(_own_groups)}
    _unmade.update((key, own.patience) for key, own in old.items())
    common = [k for d, k in keys.items() if sum(d in own for own, _ in told) == len(k[0])]
    for key in _unmade.keys() - common:
        del _unmade[key]
        if key in old:
            _drop(old[key])
        _log.warning("%s: forgets a group that not all of its ranks have: %s", who, key)
    for key in common:
        if key in old:
            _drop(old[key])
        new = own_group(key, _unmade[key], who)
        if key in old:
            _renamed[old[key].group_name] = new.group_name
