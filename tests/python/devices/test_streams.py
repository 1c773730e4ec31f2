# SPDX-License-Identifier: Apache-2.0
"""Backward of several devices on streams that are not forward's; streams and devices are played.

torch.nn.DataParallel records streams for what it copies on streams of its own.
"""

import copy

import pytest
import torch
from torch import nn

import syncbn
from syncbn.parallel import SelfDataParallel, all_reduce
from syncbn.step.surroundings import Streams


class Stream:
    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


class OnCuda:
    """A tensor, as far as streams go."""

    is_cuda = True

    def __init__(self, device):
        self.device, self.users = device, []

    def record_stream(self, stream):
        self.users.append(stream)


@pytest.fixture
def current(monkeypatch):
    """The current stream of each device."""
    streams = {"cuda:0": Stream(), "cuda:1": Stream()}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device])
    return streams


def test_backward_waits_for_forward_and_keeps_its_memory(current):
    a, b = OnCuda("cuda:0"), OnCuda("cuda:1")
    of_forward = dict(current)
    streams = Streams([a, b, torch.ones(1)])
    current["cuda:1"] = other = Stream()
    streams.enter([a, None, b, torch.ones(1)])
    assert other.waited_for == [of_forward["cuda:1"]]
    assert not any(stream.waited_for for stream in of_forward.values())
    assert a.users == [of_forward["cuda:0"]] and b.users == [other]
    result = OnCuda("cuda:1")
    streams.leave([None, result])
    assert result.users == [of_forward["cuda:1"]]


def test_nodes_of_several_devices_name_all_their_tensors(monkeypatch):
    """What a node is given and has saved before it computes, and then what it gives."""
    entered, left = [], []
    monkeypatch.setattr(Streams, "enter", lambda _, tensors: entered.append([*tensors]))
    monkeypatch.setattr(Streams, "leave", lambda _, tensors: left.append([*tensors]))

    def named(lists, tensor):
        return any(t is not None and torch.equal(t, tensor) for t in sum(lists, []))

    xs = [torch.randn(3, 4, 5, requires_grad=True) for _ in range(2)]
    dys = [torch.randn(3, 4, 5) for _ in range(2)]
    torch.autograd.backward(syncbn.SyncBatchNorm(4)(xs), dys)
    assert len(entered) == len(left) == 1
    assert all(named(entered, t) for t in (*xs, *dys))
    assert all(named(left, x.grad) for x in xs)
    entered.clear()
    left.clear()

    ones = [torch.ones(4, requires_grad=True) for _ in range(2)]
    torch.autograd.backward(all_reduce(ones), [dy[0, :, 0].contiguous() for dy in dys])
    assert len(entered) == len(left) == 1 and len(entered[0]) == 2
    assert all(named(left, t.grad) for t in ones)
    entered.clear()
    left.clear()

    model = SelfDataParallel(copy.deepcopy(nn.Linear(4, 2)), ["cpu"] * 2, replicate=True)
    sum(y.sum() for y in model(torch.randn(6, 4))).backward()
    assert len(entered) == len(left) == 1
    assert len(entered[0]) == 4 and len(left[0]) == 2  # of both devices; of the parameters
