# SPDX-License-Identifier: Apache-2.0
"""What is used of PyTorch's symmetric memory, which is private: that it is there, that a PyTorch
without it is refused in a line, and in which order it is called."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from syncbn.exchange import groups, peer_meeting, peer_memory
from syncbn.exchange.peer_meeting import Met


def test_this_pytorch_has_what_is_used():
    assert peer_memory.why_not() == ""


class Played:
    """In the place of _SymmetricMemory, on the CPU."""

    buffer_ptrs = property(lambda self: [8, 16])
    rank = property(lambda self: 1)
    world_size = property(lambda self: 2)
    calls: list[str] = []

    def set_group_info(name, rank, ranks, store):
        """(arg0: str, arg1: SupportsInt, arg2: SupportsInt, arg3: c10d::Store)"""
        Played.calls.append(f"{name}, rank {rank} of {ranks}, {store.get('key').decode()}")

    def empty_strided_p2p(size, stride, dtype, device, group_name):
        """(size: tuple, stride: tuple, dtype, device, group_name: str)"""
        return torch.full(size, 7, dtype=dtype, device=device)

    def rendezvous(tensor, group_name):
        """(tensor: Tensor, group_name: str)"""
        registered = dist.distributed_c10d._resolve_process_group(group_name)
        Played.calls.append(f"{group_name}, rank {registered.rank()} of {registered.size()}")
        return Played()

    def get_buffer(self, rank, sizes, dtype, storage_offset):
        """(rank: SupportsInt, sizes: tuple, dtype, storage_offset: SupportsInt)"""
        return rank, sizes, dtype, storage_offset


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(peer_memory, "_api", lambda: Played)
    monkeypatch.setattr(Played, "calls", [])
    return monkeypatch


def test_memory_is_shared_by_name_with_a_store(played):
    assert peer_memory.why_not() == ""
    own = peer_memory.allocate(3, torch.device("cpu"), "name")
    assert own.tolist() == [0, 0, 0]
    store = dist.HashStore()
    store.set("key", "this store")
    memory = peer_memory.share(own, "name", 1, 2, store)
    assert Played.calls == ["name, rank 1 of 2, this store", "name, rank 1 of 2"]
    assert memory.own is own and memory.pointers == [8, 16]
    assert memory.words_of(1, 5, 2) == (1, (2,), torch.int64, 5)
    with pytest.raises((RuntimeError, ValueError, LookupError)):
        dist.distributed_c10d._resolve_process_group("name")


def test_memory_of_other_ranks_is_refused(played):
    own, store = torch.zeros(3, dtype=torch.int64), dist.HashStore()
    store.set("key", "")
    with pytest.raises(RuntimeError, match="got rank 1 of 2 and 2 pointers, expected rank 0 of 3"):
        peer_memory.share(own, "name", 0, 3, store)


@pytest.mark.parametrize("name", [*peer_memory._USED, *peer_memory._READ])
def test_what_changed_is_named(played, name):
    text = f"this PyTorch's symmetric memory has no {name}"
    if name in peer_memory._USED:

        def other(tensor):
            """(tensor: Tensor)"""

        played.setattr(Played, name, other)
        assert peer_memory.why_not().startswith(f"{text}(")
    played.delattr(Played, name)
    assert peer_memory.why_not().startswith(text)


def test_no_symmetric_memory_at_all(monkeypatch):
    monkeypatch.delattr(torch._C._distributed_c10d, "_SymmetricMemory")
    assert peer_memory.why_not() == "this PyTorch has no symmetric memory"


class Stream:
    """Of a played GPU. captures: whether it is captured."""

    def __init__(self, captures=False):
        self.captures, self.waited_for = captures, []

    def wait_stream(self, other):
        self.waited_for.append(other)


def test_exchanges_of_streams_come_one_after_the_other(monkeypatch):
    """A capture cannot wait for what was enqueued outside of it, nor the other way round."""
    current = []

    @contextlib.contextmanager
    def used(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", used)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1].captures)
    words = torch.zeros(1, dtype=torch.int64)
    memory = peer_memory.PeerMemory(words, [], None)
    met = Met(0, 2, torch.device("cuda", 0), memory, words, words, 0, {}, {})
    first, second, captured = Stream(), Stream(), Stream(True)
    for stream, waits_for in (
        (first, []),
        (first, []),
        (second, [first]),
        (captured, []),
        (first, [second]),
        (second, [first, first]),
    ):
        with used(stream):
            met.follow()
        assert stream.waited_for == waits_for


@pytest.mark.parametrize("waits", [False, True])
def test_a_rank_that_leaves_ends_its_own_exchanges_alone(monkeypatch, waits):
    """And only those that still wait."""
    memory = [torch.zeros(4, dtype=torch.int64) for _ in range(2)]
    finished = []

    class Handle:
        def get_buffer(self, rank, sizes, dtype, storage_offset):
            return memory[rank][storage_offset:][: sizes[0]]

    class Event:
        def query(self):
            return not waits or memory[0][3] != 0

    stream = Stream()
    stream.record_event = Event
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", finished.append)
    monkeypatch.setattr(peer_meeting, "SETTLING", 0.02)
    shared = peer_memory.PeerMemory(memory[0], [], Handle())
    device, state = torch.device("cuda", 0), torch.zeros(10, dtype=torch.int64)
    met = Met(0, 2, device, shared, state, memory[0], 3, {}, {False: stream})
    peer_meeting.begin("group", (0, 1), met)
    peer_meeting.end("group")
    assert finished == [device] and [w[3].item() for w in memory] == [-1 if waits else 0, 0]
    assert state.tolist() == [0] * 9 + [1]  # what is captured exchanges nothing any more
    assert peer_meeting.met("group") is None and peer_meeting._left["group"] is met
    peer_meeting.begin("another", (0, 2), None)
    assert peer_meeting._left
    peer_meeting.begin("another", (0, 1), None)
    assert not peer_meeting._left and not peer_meeting._ranks


def test_a_gpu_that_another_one_of_the_group_does_not_reach_is_named(monkeypatch):
    """Asked before PyTorch is, whose driver calls may end the process."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(peer_meeting, "_gpu", lambda index: f"GPU {index}")
    reached = {1: True, 3: False}  # nobody asks for one that no rank has
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: reached[other])
    device = torch.device("cuda", 0)
    peer_meeting._check_reach(device, ["GPU 0", "GPU 1"])
    with pytest.raises(RuntimeError, match="^cuda:0 cannot reach the memory of cuda:3$"):
        peer_meeting._check_reach(device, ["GPU 0", "GPU 1", "GPU 3"])


def test_the_engine_has_a_name():
    assert groups.sharing(None, None, "peer_memory").engine == "peer_memory"
    with pytest.raises(ValueError, match="engine: got 'peers', expected one of .*peer_memory"):
        groups.sharing(None, None, "peers")
