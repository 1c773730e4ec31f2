# SPDX-License-Identifier: Apache-2.0
"""Forking networks, and operators, on several devices of one process: one training operator for the
samples of all of them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import syncbn
from support import assert_same_layers
from syncbn.graph import BatchNorm, Network
from syncbn.ops import batch_norm
from syncbn.parallel import SelfDataParallel


def model():
    """Of operations for each element, so that bits do not depend on the devices."""
    torch.manual_seed(5)
    layers = BatchNorm(4), nn.ReLU(inplace=True), BatchNorm(4, use_global_est=True)
    network = nn.Sequential(*layers, nn.ReLU(inplace=True))
    for layer in layers[::2]:
        nn.init.normal_(layer.scale)
    return network


def samples(seed=0, n=7):
    return torch.randn(n, 4, 5, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("replicate", (False, True))
@pytest.mark.parametrize("wrap", (Network, lambda m: m), ids=("network", "layers"))
def test_has_the_bits_of_one_device_exact(replicate, wrap):
    models = model(), model()
    parallel, one = SelfDataParallel(wrap(models[0]), ["cpu"] * 3, replicate), wrap(models[1])
    for seed in range(3):
        xs = [samples(seed).requires_grad_() for _ in range(2)]
        y, expected = torch.cat(parallel(xs[0])), one(xs[1])
        assert torch.equal(y, expected)
        for each in (y, expected):
            each.pow(3).sum().backward()
        assert torch.equal(xs[0].grad, xs[1].grad)
    assert_same_layers(*models)
    assert models[0][0].batches == 3
    before = copy.deepcopy(models[0].state_dict())
    ys = parallel.eval()(samples(9))
    assert torch.equal(torch.cat(ys), one.eval()(samples(9)))
    assert [len(y) for y in ys] == [3, 2, 2]
    assert all(torch.equal(v, before[k]) for k, v in models[0].state_dict().items())


@pytest.mark.parametrize("replicate", (False, True))
def test_trains_as_on_one_device(replicate):
    """Three steps in float64, of sums of at most 10^3 terms in other orders: 1e-10 leaves room for
    10^6 roundings of 2^-53."""
    nets = []
    for _ in range(2):
        torch.manual_seed(6)
        plain = nn.Sequential(nn.Conv1d(4, 6, 2), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 2, 4))
        nets.append(Network(plain.double(), loss=F.mse_loss, convert=True))
    parallel = SelfDataParallel(nets[1], ["cpu"] * 3, replicate)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for seed in range(3):
        x, target = samples(seed, 6).double(), torch.zeros(6, 2, 1, dtype=torch.float64)
        losses = nets[0].train(x, target=target), sum(parallel(x, target=target)) / 3
        for loss, optimizer in zip(losses, optimizers):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for (name, value), other in zip(nets[0].state_dict().items(), nets[1].state_dict().values()):
        torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-10, msg=name)


class Calls(nn.Module):
    """The operator, as the first entry of x tells."""

    def __init__(self, how=lambda own, x: own.operator(x)):
        super().__init__()
        self.how = how
        self.register_buffer("zeros", torch.zeros(4))
        self.register_buffer("batches", torch.tensor([1]))

    def operator(self, x, **options):
        estimates = self.zeros, self.zeros + 1
        return batch_norm(x, *estimates, None, None, self.batches, **options).y

    def forward(self, x):
        return self.how(self, x)


def gradient(own, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(own.operator(x).pow(3).sum(), x)[0]


def named(own, x):
    return own.operator(x, layer_name=f"bn{len(x)}")


@pytest.mark.parametrize(
    "how, xs, error, text",
    (
        (lambda own, x: own.operator(x), [samples(), samples().double()], ValueError,
         "^x of device 1: got torch.float64 and .*, expected torch.float32"),
        (lambda own, x: own.operator(x), [samples(), samples()[..., :3]], ValueError,
         r"got torch.float32 and \(4, 3\) after the samples, expected .*\(4, 5\), as of device 0"),
        (lambda own, x: own.operator(x), [samples(), samples().long()], ValueError, "^x"),
        (lambda own, x: own.operator(x), [samples()[0, 0], samples()], ValueError, "at least 2D"),
        (named, [samples(), samples(n=3)], syncbn.DivergenceError, "0 at.*'bn7'.*1 at.*'bn3'"),
        (gradient, [samples()] * 2, RuntimeError, "^batch_norm: got a backward pass inside"),
        (lambda own, x: checkpoint(own.operator, x, use_reentrant=False), [samples()] * 2,
         RuntimeError, "^batch_norm: got a call in a checkpointed segment"),
    ),
)  # fmt: skip
def test_what_devices_may_not_do(how, xs, error, text):
    with pytest.raises(error, match=text):
        SelfDataParallel(Calls(how), ["cpu"] * 2)(xs)


def test_inference_of_one_device_is_its_own():
    def how(own, x):
        x = x.detach().requires_grad_()
        y = own.operator(x, is_infer=len(x) == 7)
        return torch.autograd.grad(y.sum(), x)[0] if len(x) == 7 else y

    with pytest.raises(syncbn.DivergenceError, match="device 0 finished; device 1 at"):
        SelfDataParallel(Calls(how), ["cpu"] * 2)([samples(), samples(n=3)])
    assert len(SelfDataParallel(Calls(how), ["cpu"] * 2)([samples()] * 2)) == 2
