# SPDX-License-Identifier: Apache-2.0
"""Which way a rank takes that refuses its call: that of the other ranks, whose tensors lie where
the layer does. Without a GPU: tensors that have no memory say that they are on CUDA, and the two
ways note that they were taken.

torch.nn.SyncBatchNorm tells the others nothing; they wait for NCCL's time limit.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import syncbn
from syncbn import devices, meeting_point, operators, ops
from syncbn.exchange import callers, failing, groups
from syncbn.exchange.call import Call, Peers
from syncbn.exchange.host import Gloo
from syncbn.exchange.transport import InStream
from syncbn.step import autograd
from syncbn.step.layer_state import LayerState
from syncbn.step.options import Options

PEERS = Peers("own", 2, 0, 1.0, cuda="of the caller")


@pytest.fixture
def ways(monkeypatch):
    """The ways of messages that were taken: the device of those in stream order, or "host"."""
    taken = []

    def in_stream_order(way, *_):
        taken.append(way.device.type)

    def through_the_host(engine, message, call):
        taken.append("host")
        raise syncbn.PeerLost("nobody is there")

    monkeypatch.setattr(InStream, "refuse", in_stream_order)
    monkeypatch.setattr(Gloo, "sum_first", through_the_host)
    monkeypatch.setattr(failing, "begin", lambda function: function())
    monkeypatch.setattr(operators, "_cuda_loaded", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(callers, "is_nccl_alone", lambda name: False)
    # Not as where shapes alone are wanted. Counters would not follow to a device without memory.
    monkeypatch.setattr(autograd, "is_fake", lambda x, parameter: False)
    monkeypatch.setattr(meeting_point, "has_no_values", lambda: False)
    monkeypatch.setattr(ops, "FakeTensor", type("NoTensor", (), {}))
    for module in (autograd, devices, ops):
        monkeypatch.setattr(module, "check_plain", lambda alone, **tensors: None)
    monkeypatch.setattr(LayerState, "move", lambda self, device: None)
    call_of = lambda self, x, options, *_: Call(self.name, options=options)  # noqa: E731
    monkeypatch.setattr(LayerState, "call_of", call_of)
    monkeypatch.setattr(groups, "training_peers", lambda *_: PEERS)
    with FakeTensorMode():
        yield taken


def exchanged(layer):
    """The layer as after its first exchange."""
    layer.state.numbers[PEERS.group_name] = 1
    return layer


def test_refused_before_the_first_exchange(ways):
    """The other ranks compare the layer's path then, over the host."""
    layer, x = syncbn.SyncBatchNorm(3, device="cuda"), torch.empty(4, 3, device="cuda")
    with pytest.raises(ValueError, match="input: got torch.int32"):
        layer(x.int())
    with pytest.raises(ValueError, match="inputs: got an empty list"):
        layer([])
    meeting_point.give_up([(layer, x)], RuntimeError("ended"))
    assert ways == ["host"] * 3


@pytest.mark.parametrize(
    "options", ({}, {"affine": False}, {"affine": False, "track_running_stats": False})
)
@pytest.mark.parametrize("place, way", (("cuda", "cuda"), ("cpu", "host")))
def test_refused_input_on_another_device_than_the_layer(ways, place, way, options):
    """By running statistics, weight, or where it was called before."""
    other = "cpu" if place == "cuda" else "cuda"
    layer = exchanged(syncbn.SyncBatchNorm(3, device=place, **options))
    if layer.weight is None and layer.running_mean is None:
        layer.state._count_in(torch.zeros(2, dtype=torch.int64, device=place))
    else:
        with pytest.raises(ValueError, match="got a tensor on (cpu|cuda:0), expected (cpu|cuda:0)"):
            layer(torch.empty(4, 3, device=other))
        assert ways.pop() == way
    with pytest.raises(ValueError, match="input: got NoneType"):
        layer(None)
    assert ways == [way]


def test_without_a_tensor_of_the_layer_by_the_group_or_the_input(ways, monkeypatch):
    function = syncbn.functional.sync_batch_norm
    for place, way in (("cuda", "cuda"), ("cpu", "host")):
        with pytest.raises(ValueError, match="input: got torch.int32"):
            function(torch.empty(4, 3, device=place).int(), None, None, training=True)
        assert ways.pop() == way
    monkeypatch.setattr(callers, "is_nccl_alone", lambda name: True)
    with pytest.raises(ValueError, match="input: got torch.int32"):
        function(torch.empty(4, 3).int(), None, None, training=True)
    assert ways == ["cuda"]


@pytest.mark.parametrize("place, way", (("cuda", "cuda"), ("cpu", "host")))
def test_refused_lists_and_devices_that_do_not_meet(ways, place, way):
    for options in ({}, {"track_running_stats": False}):
        layer = exchanged(syncbn.SyncBatchNorm(3, device=place, **options))
        with pytest.raises(ValueError, match="inputs: got an empty list"):
            layer([])
        meeting_point.give_up([(layer, torch.empty(4, 3, device=place))], RuntimeError("ended"))
    assert ways == [way] * 4


@pytest.mark.parametrize("place, way", (("cuda", "cuda"), ("cpu", "host")))
def test_refused_operator(ways, place, way):
    channel = torch.empty(3, device=place)
    batches = torch.zeros(1, dtype=torch.int64, device=place)
    x = torch.empty(4, 3, device="cpu" if place == "cuda" else "cuda")
    with pytest.raises(ValueError, match="estimated_mean: got a tensor on"):
        ops.batch_norm(x, channel, channel, None, None, batches)
    assert ways == [way]


def test_message_of_unknown_length_is_not_sent(monkeypatch):
    """Of an input without a dtype or channels that the others could have, and of a second
    derivative: they wait for NCCL, this rank raises at once. A message of another length than
    theirs might mix up their sums."""
    sent = []
    monkeypatch.setattr(InStream, "_add", lambda *a: sent.append(a))
    call, way = Call("layer", options=Options()), InStream(PEERS, torch.device("cpu"))
    error = ValueError("refused")
    for x, parameter in (
        (None, torch.ones(3)),
        (torch.ones(4, 3).int(), torch.ones(3)),
        (torch.ones(4), None),
    ):
        way.refuse(call, error, x=x, parameter=parameter)
    second = call._replace(direction="second backward")
    way.refuse(second, error, x=torch.ones(4, 3), parameter=torch.ones(3))
    assert sent == []
    way.refuse(call, error, x=torch.ones(4), parameter=torch.ones(3))
    assert len(sent) == 1
