# SPDX-License-Identifier: Apache-2.0
"""Backward of several devices on streams that are not forward's; streams and devices are played.

torch.nn.DataParallel records streams for what it copies on streams of its own.
"""

import pytest
import torch

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
