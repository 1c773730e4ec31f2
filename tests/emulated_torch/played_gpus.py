# SPDX-License-Identifier: Apache-2.0
"""Ranks of torch.distributed, in processes of their own, whose GPUs are played by emulated kernels,
in memory that the processes share."""

import contextlib
import datetime
import tempfile
from unittest import mock

import torch
import torch.distributed as dist
from emulated import on_cuda
from package import emulated

from ranks import BLOCKS, SLOT_WORDS, on_ranks, shared_words
from syncbn import operators_cuda
from syncbn.exchange import agreement, groups, peer_meeting, peer_memory, transports
from syncbn.exchange.peer_transport import OnDevices
from syncbn.step import training

CPU = torch.device("cpu")


class Handle:
    """In the place of PyTorch's handle of symmetric memory."""

    def __init__(self, memory):
        self.memory = memory

    def get_buffer(self, rank, sizes, dtype, storage_offset):
        return self.memory[rank][storage_offset:][: sizes[0]].view(dtype)


class Node:
    """The GPUs of a node, made before the ranks are. meetings: of one group after the other."""

    def __init__(self, ranks, meetings=1):
        with played_sizes():
            words = torch.ops.syncbn.peer_words(ranks, BLOCKS, SLOT_WORDS)[0]
        self.memory = [[shared_words(words) for _ in range(ranks)] for _ in range(meetings)]
        self.made = 0

    def allocate(self, words, device, name):
        self.made += 1
        return self.memory[self.made - 1][dist.get_rank()].zero_()

    def share(self, own, name, rank, ranks, store):
        memory = self.memory[self.made - 1]
        pointers = [words.data_ptr() for words in memory]
        return peer_memory.PeerMemory(own, pointers, Handle(memory))

    @contextlib.contextmanager
    def played(self):
        """Layers whose tensors are on the CPU take the way of those on GPUs."""

        def transport_of(peers, device):
            return OnDevices(peers, CPU, peer_meeting.met(peers.group_name))

        with emulated(), played_sizes(), contextlib.ExitStack() as stack:
            for module, name, played in (
                (groups, "nccl_name", lambda group: group.group_name),
                (peer_meeting, "current_device", lambda: CPU),
                (peer_meeting, "_gpu", lambda device: f"GPU {dist.get_rank()}"),
                (peer_memory, "why_not", lambda: ""),
                (peer_memory, "allocate", self.allocate),
                (peer_memory, "share", self.share),
                (operators_cuda, "load", lambda: None),
                (peer_meeting, "ops", Operators()),
                (agreement, "ops", torch.ops.syncbn),  # of messages on the host
                (training, "transport_of", transport_of),
                (transports, "transport_of", transport_of),
            ):
                stack.enter_context(mock.patch.object(module, name, played))
            yield


class Operators:
    """As package.OnCuda, with an operator that has no tensor."""

    def __getattr__(self, name):
        if name == "peer_words":
            return torch.ops.syncbn.peer_words
        return lambda *arguments: on_cuda(name, *arguments)


def played_sizes():
    """Less of everything than on a GPU: exchanges have rounds."""
    return mock.patch.multiple(peer_meeting, BLOCKS=BLOCKS, SLOT_WORDS=SLOT_WORDS)


def on_played_gpus(ranks, body, meetings=1):
    """body(rank) of each, in a process group of theirs."""
    node = Node(ranks, meetings)
    with tempfile.TemporaryDirectory() as folder:

        def run(rank):
            store = dist.FileStore(f"{folder}/store", ranks)
            limit = datetime.timedelta(seconds=20)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
            with node.played():
                result = body(rank)
            dist.barrier()
            return result

        return on_ranks(ranks, run)
