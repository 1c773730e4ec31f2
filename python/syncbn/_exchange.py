"""Groups of ranks, and the one message per direction that they exchange."""

import datetime
from typing import NamedTuple

import torch
import torch.distributed as dist

from ._ops import DTYPES, HEADER_WORDS, ops
from .errors import DivergenceError

#: How long an exchange waits for the slowest rank.
DEFAULT_TIMEOUT = datetime.timedelta(minutes=5)

#: Words of the first message of an exchange over Gloo, the same for every call of the group: Gloo
#: ends the process when ranks bring different lengths, so lengths may differ only after the first
#: message has shown that the calls agree. 512 channels of float32 fit.
FRAME_WORDS = HEADER_WORDS + 512 * 19

Group = dist.ProcessGroup | str | None


class Peers(NamedTuple):
    """The ranks that share a layer's statistics: a group of this module's own, by name."""

    group_name: str
    ranks: int
    rank: int  # this process's


# Names of the groups that this module made, by their ranks (global numbers, ascending).
_own_groups: dict[tuple[int, ...], str] = {}


def group_name(group: Group) -> str | None:
    """The name under which torch.distributed knows the group; None stays None (the world)."""
    if group is None or isinstance(group, str):
        return group
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group: got a group that this rank is not a member of, expected one of its own"
        )
    return group.group_name


def resolve(name: str | None) -> dist.ProcessGroup:
    """The process group of that name in this process; None is the world."""
    if name is None:
        return dist.group.WORLD
    try:
        return dist.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, LookupError) as error:
        raise RuntimeError(
            f"process_group: no process group named {name!r} in this process; was it destroyed, or "
            "the layer loaded in another job? Convert the model again with the group to use."
        ) from error


def _exists(name: str) -> bool:
    try:
        dist.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, LookupError):
        return False
    return True


def _own_group(group: dist.ProcessGroup) -> str:
    """A Gloo group of the same ranks for exchanges alone, so that one that times out does not take
    the user's group with it. Made once per set of ranks; a collective call of its members."""
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    name = _own_groups.get(ranks)
    if name is not None and _exists(name):
        return name
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "syncbn: the group of this layer is not made yet and cannot be made while compiling: "
            "convert the model after init_process_group, or run one eager training step first"
        )
    made = dist.new_group(
        list(ranks), timeout=DEFAULT_TIMEOUT, backend="gloo", use_local_synchronization=True
    )
    _own_groups[ranks] = made.group_name
    return made.group_name


@torch.compiler.assume_constant_result
def peers(name: str | None) -> Peers | None:
    """Whom to exchange with; None: nobody (no process group, or one rank).
    name: a process group's name, None for the world."""
    if not (dist.is_available() and dist.is_initialized()):
        if name is not None:
            resolve(name)
        return None
    group = resolve(name)
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return None
    return Peers(_own_group(group), ranks, dist.get_rank(group))


def frame_words(group: Peers | None) -> int:
    """At least how many words a message to that group has."""
    return 0 if group is None else FRAME_WORDS


def _all_reduce(words: torch.Tensor, name: str) -> torch.Tensor:
    """Out of place: backward needs the rank's own words too."""
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_reduce(words, "sum", name))


def exchange(
    message: torch.Tensor, channels: int, group: Peers | None, layer_name: str
) -> tuple[torch.Tensor, torch.Tensor | None, int | None]:
    """Sums a message over the group.

    Returns (first part, the words beyond the frame or None, count). The count (elements per channel
    over all ranks) is None while tracing. Raises DivergenceError on every rank if the calls differ.
    """
    if group is None:
        count = None if torch.compiler.is_compiling() else int(message[0])
        return message, None, count
    first = _all_reduce(message[:FRAME_WORDS], group.group_name)
    if torch.compiler.is_compiling():
        # Operators that take `first` check its header, remaining_words before a second message.
        beyond = message.numel() - FRAME_WORDS
        if beyond <= 0:
            return first, None, None
        rest = ops.remaining_words(message, first, group.ranks, channels, beyond)
        return first, _all_reduce(rest, group.group_name), None
    count, _ = _check(first, group, layer_name)
    rest = ops.remaining_words(message, first, group.ranks, channels, -1)
    if rest.numel() == 0:
        return first, None, count
    return first, _all_reduce(rest, group.group_name), count


def gather(
    message: torch.Tensor, channels: int, group: Peers | None, layer_name: str
) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """Brings every rank's record of the welford mode to all ranks.

    Records travel in the one frame of all exchanges, each rank's in a place of its own where the
    others add zeros; if they do not fit, in an all-gather after it.

    Returns (merged message, whose header counts; records, one after the other; count as in
    exchange). Raises DivergenceError on every rank if the calls differ.
    """
    compiling = torch.compiler.is_compiling()
    record = message[HEADER_WORDS:]
    if group is None:
        return message, record, None if compiling else int(message[0])
    size = record.numel()
    frame = torch.zeros(FRAME_WORDS, dtype=torch.int64, device=message.device)
    frame[:HEADER_WORDS] = message[:HEADER_WORDS]
    # By the largest record: a rank without samples may be of another dtype than the group.
    fits = HEADER_WORDS + group.ranks * (1 + 2 * channels) <= FRAME_WORDS
    if fits:
        begin = HEADER_WORDS + group.rank * size
        frame[begin : begin + size] = record
    first = _all_reduce(frame, group.group_name)
    count = None
    if not compiling:
        count, dtype = _check(first, group, layer_name)
        if dtype is not None:
            size = 1 + channels * (2 if dtype == torch.float64 else 1)
    if fits:
        return first, first[HEADER_WORDS : HEADER_WORDS + group.ranks * size], count
    # Checks the header, also in a traced graph, before there is a second message.
    whole = torch.cat([frame, record])
    record = ops.remaining_words(whole, first, group.ranks, channels, size)
    collectives = torch.ops._c10d_functional
    gathered = collectives.all_gather_into_tensor(record, group.ranks, group.group_name)
    return first, collectives.wait_tensor(gathered), count


def _check(merged: torch.Tensor, group: Peers, layer_name: str) -> tuple[int, torch.dtype | None]:
    """The count, and the dtype of the ranks with samples, if any; raises if the calls differ."""
    count, agree, rejected, dtype = ops.header(merged, group.ranks).tolist()
    where = f"{layer_name}, rank {group.rank} of {group.ranks}"
    if rejected:
        raise DivergenceError(f"{where}: a rank refused its input; that rank's own error says why")
    if not agree:
        raise DivergenceError(
            f"{where}: the ranks did not make the same call; layer, call number, direction, number "
            "of channels, eps and dtype must be equal on all of them"
        )
    return count, None if dtype < 0 else DTYPES[dtype]


def sum_of_ranks(x: torch.Tensor, tag: int, group: Peers | None, name: str) -> torch.Tensor:
    """The sum of x over the group; tag: 20 bits that are equal on ranks whose x may be summed.

    Raises DivergenceError on every rank if they differ: a message of the frame's length goes first.
    """
    if group is None:
        return x
    message = torch.zeros(FRAME_WORDS, dtype=torch.int64)
    message[1], message[2] = tag, tag * tag
    _check(_all_reduce(message, group.group_name), group, name)
    return _all_reduce(x.contiguous(), group.group_name)


def reject(like: torch.Tensor, group: Peers | None) -> None:
    """Takes part in an exchange with the word that this rank cannot, so that the others get an
    error now and not when their time is up."""
    if group is not None:
        _all_reduce(ops.rejection(like, FRAME_WORDS), group.group_name)
