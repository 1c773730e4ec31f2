# SPDX-License-Identifier: Apache-2.0
"""Programs of many kinds, each a function that makes (network, loss), that are refused, with a part
of the text that every rank gets."""

import types

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from share_programs import Base, loss
from syncbn.graph import BatchNorm, Network

REFUSED = {}
#: Kinds of which a process with one share has nothing to be refused.
OF_SEVERAL_SHARES = set()


def refused(text, several=False):
    def note(kind):
        REFUSED[kind.__name__] = (kind, text)
        if several:
            OF_SEVERAL_SHARES.add(kind.__name__)
        return kind

    return note


@refused("max_norm")
def max_norm():
    return nn.Sequential(nn.Embedding(5, 4, max_norm=0.5), Base()), loss


@refused("writes to the trained parameter 'a.weight'")
class Clamps(Base):
    def forward(self, x):
        with torch.no_grad():
            self.a.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@refused("writes to the trained parameter 'a.weight'")
class AssignsData(Base):
    def forward(self, x):
        self.a.weight.data = self.a.weight.data * 0.999
        return super().forward(x)


@refused("a gradient of the parameter 'a.weight', past the model")
class Captured(Base):
    def __init__(self):
        super().__init__()
        weight = self.a.weight
        self.b.register_forward_pre_hook(lambda module, given: (given[0] + weight.mean(),))


@refused("a gradient of the parameter of shape (4, 4), of no part of it")
def parameters_before_the_network():
    outer = nn.Linear(4, 4)
    return Base(), lambda model, batch: F.cross_entropy(model(outer(batch[0])), batch[1])


@refused("a gradient of the parameter of a tensor that outlives the step")
def temperature_in_the_loss():
    heat = torch.ones((), requires_grad=True)
    return Base(), lambda model, batch: F.cross_entropy(model(batch[0]) * heat, batch[1])


@refused("adds or removes modules")
class AddsModules(Base):
    def forward(self, x):
        if not hasattr(self, "late"):
            self.late = nn.Linear(4, 4)
        return super().forward(self.late(x))


@refused("makes the parameter 'late'")
class MakesParameters(Base):
    def forward(self, x):
        if "late" not in self._parameters:
            self.late = nn.Parameter(torch.ones(4))
        return super().forward(x * self.late)


@refused("another shape or dtype of 'seen'")
class GrowingBuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.mean().detach()[None]])
        return super().forward(x)


@refused("got TorchScript at '1'")
def scripted():
    return nn.Sequential(Base(), torch.jit.script(nn.Linear(3, 3))), loss


@refused("got a generator of random numbers, 'draws'")
class GeneratorOfItsOwn(Base):
    def __init__(self):
        super().__init__()
        self.draws = np.random.default_rng(0)


@refused("a forward that changes state.calls, which the shares of a process have together")
class CountsInAnObject(Base):
    def __init__(self):
        super().__init__()
        self.state = types.SimpleNamespace(calls=0, draws=np.random.RandomState(0))

    def forward(self, x):
        self.state.calls += 1
        return super().forward(x) * (1 + 0.1 * self.state.calls)


@refused("a forward that changes calls")
class CountsInTheClass(Base):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


_bank = []


@refused("a forward that changes _bank")
def remembers_in_a_global():
    def compared(model, batch):
        y = model(batch[0])
        _bank.append(y.detach().mean(0))
        return F.cross_entropy(y + torch.stack(_bank).mean(0), batch[1])

    return Base(), compared


def _changes(name, change):
    """A loss that changes what lies outside of the model."""

    def make():
        kept = {
            "center": torch.zeros(3),
            "norm": nn.BatchNorm1d(3, affine=False),
            "array": np.zeros(1),
            "generator": torch.Generator(),
            "other": iter(range(1000)),
        }[name]

        def with_it(model, batch):
            return F.cross_entropy(model(batch[0]) + change(kept), batch[1])

        return Base(), with_it

    make.__name__ = f"changes_{name}"
    return refused("a forward that changes kept")(make)


_changes("center", lambda kept: kept.mul_(0.9).add_(torch.rand(3)))
_changes("norm", lambda kept: kept(torch.randn(4, 3)).mean())
_changes("array", lambda kept: np.add(kept, 1, out=kept).item())
_changes("generator", lambda kept: torch.rand(3, generator=kept))
_changes("other", lambda kept: 0.1 * next(kept))


@refused("a backward that changes size")
class HookOfBackward(Base):
    def __init__(self):
        super().__init__()
        self.size = torch.ones(())

    def forward(self, x):
        h = self.a(x)
        h.register_hook(self.scaled)
        return self.b(self.bn(h))

    def scaled(self, gradient):
        self.size = 0.5 * self.size + gradient.norm()
        return gradient / self.size


@refused("a backward that changes _buffers['size']")
class BufferInBackward(HookOfBackward):
    def __init__(self):
        super().__init__()
        del self.size
        self.register_buffer("size", torch.ones(()))

    def scaled(self, gradient):
        self.size.mul_(0.5).add_(gradient.norm())
        return gradient / self.size


class _Rounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + torch.rand_like(gradient)


@refused("a backward that draws random numbers")
def random_backward():
    return Base(), lambda model, batch: loss(
        model, (_Rounds.apply(model.a(batch[0]))[:, :4], batch[1])
    )


@refused("with results of share", several=True)
def states_outside_of_modules():
    model, states = Base(), {}
    model.a.register_forward_hook(lambda m, i, output: states.update(last=output))
    return model, lambda m, batch: loss(m, batch) + states["last"].mean()


@refused("activation checkpointing around a synchronized layer does not work")
class CheckpointedLayer(Base):
    def forward(self, x):
        return self.b(checkpoint(lambda h: F.relu(self.bn(h)), self.a(x), use_reentrant=False))


@refused("activation checkpointing around a synchronized layer does not work")
class CheckpointedLayerReentrant(Base):
    def forward(self, x):
        return self.b(checkpoint(lambda h: F.relu(self.bn(h)), self.a(x), use_reentrant=True))


@refused("inside hooks of saved tensors, or in a mode")
class HooksAroundALayer(Base):
    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


@refused("got a backward pass inside the forward of one device", several=True)
def slope_through_a_layer():
    def with_slope(model, batch):
        x = batch[0].detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return F.cross_entropy(model(x), batch[1]) + slope.square().mean()

    return Base(), with_slope


@refused("got a training operator in Shares, expected a syncbn.SyncBatchNorm")
def operators():
    return Network(nn.Sequential(nn.Linear(4, 8), BatchNorm(8), nn.Linear(8, 3))), loss


@refused("got a hook of the parameter '0.a.weight'")
def hooks_of_parameters():
    model = nn.Sequential(Base())
    model[0].a.weight.register_hook(lambda gradient: gradient)
    return model, loss


@refused("without elements, or with a layout of its own")
def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.LayerNorm(4)), loss


@refused("expected a tensor of one number that has a gradient")
def no_gradient():
    return Base(), lambda model, batch: loss(model, batch).detach()


@refused("of Tensor, expected a number")
def outputs_among_numbers():
    return Base(), lambda model, batch: {"loss": loss(model, batch), "logits": model(batch[0])}


@refused("expected the same names", several=True)
def other_names():
    return Base(), lambda model, batch: {"loss": loss(model, batch), str(batch[1].tolist()): 1}
