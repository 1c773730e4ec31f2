# SPDX-License-Identifier: Apache-2.0
"""Memory of a GPU that the other ranks of a node reach: the one place that knows PyTorch's
symmetric memory, which is private and changes. What is used of it is checked before."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

#: What is called, and the arguments that its signature must have, of PyTorch 2.11 and later.
_USED = {
    "set_group_info": ("arg0", "arg1", "arg2", "Store"),
    "empty_strided_p2p": ("size", "stride", "dtype", "device", "group_name"),
    "rendezvous": ("tensor", "group_name"),
    "get_buffer": ("rank", "sizes", "dtype", "storage_offset"),
}
_READ = ("buffer_ptrs", "rank", "world_size")


def _api() -> Any:
    return getattr(torch._C._distributed_c10d, "_SymmetricMemory", None)


def why_not() -> str:
    """What this PyTorch has not, or has in another form, in a line; "" where all is there."""
    api = _api()
    if api is None:
        return "this PyTorch has no symmetric memory"
    for name, wanted in _USED.items():
        signature = str(getattr(getattr(api, name, None), "__doc__", None) or "")
        if not all(part in signature for part in wanted):
            return f"this PyTorch's symmetric memory has no {name}({', '.join(wanted)})"
    for name in _READ:
        if not isinstance(getattr(api, name, None), property):
            return f"this PyTorch's symmetric memory has no {name}"
    return ""


class PeerMemory(NamedTuple):
    """own: this rank's words, zero at first. pointers: where each rank's lie for this rank's
    device. handle: PyTorch's, which keeps the others' memory within reach."""

    own: torch.Tensor
    pointers: Sequence[int]
    handle: Any

    def words_of(self, rank: int, begin: int, count: int) -> torch.Tensor:
        """Some words of a rank's memory."""
        return self.handle.get_buffer(rank, (count,), torch.int64, begin)


def allocate(words: int, device: torch.device, name: str) -> torch.Tensor:
    """int64 zeros that share() can make known, for the group of that name."""
    return _api().empty_strided_p2p((words,), (1,), torch.int64, device, name).zero_()


def share(own: torch.Tensor, name: str, rank: int, ranks: int, store: dist.Store) -> PeerMemory:
    """A collective call of the ranks, each with what it allocated. Raises RuntimeError where the
    driver, or a container, refuses."""
    # Releases look for the store in one of two places: here, or in the group of that name.
    group = dist.ProcessGroup(store, rank, ranks)
    torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]
    try:
        _api().set_group_info(name, rank, ranks, store)
        handle = _api().rendezvous(own, name)
    finally:
        torch._C._distributed_c10d._unregister_process_group(name)  # type: ignore[arg-type]
    pointers = list(handle.buffer_ptrs)
    if (handle.rank, handle.world_size, len(pointers)) != (rank, ranks, ranks):
        raise RuntimeError(
            f"symmetric memory: got rank {handle.rank} of {handle.world_size} and "
            f"{len(pointers)} pointers, expected rank {rank} of {ranks}"
        )
    return PeerMemory(own, pointers, handle)
