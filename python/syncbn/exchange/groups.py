# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks that exchange statistics: made once per group of the caller's, rebuilt on demand,
and parts of the default group where group_size or group asks for them."""

import contextlib
import datetime
import hashlib
import logging
import os
import socket
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from ..errors import DivergenceError
from ..operators import ops, without_modes
from . import callers, connections, failing, meeting
from .call import Peers
from .callers import Sharing, initialized, limit_of, resolve

_log = logging.getLogger("syncbn")

#: Of a group that this module makes: its ranks (global numbers, ascending), timeout, engine, the
#: caller's group as all its ranks name it, and the name of the group for CUDA tensors, which takes
#: no part in making it.
Key = tuple[tuple[int, ...], float, str, str, str]

_own_groups: dict[Key, Peers] = {}


class _Usual(NamedTuple):
    """The ranks that training calls found, while the caller's group is the same object, of as many
    ranks."""

    group: "weakref.ref[dist.ProcessGroup]"
    size: int
    own: Peers


_usual: dict[Sharing, _Usual] = {}
os.register_at_fork(after_in_child=_usual.clear)  # which has no part in them

# The last number in a name that begins like this: a name must never come twice.
_made: dict[str, int] = {}
# Groups that could not be made, as in _own_groups, with the patience of each.
_unmade: dict[Key, float] = {}

# Ranks (global numbers) that take part in no exchange for now, and the groups without them.
_absent: frozenset[int] = frozenset()
_without_absent: list[Key] = []

#: Whether nothing is left to be said of training alone; and whether this process had a group of
#: several ranks.
looked = _had_others = False


def node_identity() -> str:
    """Gives what ranks that may share memory have in common."""
    return meeting.node_identity() or f"{socket.gethostname()}, process {os.getpid()}"


def own_group(key: Key, patience: float, who: str | Callable[[], str] = "syncbn") -> Peers:
    """Gives a group of the same ranks for exchanges alone, so that one that times out does not take
    the user's group with it. It is made once per group of the user's, by all members together.
    patience: the limit of the user's group, in seconds. who: for errors, the layer or function that
    needs the group, or what finds out.

    Raises ExchangeTimeout, PeerLost or DivergenceError on every rank if it cannot be made.
    """
    global looked, _had_others
    callers.check_fork()
    known = _own_groups.get(key)
    if known is not None:
        if callers.exists(known.group_name):
            return known
        _forget(key)  # it went with destroy_process_group
    ranks, timeout, engine, label, cuda = key
    patience = max(timeout, patience)
    share = engine != "process_group" and len(ranks) > 1
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
        connect = failing.connection
        made.append(connections.make(name, place, rank, nodes, limit, connect, share))
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
        name, number, place = meeting.meet(topic, ranks, rank, patience, offer, make, form=(0, ""))
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
    callers.keep(formed.groups[name], patience, list(ranks), label)
    failing.kept("groups").extend(formed.groups.values())
    _made[base] = number
    own = Peers(name, len(ranks), rank, timeout, *formed[2:], patience, cuda)
    if own.note and rank == 0:
        _log.warning("exchanging over Gloo, not through shared memory: %s", own.note)
    for old in [old for old in _own_groups if callers.outlived(old[3])]:
        _forget(old)
    _own_groups[key] = own
    if len(ranks) > 1:
        looked, _had_others = False, True
    failing.watch(own, formed.store, place)
    return own


def named(name: str) -> Peers:
    """Finds the group of this package with that name, as traced graphs hold it."""
    for own in list(_own_groups.values()):
        if own.group_name == name:
            return own
    raise RuntimeError(
        f"syncbn: a graph was traced with the group {name!r}, which this process does not have; "
        "expected tracing after convert_sync_batchnorm or syncbn.prepare(model) in this process"
    )


def peers(sharing: Sharing, who: str | Callable[[], str] = "syncbn") -> Peers | None:
    """Finds whom to exchange with; None: nobody (no process group, or one rank). who: as in
    own_group."""
    asked = asked_of(sharing)
    if asked is None:
        return None
    return own_group(*asked, who)


def made(sharing: Sharing) -> Peers | None:
    """Finds those of peers() whose group is there, without making it."""
    with contextlib.suppress(RuntimeError):  # the caller's group is gone
        asked = asked_of(sharing)
        return None if asked is None else _own_groups.get(asked[0])
    return None


def is_made_ahead(sharing: Sharing) -> bool:
    """Tells whether converting a model makes the group of peers(), by all its ranks together. One
    that changes in place is made by a training call, because who converts may join ranks that
    train."""
    return sharing.name != callers.OUTSIDE and not callers.changes(resolve(sharing.name))


def asked_of(sharing: Sharing) -> tuple[Key, float] | None:
    """Describes the group that peers() gives, and its patience; None: nobody."""
    callers.check_fork()
    if not initialized():
        if sharing.name is not None:
            resolve(sharing.name)
        return None
    group = resolve(sharing.name)
    cuda = callers.nccl_name(group)
    ranks, label = callers.members(group, cuda)
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
    """Counts the ranks that peers() would be, without making their group."""
    asked = asked_of(sharing)
    return 1 if asked is None else len(asked[0][0])


def _sees_nobody(sharing: Sharing) -> bool:
    """Tells whether there is none but this rank in the default group, if there is one, which the
    layer has because nobody chose another."""
    return sharing.name is None and not (initialized() and resolve(None).size() > 1)


def beside(sharing: Sharing) -> str:
    """Says what tells that a layer without peers has others beside it by accident, or ""."""
    return callers.others_beside() if _sees_nobody(sharing) else ""


def training_peers(sharing: Sharing, who: str | Callable[[], str]) -> Peers | None:
    """Finds the peers() of a call that trains; warns once of others that it does not see."""
    global looked
    if (usual := _usual.get(sharing)) is not None:
        known = usual.group()
        if known is not None and known is resolve(sharing.name) and known.size() == usual.size:
            return usual.own
    if looked and sharing.name is None and not initialized():
        return None
    found = peers(sharing, who)
    if found is not None and not callers.changes(group := resolve(sharing.name)):
        _usual[sharing] = _Usual(weakref.ref(group), group.size(), found)
    if found is None and not looked and _sees_nobody(sharing):
        looked = True
        gone = _had_others and not initialized()
        why = "the process group with others was destroyed" if gone else callers.others_beside()
        if why:
            who = who() if callable(who) else who
            warnings.warn(f"{who}: {callers.alone_text(why)}", stacklevel=2)
    return found


@torch.compiler.assume_constant_result
def peers_of(*sharing) -> Peers | None:
    """Finds those of an operator that trains, by a Sharing's fields: a Sharing that traced code has
    made has none in PyTorch 2.15."""
    return training_peers(Sharing(*sharing), "syncbn.ops.batch_norm")


def without_absent() -> list[Peers]:
    """Lists the groups that the next leave_out() drops."""
    return [_own_groups[key] for key in _without_absent if key in _own_groups]


def leave_out(ranks: Iterable[int]) -> None:
    """Leaves ranks (global numbers) out of what peers() gives from now on. It is called by all
    other ranks between the same two exchanges; drops the groups made since the call before."""
    global _absent
    callers.check_fork()
    _usual.clear()
    _absent = frozenset(ranks)
    while _without_absent:
        _forget(_without_absent.pop())


def _forget(key: Key) -> None:
    """Drops the group, if it was made."""
    _usual.clear()
    _unmade.pop(key, None)
    own = _own_groups.pop(key, None)
    if own is None:
        return
    failing.forget(own.group_name)
    if own.shared is not None:
        ops.shm_leave(own.shared)
    inside = f"{own.group_name}/"  # a node's, and that between nodes
    alive = failing.kept("groups")
    alive[:] = [group for group in alive if not f"{group.group_name}/".startswith(inside)]


def _by_digest(keys: Iterable[Key]) -> dict[str, Key]:
    """Sorts keys by what all ranks of a group call it, in one order on all of them."""
    found: dict[str, Key] = {}
    for key in sorted(keys):
        number = sum(other[:4] == key[:4] for other in found.values())
        found[hashlib.sha256(repr((key[:4], number)).encode()).hexdigest()[:16]] = key
    return found


def rebuild(sharings: dict[Sharing, str] | None = None) -> None:
    """Makes the groups of this package anew, also those that could not be made, of which all ranks
    know. All ranks call it together. sharings: those of layers, by which name; DivergenceError on
    all ranks if not all ranks of a group have such a layer."""
    callers.check_fork()
    for key in [key for key, own in _own_groups.items() if not callers.exists(own.group_name)]:
        _forget(key)  # it went with destroy_process_group
    if not initialized():
        _unmade.clear()
        return
    world, who = dist.get_world_size(), "syncbn.reset_groups"
    for key in [key for key in {*_own_groups, *_unmade} if callers.outlived(key[3])]:
        _forget(key)
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
    everybody = tuple(range(world)), dist.get_rank()
    form = {"": 0}, {"": (0, "")}
    told = meeting.meet("syncbn/reset", *everybody, limit, offer, begins_anew=True, form=form)
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
    common = [k for d, k in keys.items() if sum(d in own for own, _ in told) == len(k[0])]
    for key in {*_own_groups, *_unmade}.difference(common):
        _forget(key)
        _log.warning("%s: forgets a group that not all of its ranks have: %s", who, key)
    old = _own_groups.copy()
    patience = _unmade | {key: own.patience for key, own in old.items()}
    for key in common:
        _forget(key)
    _unmade.update(patience)
    for key in common:
        new = own_group(key, patience[key], who)
        if key in old:
            callers.renamed[old[key].group_name] = new.group_name


#: Which ranks of the default group share statistics: those of one machine.
Part = Literal["node"]

# NCCL groups that group_size and group asked for, by all ranks of the default group in parts.
_nccl_groups: dict[tuple[tuple[int, ...], ...], str] = {}


def choose(
    process_group: callers.Group,
    group_size: int | None,
    group: Part | None,
    timeout: float | datetime.timedelta | None,
    engine: callers.EngineName = "auto",
    who: str = "syncbn",
) -> Sharing:
    """Finds the ranks that one of process_group, group_size and group asks for. For the latter two
    all ranks of the default group call it together. who: asks, as errors of that name it."""
    asked = {"process_group": process_group, "group_size": group_size, "group": group}
    given = [f"{name}={value!r}" for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"got {' and '.join(given)}, expected only one of them")
    chosen = callers.sharing(process_group, timeout, engine)
    if process_group is not None or not given:
        return chosen
    if group is not None and group != "node":
        raise ValueError(f"group: got {group!r}, expected 'node'")
    if not initialized():
        raise ValueError(
            f"got {given[0]} without a process group, expected init_process_group first"
        )
    with without_modes():
        return _choose_part(chosen, group_size, group, who)


def _choose_part(chosen: Sharing, group_size: int | None, group: Part | None, who: str) -> Sharing:
    patience = limit_of(resolve(None))
    rank, world = dist.get_rank(), dist.get_world_size()
    if group is not None:
        hosts = gather_text(socket.gethostname(), who)
        parts = [[r for r in range(world) if hosts[r] == host] for host in dict.fromkeys(hosts)]
    else:
        if not isinstance(group_size, int) or group_size < 1 or world % group_size:
            raise ValueError(
                f"group_size: got {group_size!r}, expected a divisor of the {world} ranks"
            )
        parts = [list(range(r, r + group_size)) for r in range(0, world, group_size)]
    if callers.nccl_name(resolve(None)):
        return chosen._replace(name=_nccl_part(parts, rank))
    ranks = next(part for part in parts if rank in part)
    label = callers.members(resolve(None), "")[1]
    limit = patience if chosen.limit is None else chosen.limit
    own = own_group((tuple(ranks), limit, chosen.engine, label, ""), patience, who)
    return chosen._replace(name=own.group_name)


def _nccl_part(parts: list[list[int]], rank: int) -> str:
    """Names the group of this rank's part, which PyTorch makes, for NCCL."""
    key = tuple(map(tuple, parts))
    if key not in _nccl_groups or not callers.exists(_nccl_groups[key]):
        made = [dist.new_group(part) for part in parts]
        _nccl_groups[key] = next(g for g, part in zip(made, parts) if rank in part).group_name
    return _nccl_groups[key]


def gather_text(text: str, who: str) -> list[str]:
    """Gives every rank's text, through the store: on every backend, without a device."""
    ranks, limit = tuple(range(dist.get_world_size())), limit_of(resolve(None))
    offer = meeting.Offer(who, f"texts of {who}", text)
    return meeting.meet("syncbn/text", ranks, dist.get_rank(), limit, offer, form="")
