"""The one operation of an exchange: int64 words summed over a group, with errors that say who is
missing."""

import threading
import time

import torch
import torch.distributed as dist

from . import _forked, _groups, _shared_memory, _where
from ._ops import ops
from ._where import Call
from .errors import ExchangeTimeout, PeerLost

# Why groups cannot be used any more.
_broken: dict[str, str] = {}
# The threads that exchange now, by group.
_threads: dict[str, int] = {}

#: Rounds of looking before the wait begins to sleep.
_SPINS = 100


class LengthsDiffer(Exception):
    """The ranks brought messages of different lengths; raised on all of them."""


def all_reduce(words: torch.Tensor, peers: _groups.Peers, call: Call) -> torch.Tensor:
    """The sum over the ranks, a tensor of its own: backward needs the rank's own words too. Where
    peers.any_length, raises LengthsDiffer; otherwise lengths must be equal."""
    if peers.shared is not None:
        return _all_reduce_by_node(words, peers, call)
    return sum_over_gloo(words, peers, call)


def sum_over_gloo(x: torch.Tensor, peers: _groups.Peers, call: Call) -> torch.Tensor:
    """The sum of tensors of any dtype, equal in shape on all ranks."""
    total = x.clone()
    with _exchanging(peers, call) as fail:
        _wait(_groups.resolve(peers.group_name).allreduce([total]), peers, fail)
    return total


def sum_in_stream_order(x: torch.Tensor, peers: _groups.Peers) -> torch.Tensor:
    """The sum of tensors on CUDA, of equal shape, over the caller's own NCCL group. The host waits
    for nothing and knows of no error: they are NCCL's and its watchdog's."""
    total = x.clone()
    dist.all_reduce(total, group=_groups.resolve(peers.cuda))
    return total


def gather_in_stream_order(x: torch.Tensor, peers: _groups.Peers) -> torch.Tensor:
    """As sum_in_stream_order, the ranks' tensors of one axis as rows."""
    whole = x.new_empty(peers.ranks * x.numel())
    dist.all_gather_into_tensor(whole, x, group=_groups.resolve(peers.cuda))
    return whole.view(peers.ranks, -1)


def _all_reduce_by_node(words: torch.Tensor, peers: _groups.Peers, call: Call) -> torch.Tensor:
    """Inside the node; then between the nodes' first ranks, who bring the sum to the others."""
    with _exchanging(peers, call) as fail:
        total = _sum_inside(words, peers, fail)
        if peers.nodes == 1:
            return total
        if peers.leaders is not None:
            try:
                _wait(_groups.resolve(peers.leaders).allreduce([total]), peers, fail)
            except BaseException as error:
                ops.shm_abandon(peers.shared, f"between nodes: {error}"[:200])
                raise
        else:
            total = torch.zeros_like(words)
        return _sum_inside(total, peers, fail)


def _sum_inside(words: torch.Tensor, peers: _groups.Peers, fail) -> torch.Tensor:
    total, status = _shared_memory.all_reduce(words, peers.shared)
    if status == _shared_memory.DIVERGED:
        raise LengthsDiffer(ops.shm_error(peers.shared))
    _fail_unless_done(status, peers, fail)
    return total


def _fail_unless_done(status: int, peers: _groups.Peers, fail) -> None:
    if status != _shared_memory.DONE:
        kind = ExchangeTimeout if status == _shared_memory.TIMEOUT else PeerLost
        fail(kind, ops.shm_error(peers.shared))


def sum_of_pass(run, arguments: tuple, peers: _groups.Peers, call: Call) -> tuple:
    """(What a pass gives, its message first; the message's sum, None if lengths differ; whether
    its header was seen to say that the calls agree), in one operator, through shared memory."""
    with _exchanging(peers, call) as fail:
        *given, total, status = run(*arguments, peers.shared, _shared_memory.SLICE)
        if status == _shared_memory.DONE:
            return given, total, True
        status = _shared_memory.finish(peers.shared, status)
        if status == _shared_memory.DIVERGED:
            return given, None, False
        if status != _shared_memory.UNCHECKED:
            _fail_unless_done(status, peers, fail)
        return given, total, False


def all_gather(words: torch.Tensor, peers: _groups.Peers, call: Call) -> torch.Tensor:
    """The words of all ranks, one after the other; of equal length on all ranks."""
    if peers.shared is not None:
        places = words.new_zeros(peers.ranks, words.numel())
        places[peers.rank] = words
        return all_reduce(places.flatten(), peers, call)
    out = words.new_empty(peers.ranks, words.numel())
    with _exchanging(peers, call) as fail:
        work = _groups.resolve(peers.group_name).allgather([list(out)], [words])
        _wait(work, peers, fail)
    return out.flatten()


class _Fail:
    """Raises what an exchange ends with, and says where the other ranks are."""

    def __init__(self, peers: _groups.Peers, call: Call) -> None:
        self.peers, self.call = peers, call

    def __call__(self, kind: type[Exception], reason: str, cause: Exception | None = None) -> None:
        peers = self.peers
        _broken[peers.group_name] = f"{self.call}: {reason}"
        others = _where.others(peers.group_name, peers.rank, peers.ranks)
        raise kind(f"{self.call}, {peers}: {reason}; {others}") from cause


class _exchanging:
    """Around an exchange of the group: notes where this rank is, and what breaks the group. One
    thread at a time: ranks pair exchanges by their order, which two threads have not in common."""

    def __init__(self, peers: _groups.Peers, call: Call) -> None:
        self.name, self.call, self.fail = peers.group_name, call, _Fail(peers, call)
        _forked.check()
        if self.name in _broken:
            raise PeerLost(
                f"{call}, {peers}: the group is broken since an earlier error "
                f"({_broken[self.name]}); call syncbn.reset_groups() on every rank to go on"
            )

    def __enter__(self) -> _Fail:
        thread = threading.get_ident()
        if _threads.setdefault(self.name, thread) != thread:
            raise RuntimeError(
                f"{self.call}, {self.fail.peers}: got a call while another thread exchanges in the "
                "same group, expected one thread for each group (process_group=)"
            )
        _where.enter(self.name, self.call)
        return self.fail

    def __exit__(self, kind, error, traceback) -> None:
        _where.leave(self.name)
        _threads.pop(self.name, None)
        if kind is not None and not issubclass(kind, Exception):  # Ctrl-C
            _broken[self.name] = f"{self.call} was interrupted"


def _wait(work, peers: _groups.Peers, fail: _Fail) -> None:
    """Waits for a collective over Gloo, looking at it again and again, so that Ctrl-C works."""
    late = f"not all ranks came within {peers.timeout:g} s"
    try:
        until = time.monotonic() + peers.timeout
        rounds = 0
        while not work.is_completed() and time.monotonic() <= until:
            rounds += 1
            time.sleep(0 if rounds < _SPINS else 5e-5 if rounds < 20_000 else 1e-3)
        if not work.is_completed():
            fail(ExchangeTimeout, late)
        work.wait()  # for its error
    except (ExchangeTimeout, PeerLost):
        raise
    except RuntimeError as error:
        if "timed out" in str(error).lower():
            fail(ExchangeTimeout, late, error)
        fail(PeerLost, "a rank has ended, or closed its connections", error)


def forget_errors() -> None:
    _broken.clear()
