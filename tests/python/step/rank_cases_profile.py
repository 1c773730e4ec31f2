# SPDX-License-Identifier: Apache-2.0
"""Ranges of a profile over the ranks of a group, and the page that reads them; run by
test_distributed.py as rank_cases.py is."""

import contextlib
import itertools
import re
import time
from collections import OrderedDict

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import syncbn
from support import assert_same_layers, snippets, train_step


class Sleep(nn.Module):
    """Keeps this rank from the next layer."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return x


def network(seconds: float = 0.0, **options) -> nn.Module:
    layers = {"a": nn.BatchNorm2d(3), "pause": Sleep(seconds), "b": nn.BatchNorm2d(3)}
    return syncbn.convert_sync_batchnorm(nn.Sequential(OrderedDict(layers)), **options)


def step(net, rank=0) -> None:
    net(torch.randn(2 + rank, 3, 5, 4, requires_grad=True)).sum().backward()


def profiled():
    return profile(activities=[ProfilerActivity.CPU])


def around(event) -> set[str]:
    """The ranges that it lies in."""
    parent = event.cpu_parent
    return set() if parent is None else {parent.name} | around(parent)


def ranges(profiler) -> dict[str, list]:
    """The parts of directions, by name."""
    parts = [e for e in profiler.events() if re.search(r"^syncbn::.* (sums|exchange|map)$", e.name)]
    parts.sort(key=lambda e: e.time_range.start)
    return {e.name: [other for other in parts if other.name == e.name] for e in parts}


def case_the_parts_of_each_direction_are_ranges(rank, world):
    """On every rank: also where another one takes no profile."""
    for options in ({}, {"statistics": "welford"}):
        net = network(**options)
        step(net, rank)
        for on in (True, rank == 0):
            with profiled() if on else contextlib.nullcontext() as profiler:
                step(net, rank)
            if on:
                directions = ("a", "b", "b backward", "a backward")
                pairs = itertools.product(directions, ("sums", "exchange", "map"))
                found = ranges(profiler)
                assert list(found) == [f"syncbn::{way} {part}" for way, part in pairs]
                for name, events in found.items():
                    (event,) = events
                    assert name.rpartition(" ")[0] in around(event)


def case_compiled_steps_have_ranges_and_are_not_compiled_again(rank, world):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    net = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))
    compiled_net = torch.compile(net, backend=backend, fullgraph=True)
    step(compiled_net)
    before = len(compiled)
    with profiled() as profiler:
        step(compiled_net)
    assert len(compiled) == before
    assert [*ranges(profiler)] == [
        f"syncbn::0{way} {part}"
        for way in ("", " backward")
        for part in ("sums", "exchange", "map")
    ]


def case_a_profile_changes_no_bit(rank, world):
    net, plain = network(), network()
    x = torch.randn(3, 3, 5, 4)
    with profiled():
        y, dx, *_ = train_step(net, x)
    expected, gradient, *_ = train_step(plain, x)
    assert torch.equal(y, expected) and torch.equal(dx, gradient)
    assert_same_layers(net, plain)


def case_page_of_diagnosis(rank, world):
    """The recipe finds the rank that sleeps, and before which layer it does."""
    report, recipe = snippets("docs/diagnosis.md")
    names: dict = {}
    exec(report, names)
    (row,) = names["rows"]
    assert row.ranks == world and row.count == world * 256
    late = world - 1
    names["model"] = network(0.05 if rank == late else 0.0)
    step(names["model"])
    exec(recipe, names)
    assert (names["straggler"], names["where"]) == (late, "syncbn::b exchange")
