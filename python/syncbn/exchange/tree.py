# SPDX-License-Identifier: Apache-2.0
"""Sums over V shares in one binary tree, on any number of processes."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import callers, groups, host
from .call import Call, Peers, Said, tag_of
from .turn import refuse_on_host

_WHO = "syncbn.Shares"


def _blocks(begin: int, end: int, width: int) -> Iterator[tuple[int, int]]:
    """(begin, size) of the largest subtrees that make up these leaves of a tree of `width`."""
    while begin < end:
        size = begin & -begin if begin else width
        while begin + size > end:
            size //= 2
        yield begin, size
        begin += size


def _add_up(nodes: dict[tuple[int, int], Tensor], width: int) -> Tensor:
    """The sum of subtrees, by (begin, size): the root of a tree of `width`. Leaves from V on are
    nobody's, and not added."""
    nodes, size = dict(nodes), 1
    while size < width:
        for begin in range(0, width, 2 * size):
            left, right = nodes.pop((begin, size), None), nodes.pop((begin + size, size), None)
            if left is not None:
                nodes[begin, 2 * size] = left if right is None else left + right
        size *= 2
    return nodes[0, width]


class Tree:
    """The shares of the processes of a group: neighbours, as evenly as can be. Without the default
    group one process has all.

    shares: their number; None: one for each process. mine: the numbers of this process's shares.
    """

    def __init__(self, shares: int | None, group: dist.ProcessGroup | None = None) -> None:
        there = callers.initialized()
        self.processes = dist.get_world_size(group) if there else 1
        self.rank = dist.get_rank(group) if there else 0
        self._group, shares = group, shares or self.processes
        bounds = [shares * i // self.processes for i in range(self.processes + 1)]
        self._width = 1 << (shares - 1).bit_length()
        self._blocks = [list(_blocks(*pair, self._width)) for pair in zip(bounds, bounds[1:])]
        self.mine = range(bounds[self.rank], bounds[self.rank + 1])

    def meet(self, what: str, said: dict[str, object]) -> None:
        """Every process comes, and says the same by name, over the host, before PyTorch's
        collectives wait for each other without names. No device is waited for.

        Raises DivergenceError, ExchangeTimeout or PeerLost.
        """
        if self.processes > 1:
            call = Call(f"{_WHO}.{what}", options=Said(said))
            host.agree(self._peers(), tag_of(what, said), call)

    def _peers(self) -> Peers:
        peers = groups.peers(callers.sharing(self._group, None), _WHO)
        assert peers is not None  # there are several processes
        return peers

    def refuse(self, what: str, error: Exception) -> None:
        """Tells the others in meet() that this process does not come."""
        if self.processes > 1:
            refuse_on_host(self._peers(), Call(f"{_WHO}.{what}"), error)

    def total(self, leaves: list[Tensor]) -> Tensor:
        """The sum over all shares; leaves: this process's, of shape (n,). Every process calls it.

        A process adds up the subtrees that it holds whole. Then it gets its slice of all processes'
        subtrees, adds up the rest of the tree, and gives the sums to all. The messages are those of
        an all-reduce, and nothing but this module adds.
        """
        mine = dict(zip(self.mine, leaves, strict=True))
        roots = []
        for begin, size in self._blocks[self.rank]:
            inside = {(v - begin, 1): mine[v] for v in range(begin, begin + size)}
            roots.append(_add_up(inside, size))
        if self.processes == 1:
            return _add_up(dict(zip(self._blocks[0], roots)), self._width)
        count, processes = roots[0].numel(), self.processes
        each = -(-count // processes)
        if padding := each * processes - count:
            roots = [nn.functional.pad(root, (0, padding)) for root in roots]
        if len(roots) > 1:
            sent = torch.stack([root.view(processes, each) for root in roots], 1)
        else:
            sent = roots[0].view(processes, 1, each)  # (process, subtree, slice)
        if sent.is_cuda and not callers.nccl_name(self._group or callers.resolve(None)):
            sent = sent.cpu()  # Gloo takes no others
        counts = [len(blocks) for blocks in self._blocks]
        got = sent.new_empty((sum(counts), each))
        width = each * got.element_size()
        dist.all_to_all_single(  # bytes: groups know few dtypes
            got.view(torch.uint8).view(-1),
            sent.view(torch.uint8).view(-1),
            [n * width for n in counts],
            [len(roots) * width] * processes,
            group=self._group,
        )
        blocks = [block for some in self._blocks for block in some]
        own = _add_up(dict(zip(blocks, got)), self._width).contiguous()
        whole = own.new_empty(processes * each)
        parts = whole.view(torch.uint8), own.view(torch.uint8)
        dist.all_gather_into_tensor(*parts, group=self._group)
        return whole[:count].to(leaves[0].device)
