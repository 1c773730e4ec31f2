"""The one operation of an exchange: int64 words summed over a group, with errors that say who is
missing."""

import time

import torch

from . import _groups, _where
from ._where import Call
from .errors import ExchangeTimeout, PeerLost

# Why groups cannot be used any more.
_broken: dict[str, str] = {}

#: Rounds of looking before the wait begins to sleep.
_SPINS = 100


def all_reduce(words: torch.Tensor, peers: _groups.Peers, call: Call) -> torch.Tensor:
    """The sum over the ranks, a tensor of its own: backward needs the rank's own words too. Also
    in a traced graph, where it is a plain collective and errors are those of the process group."""
    if torch.compiler.is_compiling():
        collectives = torch.ops._c10d_functional
        return collectives.wait_tensor(collectives.all_reduce(words, "sum", peers.group_name))
    total = words.clone()
    _wait(lambda group: group.allreduce([total]), peers, call)
    return total


def all_gather(words: torch.Tensor, peers: _groups.Peers, call: Call) -> torch.Tensor:
    """The words of all ranks, one after the other; of equal length on all ranks."""
    if torch.compiler.is_compiling():
        collectives = torch.ops._c10d_functional
        gathered = collectives.all_gather_into_tensor(words, peers.ranks, peers.group_name)
        return collectives.wait_tensor(gathered)
    out = words.new_empty(peers.ranks, words.numel())
    _wait(lambda group: group.allgather([list(out)], [words]), peers, call)
    return out.flatten()


def _wait(start, peers: _groups.Peers, call: Call) -> None:
    """Runs a collective to its end. Python looks at it again and again, so that Ctrl-C works."""
    name = peers.group_name
    if name in _broken:
        raise PeerLost(
            f"{call}, {peers}: the group is broken since an earlier error ({_broken[name]}); call "
            "syncbn.reset_groups() on every rank to go on"
        )
    late = f"not all ranks came within {peers.timeout:g} s"
    _where.enter(name, call)
    try:
        work = start(_groups.resolve(name))
        until = time.monotonic() + peers.timeout
        rounds = 0
        while not work.is_completed() and time.monotonic() <= until:
            rounds += 1
            time.sleep(0 if rounds < _SPINS else 5e-5 if rounds < 20_000 else 1e-3)
        if not work.is_completed():
            _fail(ExchangeTimeout, late, peers, call)
        work.wait()  # for its error
    except (ExchangeTimeout, PeerLost):
        raise
    except RuntimeError as error:
        if "timed out" in str(error).lower():
            _fail(ExchangeTimeout, late, peers, call, error)
        _fail(PeerLost, "a rank has ended, or closed its connections", peers, call, error)
    except BaseException:  # Ctrl-C
        _broken[name] = f"{call} was interrupted"
        raise
    finally:
        _where.leave(name)


def _fail(kind, reason: str, peers: _groups.Peers, call: Call, cause=None) -> None:
    _broken[peers.group_name] = f"{call}: {reason}"
    others = _where.others(peers.group_name, peers.rank, peers.ranks)
    raise kind(f"{call}, {peers}: {reason}; {others}") from cause


def forget_errors() -> None:
    _broken.clear()
