# SPDX-License-Identifier: Apache-2.0
"""Groups whose GPUs exchange by themselves, in memory that all of them reach: how the ranks agree
on that, once for each group, and what they have of it."""

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import operators_cuda
from ..errors import ExchangeTimeout, PeerLost
from ..operators import HEADER_WORDS, ops
from . import peer_memory, shared_memory

#: Blocks of the kernel that exchanges. All of them wait at the same time, and fit every GPU that
#: load_peer_exchange() takes; whatever else a GPU has to do is over by itself.
BLOCKS = 8
#: Of one block's part of a message: 2,048 channels of float32 go at once, more in several rounds.
SLOT_WORDS = 1 + HEADER_WORDS + 256 * 19
#: Seconds that exchanges have to end when a rank leaves a group.
SETTLING = 5.0
#: As the kernels have room for pointers.
MOST_RANKS = 16


class Met(NamedTuple):
    """What a rank has of a group whose devices exchange. state: counts exchanges, on the device.
    mark: on the host, where a kernel says that one has failed. last: the stream of the last one, by
    whether it was captured."""

    rank: int
    ranks: int
    device: torch.device
    memory: peer_memory.PeerMemory
    state: torch.Tensor
    mark: torch.Tensor
    abort_word: int
    words: dict[float, torch.Tensor]
    last: dict[bool, Any]

    def group(self, limit: float) -> torch.Tensor:
        """As operators take it; limit: seconds that an exchange waits."""
        if limit not in self.words:
            given = (self.state.data_ptr(), self.mark.data_ptr(), *self.memory.pointers)
            fields = (self.rank, self.ranks, BLOCKS, SLOT_WORDS, int(limit * 1e9), *given)
            self.words[limit] = torch.tensor(fields, dtype=torch.int64, device="cpu")
        return self.words[limit]

    def failure(self) -> tuple[type[Exception], str] | None:
        """What the mark says, if an exchange has failed."""
        gave_up, *epochs = self.mark.tolist()
        if gave_up == 0:
            return None
        if gave_up < 0:
            return PeerLost, f"rank {-1 - gave_up} left the group"
        late = ", ".join(str(rank) for rank, epoch in enumerate(epochs) if epoch != 0)
        who = f"rank {late} did not come" if late else f"rank {gave_up - 1} gave up"
        return ExchangeTimeout, who

    def follow(self) -> None:
        """Has the current stream wait for the exchange before, if that was on another one. In a
        capture only for those of the same capture."""
        if self.device.type != "cuda":
            return
        current = torch.cuda.current_stream(self.device)
        captures = _captures(current)
        last = self.last.get(captures, current)
        if last != current and _captures(last) == captures:
            current.wait_stream(last)
        self.last[captures] = current

    def abort(self, ranks: Iterable[int]) -> None:
        """Ends what kernels of these ranks wait for, and all that come later."""
        # On a stream of its own: this rank's exchange may be one of those that wait.
        side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        with torch.cuda.stream(side):
            for rank in ranks:
                self.memory.words_of(rank, self.abort_word, 1).fill_(-1 - self.rank)

    def settle(self) -> None:
        """Returns when this rank's kernels are done with the memory, and none takes it any more.
        Those that still wait for others after some seconds are ended."""
        events = [stream.record_event() for stream in self.last.values() if not _captures(stream)]
        until = time.monotonic() + SETTLING
        while not all(event.query() for event in events):
            if time.monotonic() > until:
                self.abort([self.rank])
                break
            time.sleep(1e-3)
        # A graph that was captured can still be replayed. Its exchanges look here first, and end.
        self.state[-1:].fill_(1)
        _states.append(self.state)
        _finish(self.device)


def _captures(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


# By the group's name; of groups that are left, where peers may still write; and the ranks (global
# numbers) of both.
_met: dict[str, Met] = {}
_left: dict[str, Met] = {}
_ranks: dict[str, tuple[int, ...]] = {}
# Of all groups that were left, for ever: 80 bytes each.
_states: list[torch.Tensor] = []


def met(group: str) -> Met | None:
    """What this rank has of the group of that name, if its devices exchange."""
    return _met.get(group)


def all_met() -> list[tuple[str, Met]]:
    """By the groups' names."""
    return list(_met.items())


def begin(group: str, ranks: tuple[int, ...], new: Met | None) -> None:
    """The ranks (global numbers) have made a group: all of them have left what they had before."""
    for old in [name for name in _left if _ranks[name] == ranks]:
        del _left[old], _ranks[old]
    if new is not None:
        _met[group], _ranks[group] = new, ranks


def end(group: str) -> None:
    """This rank leaves the group. Its memory stays until the same ranks have made another one."""
    if group in _met:
        _left[group] = _met.pop(group)
        _left[group].settle()


def current_device() -> torch.device | None:
    """Of this thread, if operators work there."""
    if operators_cuda.why_not() is not None:
        return None
    return torch.device("cuda", torch.cuda.current_device())


def _gpu(device: torch.device | int) -> str:
    """What tells it from others."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _check_reach(device: torch.device, gpus: Sequence[str]) -> None:
    """Raises RuntimeError where the device cannot reach another one of the GPUs."""
    if device.type == "cuda":
        for other in range(torch.cuda.device_count()):
            if other == device.index or _gpu(other) not in gpus:
                continue
            if not torch.cuda.can_device_access_peer(device, other):
                raise RuntimeError(f"{device} cannot reach the memory of cuda:{other}")


def _refusal(ranks: int, nodes: int, device: torch.device | None) -> str:
    """Why this rank cannot, before it tries."""
    if nodes > 1:
        return f"the ranks are on {nodes} nodes"
    if ranks > MOST_RANKS:
        return f"{ranks} ranks are more than {MOST_RANKS}"
    if device is None:
        return operators_cuda.why_not() or "no device"
    return peer_memory.why_not()


class _Refused(Exception):
    """Some rank cannot; raised on all of them."""


class _Meeting:
    """The ranks that try to meet, over a Gloo group of theirs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def agree(self, why: str, said: str = "") -> list[str]:
        """What all ranks say. Raises _Refused if one of them has a reason."""
        lines = shared_memory.gather_texts(f"!{why}" if why else f"={said}", self.group)
        for rank, line in enumerate(lines):
            if line.startswith("!"):
                raise _Refused(f"rank {rank}: {line[1:]}")
        return [line[1:] for line in lines]

    def try_together(self, step: Any) -> Any:
        """What step() gives on this rank, if it raises on none."""
        result, why = None, ""
        try:
            result = step()
        except Exception as error:  # the others wait for what this rank says
            why = next(iter(str(error).splitlines()), "") or type(error).__name__
        self.agree(why)
        return result


def meet(
    name: str,
    group: dist.ProcessGroup,
    nodes: int,
    store: dist.Store,
    device: torch.device | None,
) -> tuple[Met | None, str]:
    """Memory for the ranks of a Gloo group: on every rank what it has of it; or on every rank None
    and, in a line, why not. A collective call. name: of the group. device: this rank's."""
    meeting = _Meeting(group)
    rank, ranks = group.rank(), group.size()
    try:
        why = _refusal(ranks, nodes, device)
        gpus = meeting.agree(why, "" if why or device is None else _gpu(device))
        for r, gpu in enumerate(gpus):
            if gpu in gpus[:r]:
                raise _Refused(f"ranks {gpus.index(gpu)} and {r} share a GPU")
        assert device is not None
        # The caller may be another thread than the one whose device it is.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            meeting.try_together(lambda: _check_reach(device, gpus))
            return _meet_on(device, name, rank, ranks, store, meeting), ""
    except _Refused as refused:
        return None, str(refused)


def _meet_on(
    device: torch.device, name: str, rank: int, ranks: int, store: dist.Store, meeting: _Meeting
) -> Met:
    def prepare() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        operators_cuda.load()
        words, of_state, of_mark, abort_word = ops.peer_words(ranks, BLOCKS, SLOT_WORDS)
        own = peer_memory.allocate(words, device, name)
        ops.load_peer_exchange(own, BLOCKS)
        state = torch.zeros(of_state, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        mark = torch.zeros(of_mark, dtype=torch.int64, device="cpu", pin_memory=pinned)
        _finish(device)
        return own, state, mark, abort_word

    def greet() -> None:
        """Each rank's number into every other's memory, to see that it arrives."""
        for other in range(ranks):
            memory.words_of(other, rank, 1).fill_(1 + rank)
        _finish(device)

    def read() -> None:
        said = own[:ranks].tolist()
        if said != list(range(1, 1 + ranks)):
            raise RuntimeError(f"its memory has {said} of the ranks' numbers")
        own.zero_()
        _finish(device)

    own, state, mark, abort_word = meeting.try_together(prepare)
    memory = meeting.try_together(lambda: peer_memory.share(own, name, rank, ranks, store))
    meeting.try_together(greet)
    meeting.try_together(read)
    return Met(rank, ranks, device, memory, state, mark, abort_word, {}, {})


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
