# SPDX-License-Identifier: Apache-2.0
"""Messages that the ranks' GPUs exchange by themselves, and what the host hears of an exchange that
failed: the GPU has then left a mark, at which every later call looks, and a thread."""

import atexit
import logging
import os
import threading

import torch

from ..operators import HEADER_WORDS, ops
from . import groups, peer_meeting, whereabouts
from .attempt import Attempt, Waiting, is_broken
from .call import Call
from .groups import Peers
from .nccl_transport import InStream
from .peer_meeting import Met

_log = logging.getLogger("syncbn")


class PeerEngine(Waiting):
    """What an attempt asks of a group whose devices exchange."""

    def __init__(self, peers: Peers, met: Met) -> None:
        super().__init__(peers)
        self.met = met

    def abandon(self, why: str) -> None:
        """The kernels end at once; why, the hosts hear within two looks at the store."""
        whereabouts.tell(self.peers.group_name, why[:400])
        self.met.abort(range(self.met.ranks))

    def look(self, attempt: Attempt) -> None:
        """Raises if an exchange has failed."""
        failure = self.met.failure()
        if failure is not None:
            kind, what = failure
            last = whereabouts.last(self.peers.group_name)
            attempt.fail(
                kind,
                f"{what}, in an exchange between the GPUs; outputs of the exchange are NaN, as of "
                f"all since; this rank: {last}",
            )


def look(group: str, who: str) -> None:
    """Raises if an exchange of the group of that name has failed."""
    met = peer_meeting.met(group)
    if met is not None:
        engine = PeerEngine(groups.named(group), met)
        engine.look(Attempt(engine, Call(who)))


class OnDevices(InStream):
    """Messages on CUDA that kernels sum in memory that all ranks of the node reach. What else ranks
    tell each other goes over the caller's NCCL group."""

    name = "peer memory"
    finalizes = True
    engine: PeerEngine

    def __init__(self, peers: Peers, device: torch.device, met: Met) -> None:
        super().__init__(peers, device)
        self.met, self.engine = met, PeerEngine(peers, met)

    def exchange_over(self, message, channels, call):
        ops.exchange_sums(message, channels, self.deferred(call))
        return message, None

    def deferred(self, call: Call) -> torch.Tensor:
        attempt = Attempt(self.engine, call)
        self.engine.look(attempt)
        with attempt:
            if self.device != self.met.device:
                raise ValueError(
                    f"{call}: got a tensor on {self.device}, expected one on {self.met.device}, "
                    "which was the current device when the ranks met (engine='peer_memory')"
                )
            self.met.follow()
            _watch()
        return self.met.group(attempt.limit)

    def sum(self, x, tag, call):
        return InStream(self.peers, self.device).sum(x, tag, call)

    def reject(self, call, error, compare=True, x=None, parameter=None):
        """NaN for the others, whatever the length of their messages."""
        if call.direction not in ("forward", "backward"):
            return
        if call.options is not None and call.options.statistics == "welford":
            super().reject(call, error, compare, x, parameter)
            return
        message = torch.zeros(HEADER_WORDS, dtype=torch.int64, device=self.met.device)
        message[3:4].fill_(1)  # ranks that refuse
        self.exchange_over(message, 0, call)


_stop = threading.Event()
_thread: threading.Thread | None = None


def _watch() -> None:
    """Has a thread look at the marks of all groups, for a rank that makes no call any more."""
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_run, name="syncbn-marks", daemon=True)
        _thread.start()


def _run() -> None:
    said = set()
    while not _stop.wait(whereabouts.INTERVAL):
        for name, met in peer_meeting.all_met():
            failure = None if name in said or is_broken(name) else met.failure()
            if failure is not None:
                said.add(name)
                others = whereabouts.others(name, met.rank, met.ranks)
                text = "rank %d of %d: %s, in an exchange between the GPUs; this rank: %s; %s"
                last = whereabouts.last(name)
                _log.error(text, met.rank, met.ranks, failure[1], last, others)


def _forget_parent() -> None:
    """In a forked child, where the thread stayed behind."""
    global _stop, _thread
    _stop, _thread = threading.Event(), None


atexit.register(lambda: _stop.set())
os.register_at_fork(after_in_child=_forget_parent)
