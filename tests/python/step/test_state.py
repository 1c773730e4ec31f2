# SPDX-License-Identifier: Apache-2.0
"""A layer's state: parameters and buffers are those of torch.nn's batch norm and no more, whatever
makes, copies, moves, loads or compiles a model.

torch.nn.SyncBatchNorm keeps no call number, so none of this concerns it; on the CPU it refuses to
train.
"""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import syncbn
from support import assert_same_step, new_layer

OPTIONS = (
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
)
LEAKY = {"activation": "leaky_relu", "negative_slope": 0.25}


def net(**options) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, **options), nn.Sequential(nn.BatchNorm2d(4))
    )


def converted(**options) -> nn.Module:
    return syncbn.convert_sync_batchnorm(net(**options))


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def assert_trains_as(model: nn.Module, reference: nn.Module, calls: int = 2) -> None:
    for seed in range(calls):
        assert_same_step(model, reference, batch(seed))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parameters_and_buffers_are_those_of_batch_norm(options):
    plain = nn.BatchNorm2d(4, **options)
    for layer in (
        syncbn.SyncBatchNorm(4, **options),
        syncbn.convert_sync_batchnorm(nn.BatchNorm2d(4, **options)),
    ):
        for kind in ("_parameters", "_buffers"):
            ours, theirs = getattr(layer, kind), getattr(plain, kind)
            assert list(ours) == list(theirs)
            assert [t is None for t in ours.values()] == [t is None for t in theirs.values()]
        assert layer._non_persistent_buffers_set == plain._non_persistent_buffers_set


def _to_empty(make):
    with torch.device("meta"):
        model = make()
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    return model.to_empty(device="cpu")


def _assigned(make):
    with torch.device("meta"):
        model = make()
    model.load_state_dict(make().state_dict(), assign=True)
    return model


def _in_inference_mode(make):
    with torch.inference_mode():
        model = make()
    return model


@pytest.mark.parametrize("way", (_to_empty, _assigned, _in_inference_mode))
@pytest.mark.parametrize("make", (converted, lambda: nn.Sequential(
    nn.Conv2d(3, 4, 3), syncbn.SyncBatchNorm(4), nn.Sequential(syncbn.SyncBatchNorm(4))
)), ids=("converted", "made"))  # fmt: skip
def test_a_model_trains_after_any_way_to_materialize_it_exact(way, make):
    torch.manual_seed(1)
    reference = make()
    model = way(make)
    if way is _in_inference_mode:  # its parameters train as little as any other model's
        model = copy.deepcopy(model)
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, t in tensors.items():
                    values = t.clone()
                    is_parameter = tensors is module._parameters
                    tensors[name] = nn.Parameter(values) if is_parameter else values
    model.load_state_dict(reference.state_dict())
    assert_trains_as(model, reference)
    assert [m.state.call for m in (model[1], model[2][0])] == [2, 2]


def test_layers_made_while_tensors_are_fake_or_meta_work_afterwards():
    layers = []
    for mode in (torch.device("meta"), FakeTensorMode()):
        with mode:
            layers.append(syncbn.SyncBatchNorm(4, affine=False, track_running_stats=False))
    for layer in layers:
        x = torch.randn(5, 4)
        assert torch.equal(layer(x), syncbn.SyncBatchNorm(4)(x)) and layer.state.call == 1
        step = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(step(x), syncbn.SyncBatchNorm(4)(x)) and layer.state.call == 2


@pytest.mark.parametrize(
    "copied", (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))), ids=("deepcopy", "pickle")
)
def test_a_copy_begins_at_call_zero_under_the_same_name(copied):
    model = converted()
    model(batch())
    other = copied(model)
    for a, b in ((model[1], other[1]), (model[2][0], other[2][0])):
        assert (a.state.call, b.state.call) == (1, 0) and b.state.count == 0
        assert b.state.identity == a.state.identity and b.state is not a.state
    other(batch())
    assert model[1].state.call == other[1].state.call == 1
    file = io.BytesIO()
    torch.save(model.state_dict(), file)  # nothing of the state is in it
    file.seek(0)
    net().load_state_dict(torch.load(file, weights_only=True))


def test_compiled_graph_of_a_layer_that_is_gone_says_so():
    from syncbn.step import layer_state

    handle = syncbn.SyncBatchNorm(4).state.handle
    with pytest.raises(RuntimeError, match="layer .* gone"):
        layer_state.of_handle(handle)


@pytest.mark.parametrize("kind", ("meta", "fake"))
@pytest.mark.parametrize("options", ({}, LEAKY, {"momentum": None}, {"affine": False}), ids=str)
def test_training_without_values_propagates_shapes(kind, options):
    """As torch.nn's batch norm does, for planning of memory and tracing. Nothing is exchanged, and
    no call is counted."""
    with torch.device("meta") if kind == "meta" else FakeTensorMode():
        layer = new_layer(4, **options) if "affine" not in options else None
        layer = syncbn.SyncBatchNorm(4, **options) if layer is None else layer
        for shape in ((3, 4), (3, 4, 5, 6), (0, 4, 7)):
            x = torch.empty(shape, requires_grad=True)
            residual = torch.empty(shape, requires_grad=True)
            y = layer(x, residual)
            y.sum().backward()
            assert y.shape == x.grad.shape == residual.grad.shape == shape
            assert y.device == x.device and y.dtype == x.dtype
    assert layer.state.call == 0
    for parameter in layer.parameters():
        assert parameter.grad.shape == (4,)


@pytest.mark.parametrize("momentum", (0.25, None), ids=str)
@pytest.mark.parametrize("value", (0.0, 3.0, 2.5), ids=str)
def test_a_count_of_batches_that_was_averaged_follows_pytorch(momentum, value):
    """Averaged checkpoints hold it as a floating-point number."""
    ours, plain = syncbn.SyncBatchNorm(4, momentum=momentum), nn.BatchNorm1d(4, momentum=momentum)
    for layer in (ours, plain):
        layer.num_batches_tracked = torch.tensor(value)
    for seed in range(2):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        ours(x), plain(x)
    assert torch.equal(ours.num_batches_tracked, plain.num_batches_tracked)
    assert ours.num_batches_tracked == value + 2
    # Statistics of six samples, and a step of the average: at most 2^-20 beside PyTorch's float32.
    for a, b in zip(ours.buffers(), plain.buffers()):
        assert (a - b).abs().max() <= 2**-20


def test_a_tensor_as_momentum_follows_pytorch():
    x = torch.randn(6, 4)
    layers = [
        syncbn.SyncBatchNorm(4, momentum=torch.tensor(0.25)), syncbn.SyncBatchNorm(4, momentum=0.25)
    ]  # fmt: skip
    for layer in layers:
        layer(x)
    assert torch.equal(layers[0].running_var, layers[1].running_var)
    nn.BatchNorm1d(4, momentum=torch.tensor(0.25))(x)
    with pytest.raises(ValueError, match="momentum: got"):
        syncbn.SyncBatchNorm(4, momentum=torch.tensor([0.25, 0.5]))
