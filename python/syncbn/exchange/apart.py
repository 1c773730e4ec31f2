# SPDX-License-Identifier: Apache-2.0
"""Calls that may never return, such as a request to a store whose host is gone, in threads of their
own: nothing on the way of an error waits for them without a bound."""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

# Threads that wait for a call, and the calls that they take.
_idle = 0
_calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_lock = threading.Lock()


def keep_ready() -> None:
    """Starts a thread that the next call finds there: where memory lacks none can be started, and
    Thread.start() may even wait for ever for one that died as it began."""
    global _idle
    with _lock:
        if _idle == 0:
            _idle = 1
            _start()


def begin(function: Callable[[], Any]) -> Future:
    """Begins function(); the future has what it gives or raises, when it does."""
    global _idle
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    with _lock:
        if _idle == 0:
            _start()
        else:
            _idle -= 1
    _calls.put(run)
    return future


def _start() -> None:
    threading.Thread(target=_serve, name="syncbn-apart", daemon=True).start()


def _serve() -> None:
    """One thread waits for the next call; a second one that has nothing to do ends."""
    global _idle
    while True:
        _calls.get()()
        with _lock:
            if _idle > 0:
                return
            _idle = 1


def is_done(future: Future, seconds: float | None) -> bool:
    """Tells whether it has ended, after so many seconds at most (None: however long). Ctrl-C ends
    the wait."""
    return bool(wait([future], seconds and max(seconds, 0)).done)


def try_for(seconds: float, function: Callable[[], Any]) -> None:
    """Runs it, and goes on without it if it takes longer, or raises."""
    is_done(begin(function), seconds)


def _forget_parent() -> None:
    """Forgets the threads in a forked child: they stayed behind."""
    global _idle, _calls, _lock
    _idle, _calls, _lock = 0, queue.SimpleQueue(), threading.Lock()


os.register_at_fork(after_in_child=_forget_parent)
