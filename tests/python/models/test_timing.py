# SPDX-License-Identifier: Apache-2.0
"""syncbn.timing in one process; on several ranks: rank_cases_timing.py. PyTorch has no counterpart:
its profiler shows one rank, and not for whom it waited."""

import copy
import pickle
import xml.etree.ElementTree

import pytest
import torch
from torch import nn

import syncbn
from syncbn.models.timing import LayerTiming


def model():
    return syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4)))


def filled():
    """Of four ranks, where the last is late at layer3."""
    times = syncbn.timing(nn.Identity())
    others = {0: 10, 1: 5, 2: 5}
    brief = dict.fromkeys(range(3), 1e-6)
    times += [
        LayerTiming(
            "layer1", 920, 0.0092, 0.092, 0.0184, 920, {**others, 3: 900}, {**brief, 3: 0.1}
        ),
        LayerTiming(
            "layer<3>", 920, None, 0.92, None, 920, {**others, 3: 793}, {**brief, 3: 0.4248}
        ),
        LayerTiming("alone", 0, None, 0.0, None, 0, {}, {}),
    ]
    return times


def test_the_sentence_and_the_table():
    times = filled()
    assert times.straggler == 3
    assert times.summary == (
        "rank 3 came last in 92 % of 1,840 exchanges, the others waited 310 µs each time, mostly "
        "at layer<3>"
    )
    heading, first, second, third, sentence = str(times).splitlines()
    assert heading.split() == [
        *("path", "exchanges", "summed", "waited", "normalized", "last", "waited_for")
    ]
    assert first.split() == "layer1 920 10 µs 100 µs 20 µs rank 3 (98 %) 111 µs".split()
    assert second.split() == "layer<3> 920 1 ms rank 3 (86 %) 536 µs".split()
    assert third.split() == ["alone", "0"] and sentence == times.summary


def test_the_picture_has_a_cell_for_each_rank_and_layer():
    times = filled()
    picture = xml.etree.ElementTree.fromstring(times.svg())
    cells = [e for e in picture if e.tag.endswith("rect")]
    titles = [cell[0].text for cell in cells]
    assert len(cells) == 8 and titles[-1] == "rank 3, layer<3>: 425 ms"
    darkest = max(cells, key=lambda cell: float(cell.get("fill-opacity")))
    assert darkest is cells[-1] and times._repr_svg_() == times.svg()


def test_nobody_to_wait_for():
    net = model()
    with syncbn.timing(net) as times:
        net(torch.randn(5, 4)).sum().backward()
        assert times == []
    assert [(row.path, row.exchanges, row.waited_for) for row in times] == [
        ("0", 0, {}),
        ("1", 0, {}),
    ]
    assert times.straggler is None and times.summary == "no exchange between ranks on the host"
    assert xml.etree.ElementTree.fromstring(times.svg()).tag.endswith("svg")
    assert str(syncbn.timing(nn.Identity())).splitlines()[1] == times.summary


def test_copies_are_not_timed_and_nothing_is_after_the_block():
    net = model()
    with syncbn.timing(net):
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert other[0].state.times is None
        assert net[0].state.times is not None
    with pytest.raises(KeyError), syncbn.timing(net) as times:
        raise KeyError
    assert times == [] and net[0].state.times is None


def test_one_block_at_a_time():
    net = model()
    with syncbn.timing(net[1]) as inner:
        with pytest.raises(RuntimeError, match="^timing: got 1, which is being timed already"):
            with syncbn.timing(net):
                raise AssertionError("entered")
        assert net[0].state.times is None
    assert len(inner) == 1
