# SPDX-License-Identifier: Apache-2.0
"""Programs of many kinds, each a function that makes (network, loss), whose training has the same
bits on any number of processes."""

import collections
import functools
import random
import types

import numpy as np
import timm.layers
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import syncbn

EQUAL = {}


def equal(kind):
    EQUAL[kind.__name__] = kind
    return kind


def loss(model, batch):
    x, target = batch
    return F.cross_entropy(model(x), target)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(F.relu(self.bn(self.a(x))))


@equal
class BuffersForBackward(Base):
    """Positions, a scale, and one that is expanded."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("positions", torch.arange(8)[None])
        self.register_buffer("wide", torch.full((1,), 0.5).expand(8))
        self.table = nn.Embedding(8, 8)

    def forward(self, x):
        h = self.a(x) * self.scale + self.table(self.positions).mean(1) * self.wide
        return self.b(F.relu(self.bn(h)))


@equal
class WrittenBuffers(Base):
    """In place, by assignment, past the version, and an expanded one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        for name in ("average", "silent", "wide"):
            self.register_buffer(
                name, torch.zeros(1).expand(8) if name == "wide" else torch.ones(8)
            )

    def forward(self, x):
        self.n = self.n + 1
        h = self.a(x)
        mean = h.detach().mean(0)
        self.average.mul_(0.9).add_(mean, alpha=0.1)
        self.silent.data.mul_(0.9).add_(mean.square(), alpha=0.1)
        self.wide = self.wide + mean
        return self.b(F.relu(self.bn(h * self.silent + self.average + self.wide * self.n)))


@equal
class InPlace(Base):
    """Each share's output lies over its own input."""

    def __init__(self):
        super().__init__()
        options = {"activation": "leaky_relu", "inplace": True}
        self.bn, self.bn2 = nn.BatchNorm1d(8), syncbn.SyncBatchNorm(8, **options)

    def forward(self, x):
        return self.b(self.bn(self.bn2(self.a(x))))


@equal
class GradientsInOneMemory(Base):
    """PyTorch gives both parameters views of one gradient."""

    def __init__(self):
        super().__init__()
        self.rows, self.columns = (nn.Parameter(torch.ones(s)) for s in ((2, 4), (4, 2)))

    def forward(self, x):
        h = self.a(x) * (self.rows.flatten() + self.columns.flatten())
        return self.b(self.bn(h))


@equal
class Kept(Base):
    """Modules and methods in lists, lambdas and partial functions."""

    def __init__(self):
        super().__init__()
        self.run, self.parts = self.body, [self.a, {"last": self.b}]
        self.first = lambda x: self.parts[0](x)
        self.norm = functools.partial(type(self).normalized, self)

    def normalized(self, h):
        return F.relu(self.bn(h))

    def body(self, x):
        return self.parts[1]["last"](self.norm(self.first(x)))

    def forward(self, x):
        return self.run(x)


@equal
class RandomNumbers(Base):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        h = self.bn(self.a(x * (np.random.rand() + random.random()) + torch.randn_like(x)))
        return self.b(self.drop(h) * (1 + np.random.standard_normal()) + random.gauss(0, 1))


@equal
def patched():
    """As Accelerate's prepare_model with bf16, and a method of the object."""
    model = Base()
    forward = model.forward

    def run(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(x).float()

    model.forward = types.MethodType(run, model)
    return model, loss


@equal
class Attributes(Base):
    """Across a layer, from step to step, a tensor that is no buffer, and a container."""

    def __init__(self):
        super().__init__()
        self.calls, self.moving, self.cache = 0, torch.zeros(8), {"last": []}
        self.recent, self.counts = collections.deque(maxlen=3), collections.defaultdict(int)
        self.kinds = collections.Counter("a")

    def forward(self, x):
        self.recent.append(x.mean())
        self.counts["calls"] += 1
        self.kinds.update("a")
        x = x + sum(self.recent) * self.counts["calls"] * self.kinds["a"]
        h = self.seen = self.a(x)
        self.calls += 1
        self.moving.mul_(0.5).add_(h.detach().mean(0))
        self.cache["last"].append(self.moving.mean().item())
        y = self.bn(h) * (1 + 0.1 * self.calls) + self.moving + sum(self.cache["last"])
        return self.b(F.relu(y)) + self.seen.mean()


@equal
class Recurrent(Base):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, 2, dropout=0.3, batch_first=True)
        self.gru = nn.GRU(4, 4).requires_grad_(False)

    def forward(self, x):
        h = self.lstm(x[:, None].expand(-1, 3, -1))[0][:, -1]
        return super().forward(h + self.gru(h[None])[0][0])


@equal
class GradientInside(Base):
    """Of a part without a layer, and noise in the loss."""

    @staticmethod
    def make():
        def with_penalty(model, batch):
            x = batch[0].detach().requires_grad_()
            slope = torch.autograd.grad(model.a(x).pow(3).sum(), x, create_graph=True)[0]
            noisy = x + 0.1 * torch.randn_like(x)
            penalty = sum(p.square().sum() for p in model.parameters())
            return F.cross_entropy(model(noisy), batch[1]) + slope.square().mean() + 1e-3 * penalty

        return Base(), with_penalty


@equal
class Parametrized(Base):
    def __init__(self):
        super().__init__()
        self.c = parametrizations.weight_norm(nn.Linear(8, 8))
        self.d = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.e = parametrizations.orthogonal(nn.Linear(8, 8))

    def forward(self, x):
        return self.b(self.e(self.d(F.relu(self.c(self.bn(self.a(x)))))))


class _Momentum(Base):
    """A frozen copy that follows in forward, as of MoCo and BYOL."""

    def __init__(self):
        super().__init__()
        self.key = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 6), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self):
        for own, other in zip(self.key[0].parameters(), self.a.parameters()):
            own.data = own.data * 0.9 + other.data * 0.1

    def forward(self, x):
        self.follow()
        with torch.no_grad():
            key = F.normalize(self.key(x + 0.1), dim=1)
        y = super().forward(x) + (self.a(x) * key).sum(1, keepdim=True)
        y = y + (self.a(x) @ self.queue.clone().detach()).mean(1, keepdim=True)
        self.queue[:, self.place] = key[:1].t()
        self.place[0] = (self.place[0] + 1) % 6
        return y


@equal
class MomentumByData(_Momentum):
    pass


@equal
class MomentumInPlaceOfData(_Momentum):
    def follow(self):
        for own, other in zip(self.key[0].parameters(), self.a.parameters()):
            own.data.mul_(0.9).add_(other.data, alpha=0.1)


@equal
class MomentumOfACopy(_Momentum):
    """As MoCo begins: the first step writes what was there."""

    def __init__(self):
        super().__init__()
        self.key[0].load_state_dict(self.a.state_dict())

    def follow(self):
        for own, other in zip(self.key[0].parameters(), self.a.parameters()):
            own.data.lerp_(other.data, 0.1)


@torch.jit.script
def _silu(x):
    return x * torch.sigmoid(x) + x.sin().exp()


@equal
class ScriptedFunction(Base):
    """That TorchScript optimizes after a few calls."""

    def forward(self, x):
        return self.b(_silu(self.bn(self.a(x))))


@equal
def layer_with_a_forward_of_its_own():
    """Which activates after that of the synchronized layer."""
    acts = timm.layers.BatchNormAct2d(4, act_layer=nn.GELU)
    return nn.Sequential(nn.Unflatten(1, (4, 1, 1)), acts, nn.Flatten(), Base()), loss


@equal
class Tied(Base):
    """Tied, frozen, unused and complex parameters, and one that some shares do not use."""

    def __init__(self):
        super().__init__()
        self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 8)
        self.d.weight = self.c.weight
        self.frozen, self.unused = (
            nn.Linear(8, 8).requires_grad_(False),
            nn.Parameter(torch.ones(2)),
        )
        self.wave = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x):
        h = self.bn(self.a(x))
        if torch.rand(()) < 0.5:
            h = self.d(self.c(h))
        return self.b(self.frozen(h) + (h * self.wave).abs())


class _Named(torch.Tensor):
    """A class that goes through all operations, as MONAI's MetaTensor."""


@equal
def tensor_class():
    def of_class(model, batch):
        return F.cross_entropy(model(batch[0].as_subclass(_Named)), batch[1]).as_subclass(
            torch.Tensor
        )

    return nn.Sequential(Base(), nn.BatchNorm1d(3)), of_class


@equal
class CheckpointedSegments(Base):
    """Without a layer: a method, a module and a function, in both forms."""

    def __init__(self):
        super().__init__()
        self.c, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)
        self.register_buffer("scale", torch.ones(8))

    def segment(self, h):
        return self.drop(F.gelu(self.c(h) * self.scale + self.c.weight.mean()))

    def forward(self, x):
        h = self.bn(self.a(x))
        for reentrant in (False, True):
            h = h + checkpoint(self.segment, h, use_reentrant=reentrant)
            h = h + checkpoint(self.c, h, use_reentrant=reentrant)
        return self.b(h)


@equal
def compiled_whole():
    return torch.compile(nn.Sequential(Base(), nn.Dropout(0.3)), backend="aot_eager"), loss


@equal
def numbers():
    """A dictionary; autocast whose cast weights are used twice; no batch norm."""

    def several(model, batch):
        x, target = batch
        with torch.autocast("cpu", torch.bfloat16):
            first = model(x)
            value = F.cross_entropy((first + model(x + 1)).float(), target)
        with torch.autocast("cpu", torch.bfloat16):
            value = value + model(x).float().square().mean()
        right = (first.argmax(1) == target).sum()
        return {"loss": value, "right": right, "largest": x.max(), "one": 1, "half": 0.5}

    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)), several


@equal
def doubled():
    """In float64, and gradients of very different sizes."""
    model = Base().double()

    def scaled(model, batch):
        y = model(batch[0].double() * torch.logspace(-9, 9, 4))
        return F.cross_entropy(y, batch[1]) * 1e12

    return model, scaled


def made(kind):
    """(network, loss) of a kind, not converted."""
    if isinstance(kind, type):
        return kind.make() if hasattr(kind, "make") else (kind(), loss)
    return kind()
