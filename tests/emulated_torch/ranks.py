# SPDX-License-Identifier: Apache-2.0
"""Ranks of the emulated kernels: processes whose kernels reach memory that all of them share."""

import mmap
import os
import pickle
import tempfile
import traceback

import torch

BLOCKS, SLOT_WORDS, FOR_EVER = 2, 110, 1 << 60


def shared_words(number):
    """int64 zeros at one address in this process and those that are forked from it."""
    return torch.frombuffer(mmap.mmap(-1, 8 * number), dtype=torch.int64)


class Memory:
    """What the ranks of a group give each other when they meet."""

    def __init__(self, ranks, timeout=FOR_EVER):
        memory, state, mark, self.abort_word = torch.ops.syncbn.peer_words(
            ranks, BLOCKS, SLOT_WORDS
        )
        self.timeout = timeout
        self.memory = [shared_words(memory) for _ in range(ranks)]
        self.state = [torch.zeros(state, dtype=torch.int64) for _ in range(ranks)]
        self.mark = [torch.zeros(mark, dtype=torch.int64) for _ in range(ranks)]

    def words(self, rank):
        """The group as operators take it."""
        given = (self.state[rank], self.mark[rank], *self.memory)
        fields = (rank, len(self.memory), BLOCKS, SLOT_WORDS, self.timeout)
        return torch.tensor([*fields, *(t.data_ptr() for t in given)])


def on_ranks(ranks, body):
    """body(rank) of each, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                try:
                    with open(f"{folder}/{rank}", "wb") as file:
                        pickle.dump(body(rank), file)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            children.append(child)
        ended = [os.waitpid(child, 0)[1] for child in children]
        assert not any(ended), ended
        results = []
        for rank in range(ranks):
            with open(f"{folder}/{rank}", "rb") as file:
                results.append(pickle.load(file))
    return results
