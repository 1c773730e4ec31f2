# SPDX-License-Identifier: Apache-2.0
"""The order of the tests, and their signals."""

import signal

# A shell starts commands of the background with Ctrl-C ignored, and their children inherit that.
# Tests interrupt ranks.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: Their files take longest. What begins last should be short, so that all workers end together.
LONG = ("exchange", "project", "bindings", "rules")


def pytest_collection_modifyitems(items: list) -> None:
    items.sort(key=lambda item: item.path.parent.name not in LONG)
