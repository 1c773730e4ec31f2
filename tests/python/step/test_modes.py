# SPDX-License-Identifier: Apache-2.0
"""Modes of PyTorch around the layer: transforms, the profiler, deterministic and anomaly mode."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile

import syncbn
from support import assert_same_layers, new_layer


def functional(x, weight, bias, training):
    mean, var = torch.linspace(-1, 1, 3), torch.linspace(1, 2, 3)
    return syncbn.functional.sync_batch_norm(x, mean, var, weight, bias, training)


def arguments():
    generator = torch.Generator().manual_seed(70)
    return [torch.randn(*s, generator=generator) for s in ((4, 3), (3,), (3,))]


@pytest.mark.parametrize("which", (0, 1, 2))
def test_forward_mode_is_refused_in_training_and_works_in_evaluation(which):
    """torch.nn.SyncBatchNorm: "You must implement the jvp function" after its exchange."""
    primals = arguments()
    tangents = arguments()
    name = ("input", "weight", "bias")[which]
    layer = new_layer(3)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    with forward_ad.dual_level():
        duals = list(primals)
        duals[which] = forward_ad.make_dual(primals[which], tangents[which])
        with pytest.raises(NotImplementedError, match=f"^{name}: got .*tangent.*, expected none"):
            functional(*duals, training=True)
        if which == 0:
            with pytest.raises(NotImplementedError, match="^input: got"):
                layer(duals[0])
            with pytest.raises(NotImplementedError, match=r"^inputs\[1\]: got"):
                layer([primals[0], duals[0]])
        functional(*primals, training=True)  # without a tangent
        got = forward_ad.unpack_dual(functional(*duals, training=False)).tangent
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    # The derivative in closed form; 5 roundings of numbers below 10 in float32.
    x, weight, bias = primals
    scale = 1 / (torch.linspace(1, 2, 3) + 1e-5).sqrt()
    normalized = (x - torch.linspace(-1, 1, 3)) * scale
    expected = (tangents[0] * weight * scale, normalized * tangents[1], tangents[2].expand(4, 3))
    torch.testing.assert_close(got, expected[which], rtol=0, atol=10 * 5 * 2**-24)


TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack((x, x))),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused_in_training_and_work_in_evaluation(transform):
    """torch.nn.SyncBatchNorm: "must override the setup_context staticmethod"."""
    x, weight, bias = arguments()
    layer = new_layer(3)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    for function in (layer, lambda x: functional(x, weight, bias, True)):
        with pytest.raises(NotImplementedError, match="transform of torch.func.*expected"):
            TRANSFORMS[transform](function, x)
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    layer.eval()
    plain = nn.BatchNorm1d(3).eval()
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(TRANSFORMS[transform](layer, x), TRANSFORMS[transform](plain, x))


def network():
    torch.manual_seed(72)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4)))
    return syncbn.convert_sync_batchnorm(model)


def test_ranges_of_a_profile():
    model = network()
    x = torch.randn(5, 3)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
        model.eval()(x)
    counts = {e.key: e.count for e in profiler.key_averages() if e.key.startswith("syncbn::")}
    ranges = {k: v for k, v in counts.items() if not hasattr(torch.ops.syncbn, k[8:].split(" ")[0])}
    assert ranges == {
        "syncbn::1": 2,
        "syncbn::1 backward": 1,
        "syncbn::2.0": 2,
        "syncbn::2.0 backward": 1,
    }
    # Operators lie inside their layer's range, one for each direction.
    events = profiler.events()
    assert len([e for e in events if e.name == "syncbn::forward_begin"]) == 4
    inside = [e for e in events if e.name == "syncbn::backward_begin"]
    assert len(inside) == 2
    assert {e.cpu_parent.name for e in inside} == {"syncbn::1 backward", "syncbn::2.0 backward"}


def step(layer, residual=None):
    """One training step with second derivatives; every tensor that comes out of it."""
    x = torch.randn(6, 5, 7, 3, generator=torch.Generator().manual_seed(73)).requires_grad_()
    z = torch.randn(6, 5, 7, 3, generator=torch.Generator().manual_seed(74)).requires_grad_()
    y = layer(x, z) if residual else layer(x * 1)
    y.square().sum().backward(retain_graph=True)
    results = [y.detach(), x.grad.clone()]
    if not layer.inplace:
        (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        results += torch.autograd.grad(dx.square().sum(), (x, layer.weight))
    return results


CONFIGURATIONS = (
    ({}, False),
    ({"activation": "relu"}, True),
    ({"activation": "leaky_relu", "inplace": True}, False),
    ({"statistics": "welford"}, False),
    ({"affine_grad": "global"}, True),
)


def twice(change):
    """Layers and results of a step without and with a mode around it."""
    for options, residual in CONFIGURATIONS:
        layers = [new_layer(5, **options) for _ in range(2)]
        for layer in layers:
            with torch.no_grad():
                layer.weight.fill_(1.5)
        expected = step(layers[0], residual)
        with change():
            got = step(layers[1], residual)
        for a, b in zip(expected, got, strict=True):
            assert torch.equal(a, b)
        assert_same_layers(*layers)


class _Deterministic:
    def __enter__(self):
        self.fill = torch.utils.deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True

    def __exit__(self, *_):
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = self.fill


def test_deterministic_mode_without_complaint_exact():
    """Uninitialized memory is filled with NaN there: a word that nobody writes would show."""
    twice(_Deterministic)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_exact():
    twice(torch.autograd.detect_anomaly)
