"""Which way a rank takes that refuses its call: that of the other ranks, whose tensors lie where
the layer does. Without a GPU: tensors that have no memory say that they are on CUDA, and the two
ways note that they were taken.

torch.nn.SyncBatchNorm tells the others nothing; they wait for NCCL's time limit.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import syncbn
from syncbn import _cuda, _devices, _exchange, _groups, _modes, ops
from syncbn._layer import Layer
from syncbn._where import Call

PEERS = _groups.Peers("own", 2, 0, 1.0, cuda="of the caller")


@pytest.fixture
def ways(monkeypatch):
    """The ways of messages that were taken: the device of those in stream order, or "host"."""
    taken = []

    def in_stream_order(x, parameter, peers, call, device):
        taken.append(device.type)

    def through_the_host(message, peers, call):
        taken.append("host")
        raise syncbn.PeerLost("nobody is there")

    monkeypatch.setattr(_exchange, "_reject_in_stream_order", in_stream_order)
    monkeypatch.setattr(_exchange, "_sum_first", through_the_host)
    monkeypatch.setattr(_cuda, "_loaded", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_groups, "is_nccl_alone", lambda peers: False)
    monkeypatch.setattr(Layer, "peers", lambda self: PEERS)
    # The number of the call cannot be read from a counter without memory.
    monkeypatch.setattr(Layer, "call_of", lambda self, x, call: Call(self.name, settings=self))
    monkeypatch.setattr(_groups, "peers", lambda sharing: PEERS)
    with FakeTensorMode():
        yield taken


@pytest.mark.parametrize(
    "options", ({}, {"affine": False}, {"affine": False, "track_running_stats": False})
)
@pytest.mark.parametrize("place, way", (("cuda", "cuda"), ("cpu", "host")))
def test_refused_input_on_another_device_than_the_layer(ways, place, way, options):
    """By running statistics, weight, or the counter that every module has."""
    other = "cpu" if place == "cuda" else "cuda"
    layer = syncbn.SyncBatchNorm(3, device=place, **options)
    if layer.weight is not None or layer.running_mean is not None or place == "cuda":
        with pytest.raises(ValueError, match="got a tensor on (cpu|cuda:0), expected (cpu|cuda:0)"):
            layer(torch.empty(4, 3, device=other))
        assert ways.pop() == way
    with pytest.raises(ValueError, match="input: got NoneType"):
        layer(None)
    assert ways == [way]


def test_counters_of_a_layer_without_tensors_follow_its_model(ways):
    """Converted where the model lies on a GPU already; then it stays there. PyTorch's layer counts
    nothing."""
    plain = torch.nn.BatchNorm1d(3, affine=False, track_running_stats=False)
    layer = syncbn.convert_sync_batchnorm(plain)
    assert layer._call.device.type == "cpu"
    with pytest.raises(ValueError, match="input: got torch.int32"):
        layer(torch.empty(4, 3, device="cuda").int())
    assert layer._call.is_cuda and layer._count.is_cuda
    with pytest.raises(ValueError, match="input: got a tensor on cpu, expected cuda:0, where the"):
        layer(torch.empty(4, 3))
    assert ways == ["cuda", "cuda"]


def test_without_a_tensor_of_the_layer_by_the_group_or_the_input(ways, monkeypatch):
    function = syncbn.functional.sync_batch_norm
    for place, way in (("cuda", "cuda"), ("cpu", "host")):
        with pytest.raises(ValueError, match="input: got torch.int32"):
            function(torch.empty(4, 3, device=place).int(), None, None, training=True)
        assert ways.pop() == way
    monkeypatch.setattr(_groups, "is_nccl_alone", lambda peers: True)
    with pytest.raises(ValueError, match="input: got torch.int32"):
        function(torch.empty(4, 3).int(), None, None, training=True)
    assert ways == ["cuda"]


@pytest.mark.parametrize("place, way", (("cuda", "cuda"), ("cpu", "host")))
def test_refused_modes(ways, monkeypatch, place, way):
    """A trace, and a backward of many gradients at once."""
    layer, x = Layer("layer", 0), torch.empty(4, 3, device=place)
    with pytest.raises(NotImplementedError, match="torch.jit.trace"):
        _modes.refuse_tracing(layer, x, torch.zeros(1, device=place))
    monkeypatch.setattr(_modes, "is_legacy_batchedtensor", lambda gradient: True)
    monkeypatch.setattr(_modes, "exchanges", lambda first: True)
    context = type("Context", (), {"peers": PEERS})
    with pytest.raises(NotImplementedError, match="inside vmap"):
        _modes.check_not_batched(context, Call("layer"), x, x)
    assert ways == [way, way]


@pytest.mark.parametrize("place, way", (("cuda", "cuda"), ("cpu", "host")))
def test_refused_lists_and_devices_that_do_not_meet(ways, place, way):
    for options in ({}, {"track_running_stats": False}):
        layer = syncbn.SyncBatchNorm(3, device=place, **options)
        with pytest.raises(ValueError, match="inputs: got an empty list"):
            layer([])
        _devices.give_up([(layer, torch.empty(4, 3, device=place))], RuntimeError("ended"))
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
    monkeypatch.setattr(_exchange._collective, "sum_in_stream_order", lambda *a: sent.append(a))
    call, cpu = Call("layer", settings=Layer("layer", 0)), torch.device("cpu")
    for x, parameter in (
        (None, torch.ones(3)),
        (torch.ones(4, 3).int(), torch.ones(3)),
        (torch.ones(4), None),
    ):
        _exchange._reject_in_stream_order(x, parameter, PEERS, call, cpu)
    second = call._replace(direction="second backward")
    _exchange._reject_in_stream_order(torch.ones(4, 3), torch.ones(3), PEERS, second, cpu)
    assert sent == []
    _exchange._reject_in_stream_order(torch.ones(4), torch.ones(3), PEERS, call, cpu)
    assert len(sent) == 1
