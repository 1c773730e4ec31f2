# SPDX-License-Identifier: Apache-2.0
"""Exchanges between processes of one node through memory that they share."""

import torch
import torch.distributed as dist

from ..operators import ops

_BYTES = 256

#: Statuses of an operator of a group.
DONE, PENDING, TIMEOUT, LOST, DIVERGED, UNCHECKED, NO_MEMORY = range(7)

#: Milliseconds that an operator waits.
SLICE = 50


def gather(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(ranks, n): every rank's bytes."""
    out = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([out], [own]).wait()
    return torch.stack(out)


def gather_texts(text: str, group: dist.ProcessGroup) -> list[str]:
    """Every rank's text, cut to 256 bytes."""
    padded = text.encode()[:_BYTES].ljust(_BYTES, b"\0")
    own = torch.tensor(list(padded), dtype=torch.uint8, device="cpu")
    lines = gather(own, group).tolist()
    return [bytes(line).rstrip(b"\0").decode(errors="replace") for line in lines]


def open_group(group: dist.ProcessGroup, timeout: float) -> tuple[int | None, str]:
    """Shared memory for the ranks of a Gloo group: on every rank a handle; or on every rank None
    and, in a line, why not. A collective call."""
    offer = torch.zeros(_BYTES, dtype=torch.uint8, device="cpu")
    handle = ops.shm_offer(offer, group.rank(), group.size())
    offers = gather(offer, group).flatten()
    try:
        why = ops.shm_open(handle, offers, timeout)
    except RuntimeError as error:  # the others wait for what this rank says
        why = str(error).strip()
    for rank, text in enumerate(gather_texts(why, group)):
        if text:
            close(handle)
            return None, f"rank {rank}: {text}"
    return handle, ""


def close(handle: int) -> None:
    _limits.pop(handle, None)
    ops.shm_close(handle)


# Seconds that exchanges wait, where they were set, by handle.
_limits: dict[int, float] = {}


def set_limit(handle: int, limit: float) -> None:
    """For the exchanges from here on."""
    if _limits.get(handle) != limit:
        ops.shm_limit(handle, limit)
        _limits[handle] = limit


def all_reduce(words: torch.Tensor, handle: int | None) -> tuple[torch.Tensor, int]:
    """The sum over the group, and a status."""
    total, status = ops.shm_sum(words, handle, SLICE)
    return total, finish(handle, status)


def finish(handle: int | None, status: int) -> int:
    """The status at the end of an exchange that has begun. Comes back to Python 20 times a second,
    so that Ctrl-C works."""
    while status == PENDING:
        status = ops.shm_finish(handle, SLICE)
    return status
