"""Groups of ranks that exchange statistics: made once per set of ranks, and rebuilt on demand."""

import datetime
import math
import socket
from typing import NamedTuple

import torch
import torch.distributed as dist

from . import _where

#: Seconds that an exchange waits for the slowest rank.
DEFAULT_TIMEOUT = 300.0

Group = dist.ProcessGroup | str | None


class Sharing(NamedTuple):
    """With whom a layer shares statistics, as a module keeps it: names, not handles.

    name: a process group's name, None for the world. timeout: seconds.
    """

    name: str | None = None
    timeout: float = DEFAULT_TIMEOUT


class Peers(NamedTuple):
    """The ranks that share a layer's statistics: a group of this package's own, by name."""

    group_name: str
    ranks: int
    rank: int  # this process's
    timeout: float

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}"


# Names of the groups that this module made, by their ranks (global numbers, ascending) and timeout.
_own_groups: dict[tuple[tuple[int, ...], float], str] = {}

# New names of groups that were made again.
_renamed: dict[str, str] = {}


def group_name(group: Group) -> str | None:
    """The name under which torch.distributed knows the group; None stays None (the world)."""
    if group is None or isinstance(group, str):
        return group
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group: got a group that this rank is not a member of, expected one of its own"
        )
    return group.group_name


def sharing(group: Group, timeout: float | datetime.timedelta | None) -> Sharing:
    """Checked."""
    if timeout is None:
        timeout = DEFAULT_TIMEOUT
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if not (isinstance(seconds, (int, float)) and 0 < seconds < math.inf):
        raise ValueError(
            f"timeout: got {timeout!r}, expected a positive number of seconds or a timedelta"
        )
    return Sharing(group_name(group), float(seconds))


def select(
    process_group: Group,
    group_size: int | None,
    group: str | None,
    timeout: float | datetime.timedelta | None,
) -> Sharing:
    """The ranks that one of process_group, group_size and group asks for. With the latter two a
    collective call of the default group's ranks."""
    given = [
        f"{name}={value!r}"
        for name, value in (
            ("process_group", process_group),
            ("group_size", group_size),
            ("group", group),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise ValueError(f"got {' and '.join(given)}, expected only one of them")
    chosen = sharing(process_group, timeout)
    if process_group is not None or not given:
        return chosen
    if group is not None and group != "node":
        raise ValueError(f"group: got {group!r}, expected 'node'")
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"got {given[0]} without a process group, expected init_process_group first"
        )
    rank, world = dist.get_rank(), dist.get_world_size()
    if group is not None:
        hosts = _gather_text(host_name())
        ranks = [r for r in range(world) if hosts[r] == hosts[rank]]
    else:
        if not isinstance(group_size, int) or group_size < 1 or world % group_size:
            raise ValueError(
                f"group_size: got {group_size!r}, expected a divisor of the {world} ranks"
            )
        first = rank - rank % group_size
        ranks = list(range(first, first + group_size))
    return chosen._replace(name=_own_group(ranks, chosen.timeout))


def host_name() -> str:
    """What ranks of one machine have in common."""
    return socket.gethostname()


_gathered = 0


def _gather_text(text: str) -> list[str]:
    """Every rank's text, through the store: on every backend, without a device."""
    global _gathered
    _gathered += 1
    store = dist.distributed_c10d._get_default_store()
    keys = [f"syncbn/text/{_gathered}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], text)
    return [store.get(key).decode() for key in keys]


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


def _exists(name: str) -> bool:
    try:
        dist.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, LookupError):
        return False
    return True


def _own_group(group_ranks: list[int], timeout: float) -> str:
    """A Gloo group of the same ranks for exchanges alone, so that one that times out does not take
    the user's group with it. Made once per set of ranks; a collective call of its members."""
    ranks = tuple(sorted(group_ranks))
    name = _own_groups.get((ranks, timeout))
    if name is not None and _exists(name):
        return name
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "syncbn: the group of this layer is not made yet and cannot be made while compiling: "
            "convert the model after init_process_group, run one eager training step, or call "
            "syncbn.prepare(model) first"
        )
    made = dist.new_group(
        list(ranks),
        timeout=datetime.timedelta(seconds=timeout),
        backend="gloo",
        use_local_synchronization=True,
    )
    _own_groups[ranks, timeout] = made.group_name
    _where.watch(made.group_name, dist.get_rank(made), len(ranks))
    return made.group_name


@torch.compiler.assume_constant_result
def peers(sharing: Sharing) -> Peers | None:
    """Whom to exchange with; None: nobody (no process group, or one rank)."""
    if not (dist.is_available() and dist.is_initialized()):
        if sharing.name is not None:
            resolve(sharing.name)
        return None
    group = resolve(sharing.name)
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return None
    own = _own_group(dist.get_process_group_ranks(group), sharing.timeout)
    return Peers(own, ranks, dist.get_rank(resolve(own)), sharing.timeout)


def rebuild() -> None:
    """Makes every group of this package anew; a collective call of the ranks of each."""
    old = sorted(_own_groups.items())  # one order on all ranks, so that none waits in a circle
    _own_groups.clear()
    for (ranks, timeout), name in old:
        _where.forget(name)
        # The old group stays until destroy_process_group: its name, and with it what it left in
        # the store, must not be taken again.
        _renamed[name] = _own_group(list(ranks), timeout)
