"""The one operation of an exchange: int64 words summed over a group, with errors that say who is
missing."""

import ctypes
import datetime
import re
import threading
import time

import torch
import torch.distributed as dist

from ..errors import ExchangeTimeout, PeerLost
from ..operators import ops
from . import after_fork, groups, shared_memory, watch
from .call import Call

# Why groups cannot be used any more.
_broken: dict[str, str] = {}
# The threads that exchange now, by group.
_threads: dict[str, int] = {}

# Layers, by group and direction, that have exchanged before: for the first time a rank may have to
# compile, so that the others wait as long as for the caller's own group.
_exchanged: set[tuple[str, str, str]] = set()
_STEP = ("forward", "backward", "conversion")

#: Rounds of looking before the wait begins to sleep.
_SPINS = 100


#: In PyTorch's error for a tensor on CPU, which has no type of its own.
_NO_MEMORY = re.compile(r"DefaultCPUAllocator: .* allocate (\d+) bytes")


class LengthsDiffer(Exception):
    """The ranks brought messages of different lengths; raised on all of them."""


class PassFailed(Exception):
    """What a pass raised before its exchange began, as the cause."""


def all_reduce(words: torch.Tensor, peers: groups.Peers, call: Call) -> torch.Tensor:
    """The sum over the ranks, a tensor of its own: backward needs the rank's own words too. Where
    peers.any_length, raises LengthsDiffer; otherwise lengths must be equal."""
    if peers.shared is not None:
        return _all_reduce_by_node(words, peers, call)
    return sum_over_gloo(words, peers, call)


def sum_over_gloo(x: torch.Tensor, peers: groups.Peers, call: Call) -> torch.Tensor:
    """The sum of tensors of any dtype, equal in shape on all ranks."""
    with _exchanging(peers, call) as fail:
        total = x.clone()
        _wait(_all_reduce(total, peers.group_name, fail), fail)
    return total


def _all_reduce(total: torch.Tensor, group: str, fail: "_Fail") -> dist.Work:
    options = dist.AllreduceOptions()
    options.timeout = fail.timeout
    return groups.resolve(group).allreduce([total], options)


def sum_in_stream_order(x: torch.Tensor, peers: groups.Peers) -> torch.Tensor:
    """The sum of tensors on CUDA, of equal shape, over the caller's own NCCL group. The host waits
    for nothing and knows of no error: they are NCCL's and its watchdog's."""
    total = x.clone()
    dist.all_reduce(total, group=groups.resolve(peers.cuda))
    return total


def gather_in_stream_order(x: torch.Tensor, peers: groups.Peers) -> torch.Tensor:
    """As sum_in_stream_order, the ranks' tensors of one axis as rows."""
    whole = x.new_empty(peers.ranks * x.numel())
    dist.all_gather_into_tensor(whole, x, group=groups.resolve(peers.cuda))
    return whole.view(peers.ranks, -1)


def _all_reduce_by_node(words: torch.Tensor, peers: groups.Peers, call: Call) -> torch.Tensor:
    """Inside the node; then between the nodes' first ranks, who bring the sum to the others."""
    with _exchanging(peers, call) as fail:
        total = _sum_inside(words, peers, fail)
        if peers.nodes == 1:
            return total
        if peers.leaders is not None:
            try:
                _wait(_all_reduce(total, peers.leaders, fail), fail)
            except BaseException as error:
                ops.shm_abandon(peers.shared, f"between nodes: {error}"[:200])
                raise
        else:
            total = torch.zeros_like(words)
        return _sum_inside(total, peers, fail)


def _sum_inside(words: torch.Tensor, peers: groups.Peers, fail) -> torch.Tensor:
    total, status = shared_memory.all_reduce(words, peers.shared)
    if status == shared_memory.DIVERGED:
        raise LengthsDiffer(ops.shm_error(peers.shared))
    _fail_unless_done(status, peers, fail)
    return total


def _fail_unless_done(status: int, peers: groups.Peers, fail) -> None:
    if status != shared_memory.DONE:
        kind = ExchangeTimeout if status == shared_memory.TIMEOUT else PeerLost
        fail(kind, ops.shm_error(peers.shared))


def sum_of_pass(run, arguments: tuple, peers: groups.Peers, call: Call) -> tuple:
    """(What a pass gives, its message first; the message's sum, None if lengths differ; whether
    its header was seen to say that the calls agree), in one operator, through shared memory."""
    with _exchanging(peers, call) as fail:
        try:
            *given, total, status = run(*arguments, peers.shared, shared_memory.SLICE)
        except Exception as error:
            raise PassFailed from error
        if status == shared_memory.DONE:
            return given, total, True
        status = shared_memory.finish(peers.shared, status)
        if status == shared_memory.DIVERGED:
            return given, None, False
        if status != shared_memory.UNCHECKED:
            _fail_unless_done(status, peers, fail)
        return given, total, False


def all_gather(words: torch.Tensor, peers: groups.Peers, call: Call) -> torch.Tensor:
    """The words of all ranks, one after the other; of equal length on all ranks."""
    if peers.shared is not None:
        places = words.new_zeros(peers.ranks, words.numel())
        places[peers.rank] = words
        return all_reduce(places.flatten(), peers, call)
    out = words.new_empty(peers.ranks, words.numel())
    with _exchanging(peers, call) as fail:
        options = dist.distributed_c10d.AllgatherOptions()
        options.timeout = fail.timeout
        work = groups.resolve(peers.group_name).allgather([list(out)], [words], options)
        _wait(work, fail)
    return out.flatten()


class _Fail:
    """Raises what an exchange ends with, and says where the other ranks are."""

    def __init__(self, peers: groups.Peers, call: Call) -> None:
        self.peers, self.call = peers, call
        #: seconds that the exchange may take
        self.limit = peers.timeout
        if call.direction in _STEP and (peers.group_name, call[0], call[2]) not in _exchanged:
            self.limit = max(peers.timeout, peers.patience)

    @property
    def timeout(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self.limit)

    def __call__(self, kind: type[Exception], reason: str, cause: Exception | None = None) -> None:
        peers = self.peers
        reason = reason.removeprefix(f"{peers}: ")  # C++ names the rank, too
        _broken[peers.group_name] = f"{self.call}: {reason}"
        if kind is PeerLost and peers.nodes > 1:  # the other nodes do not see it
            watch.tell(peers.group_name, f"rank {peers.rank} left the group: {reason}"[:400])
        others = watch.others(peers.group_name, peers.rank, peers.ranks)
        raise kind(f"{self.call}, {peers}: {reason}; {others}") from cause


class _exchanging:
    """Around an exchange of the group: notes where this rank is, and what breaks the group. One
    thread at a time: ranks pair exchanges by their order, which two threads have not in common."""

    def __init__(self, peers: groups.Peers, call: Call) -> None:
        self.name, self.call, self.fail = peers.group_name, call, _Fail(peers, call)
        after_fork.check()
        why = _broken.get(self.name) or watch.left(self.name)
        if why is not None:
            raise PeerLost(
                f"{call}, {peers}: the group is broken since an earlier error "
                f"({why}); call syncbn.reset_groups() on every rank to go on"
            )

    def __enter__(self) -> _Fail:
        thread = threading.get_ident()
        if _threads.setdefault(self.name, thread) != thread:
            raise RuntimeError(
                f"{self.call}, {self.fail.peers}: got a call while another thread exchanges in the "
                "same group, expected one thread for each group (process_group=)"
            )
        if self.fail.peers.shared is not None:
            shared_memory.set_limit(self.fail.peers.shared, self.fail.limit)
        watch.enter(self.name, self.call)
        return self.fail

    def __exit__(self, kind, error, traceback) -> None:
        # First: what comes now must not find the others waiting.
        if kind is not None and not issubclass(kind, _KNOWN_TO_ALL):
            abandon(self.fail.peers, self.call, error)
        watch.leave(self.name)
        _threads.pop(self.name, None)
        if kind is None and self.call.direction in _STEP:
            _exchanged.add((self.name, self.call.layer, self.call.direction))


#: Ways out of an exchange that the other ranks take as well, or that are no part of it.
_KNOWN_TO_ALL = (ExchangeTimeout, PeerLost, LengthsDiffer, PassFailed)


def abandon(peers: groups.Peers, call: Call, error: BaseException) -> None:
    """Leaves the group for an error that only this rank has. The others get PeerLost: at once
    through shared memory, after a look at the store over Gloo, whose works cannot be stopped."""
    if isinstance(error, Exception):
        why = f"{call}: {type(error).__name__}: {reason_of(error)}"
    else:
        why = f"{call} was interrupted"
    _broken.setdefault(peers.group_name, why)
    if peers.shared is not None:
        ops.shm_abandon(peers.shared, why[:400])
    if peers.shared is None or peers.nodes > 1:
        watch.tell(peers.group_name, f"rank {peers.rank} left the group: {why}"[:400])
        _keep(peers)


def _keep(peers: groups.Peers) -> None:
    """For ever: the end of a Gloo group waits for works that nobody will finish."""
    for name in (peers.group_name, peers.leaders):
        if name is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(groups.resolve(name)))


def lacks_memory(error: BaseException) -> bool:
    """Whether it is what PyTorch and the operators raise when an allocation fails."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def reason_of(error: BaseException) -> str:
    """Its text; C++ and Python have none of their own for lack of memory, and PyTorch names its
    allocator."""
    text = str(error)
    if asked := _NO_MEMORY.search(text):
        return f"memory: got none for a tensor of {asked[1]} bytes"
    return "memory: got none" if text in ("", "std::bad_alloc") else text


def out_of_memory(error: BaseException, peers: groups.Peers | None, call: Call) -> MemoryError:
    """The same, with the name of the layer, to be raised after the others were told."""
    place = f"{call}, {peers}" if peers is not None else str(call)
    named = MemoryError(f"{place}: {reason_of(error)}")
    named.told = True  # type: ignore[attr-defined]  # for leave()
    return named


def leave(error: BaseException, peers: groups.Peers | None, call: Call) -> None:
    """After an error in a step of a layer: the others hear of what ends it on this rank alone, also
    before and after the exchange. The caller raises the error again; what lacks memory is raised
    here, with the layer's name."""
    no_memory = lacks_memory(error)
    if getattr(error, "told", False) or (isinstance(error, Exception) and not no_memory):
        return
    if peers is not None:
        abandon(peers, call, error)
    if no_memory:
        raise out_of_memory(error, peers, call) from error


def _wait(work: dist.Work, fail: _Fail) -> None:
    """Waits for a collective over Gloo, looking at it again and again, so that Ctrl-C works."""
    late = f"not all ranks came within {fail.limit:g} s"
    try:
        until = time.monotonic() + fail.limit
        rounds = 0
        while not work.is_completed() and time.monotonic() <= until:
            rounds += 1
            if rounds % _SPINS == 0 and (why := watch.left(fail.peers.group_name)) is not None:
                _keep(fail.peers)
                fail(PeerLost, why)
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
    _exchanged.clear()
