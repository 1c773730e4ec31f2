# SPDX-License-Identifier: Apache-2.0
"""Calls that may never return, such as a request to a store whose host is gone, in threads of their
own: nothing on the way of an error waits for them without a bound."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any


def begin(function: Callable[[], Any]) -> Future:
    """What function() gives or raises, when it does."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="syncbn-apart", daemon=True).start()
    return future


def is_done(future: Future, seconds: float) -> bool:
    """Whether it has ended, after so many seconds at most. Ctrl-C ends the wait."""
    return bool(wait([future], max(seconds, 0)).done)


def try_for(seconds: float, function: Callable[[], Any]) -> None:
    """Runs it, and goes on without it if it takes longer, or raises."""
    is_done(begin(function), seconds)
