# SPDX-License-Identifier: Apache-2.0
"""Calls that may never return, each in a thread of its own."""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

# Calls that wait for a thread, and how many threads wait for a call.
_calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_idle = threading.Semaphore(0)


def begin(function: Callable[[], Any]) -> Future:
    """Begins a call that may never return, such as a request to a store whose host is gone, in a
    thread: nothing on the way of an error waits without a bound. The future has what it gives or
    raises, when it does."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    if not _idle.acquire(blocking=False):
        threading.Thread(target=_serve, name="syncbn-apart", daemon=True).start()
    _calls.put(run)
    return future


def _serve() -> None:
    while True:
        _calls.get()()
        _idle.release()


def is_done(future: Future, seconds: float | None) -> bool:
    """Tells whether it has ended, after so many seconds at most (None: however long). Ctrl-C ends
    the wait."""
    return bool(wait([future], seconds and max(seconds, 0)).done)


def _forget_parent() -> None:
    """Begins anew in a forked child: the threads stayed behind."""
    global _calls, _idle
    _calls, _idle = queue.SimpleQueue(), threading.Semaphore(0)


os.register_at_fork(after_in_child=_forget_parent)
