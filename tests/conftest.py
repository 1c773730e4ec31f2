# SPDX-License-Identifier: Apache-2.0
"""The order of the tests, their signals, and a group that tests of several folders need."""

import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

# A shell starts commands of the background with Ctrl-C ignored, and their children inherit that.
# Tests interrupt ranks.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: Their files take longest. What begins last should be short, so that all workers end together.
LONG = ("exchange", "shares", "project", "bindings", "interop", "jax", "models", "rules")


def pytest_collection_modifyitems(items: list) -> None:
    items.sort(key=lambda item: item.path.parent.name not in LONG)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, whose limit is not PyTorch's own."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=55)
    )
    yield
    dist.destroy_process_group()
