# SPDX-License-Identifier: Apache-2.0
"""syncbn.fold: outputs stay equal, in single pairs of layers and in networks."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import syncbn
from fold_support import check_equal, exact_input, make_exact, norms_of

CONVOLUTIONS = {
    "Conv1d": (nn.Conv1d, nn.BatchNorm1d, 1),
    "Conv2d": (nn.Conv2d, nn.BatchNorm2d, 2),
    "Conv3d": (nn.Conv3d, nn.BatchNorm3d, 3),
    "ConvTranspose1d": (nn.ConvTranspose1d, nn.BatchNorm1d, 1),
    "ConvTranspose2d": (nn.ConvTranspose2d, nn.BatchNorm2d, 2),
    "ConvTranspose3d": (nn.ConvTranspose3d, nn.BatchNorm3d, 3),
}


def gamma(n, unit):
    assert n * unit < 0.5
    return n * unit / (1 - n * unit)


@torch.no_grad()
def check_within_bound(host, norm, x, dtype):
    """|folded - original| <= 2 gamma_{n+12} H plus underflow, |folded - exact| <= half of that.

    u: the unit of dtype; n: the products of one output; gamma_k = k u / (1 - k u), and k factors
    of 1 + d with |d| <= u are within gamma_k of 1. With s = weight / sqrt(var + eps) and
    A = sum |w| |x| + |b|, the magnitudes are H = |s| (A + |mean|) + |bias|.
    Original: the convolution is within gamma_{n+2} A (n products, their sum in any order, the bias,
    the output's rounding); batch norm takes at most 8 more roundings (four for s, three for
    bias - mean s, x s and its sum, some of them in common), each relative to H: gamma_{n+10} H.
    Folded: one rounding of each weight and of the bias, computed in float64, then the convolution:
    gamma_{n+3} H. Two more for what float64 rounds in s, H and the exact value.
    Underflow: each operation may be off by the smallest number eta instead.
    """
    original = nn.Sequential(host, norm).to(dtype).eval()
    folded = syncbn.fold(original)
    assert norms_of(folded) == []
    assert folded[0].weight.dtype == folded[0].bias.dtype == dtype
    x = x.to(dtype)
    exact = copy.deepcopy(original).double()(x.double())
    size = copy.deepcopy(original[0]).double()
    for parameter in size.parameters():
        parameter.abs_()
    view = (1, -1) + (1,) * (exact.dim() - 2)
    ones = torch.ones_like(norm.running_var)
    weight, bias = (ones, 0 * ones) if norm.weight is None else (norm.weight, norm.bias)
    scale = (weight.double() / (norm.running_var.double() + norm.eps).sqrt()).abs().view(view)
    mean, bias = norm.running_mean.double().abs().view(view), bias.double().abs().view(view)
    magnitudes = scale * (size(x.double().abs()) + mean) + bias
    transposed = isinstance(host, nn.modules.conv._ConvTransposeNd)
    n = host.weight.numel() // host.weight.shape[1 if transposed else 0]
    info = torch.finfo(dtype)
    eta = info.smallest_normal * info.eps
    underflow = eta * (n + 8) * (1 + scale.max() + x.abs().max())
    bound = gamma(n + 12, info.eps / 2) * magnitudes + underflow
    assert ((folded(x).double() - exact).abs() <= bound).all()
    assert ((folded(x).double() - original(x).double()).abs() <= 2 * bound).all()


@torch.no_grad()
def randomize(norm):
    if norm.weight is not None:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.05, 4)
    return norm


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_within_the_bound(kind, dtype):
    conv, plain, axes = CONVOLUTIONS[kind]
    torch.manual_seed(2)
    for groups, bias, affine in itertools.product((1, 2, 4), (True, False), (True, False)):
        for norm in (plain, nn.SyncBatchNorm, syncbn.SyncBatchNorm):
            host = conv(4, 8, 3, stride=2, dilation=2, groups=groups, bias=bias)
            x = torch.randn(2, 4, *(7, 6, 5)[:axes])
            check_within_bound(host, randomize(norm(8, eps=1e-3, affine=affine)), x, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_within_the_bound(dtype):
    torch.manual_seed(3)
    for bias, affine in itertools.product((True, False), (True, False)):
        for norm in (nn.BatchNorm1d, nn.SyncBatchNorm, syncbn.SyncBatchNorm):
            host = nn.Linear(9, 5, bias=bias)
            check_within_bound(host, randomize(norm(5, affine=affine)), torch.randn(6, 9), dtype)


class Block(nn.Module):
    """A residual block; the convolution of the shortcut is there where the width changes."""

    def __init__(self, inputs, outputs, stride, groups):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, groups=groups, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        Block(4, 4, 1, 2),
        Block(4, 6, 2, 1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 5),
        nn.BatchNorm1d(5),
        nn.Linear(5, 2),
    )


@pytest.mark.parametrize("synchronized", (False, True))
def test_residual_network_exact_and_exported_without_batch_norm(synchronized):
    model = make_exact(resnet())
    if synchronized:
        model = syncbn.convert_sync_batchnorm(model)
    x = exact_input(2, 3, 8, 8)
    assert check_equal(model, x) == ""
    program = torch.export.export(syncbn.fold(model), (x,))
    operators = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert sum("conv2d" in name for name in operators) == 6
    assert not any("norm" in name for name in operators), operators
    assert torch.equal(program.module()(x), model.eval()(x))


class RandomNet(nn.Module):
    """Convolutions, activations and batch norms in random order and settings, with shortcuts."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def pick(*options):
            return options[int(torch.randint(len(options), (1,), generator=generator))]

        axes = pick(1, 2, 3)
        plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes - 1]
        straight = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
        self.parts = nn.ModuleList()
        self.plan = []  # per part: add the input of the last convolution afterwards?
        self.unfolded = []
        after_conv = False
        for i in range(pick(3, 5, 7)):
            kind = pick("conv", "conv", "norm", "norm", "relu")
            if kind == "conv":
                conv = pick(straight, transposed)
                modes = ("zeros", "circular", "replicate") if conv is straight else ("zeros",)
                part = conv(
                    4,
                    4,
                    3,
                    padding=1,
                    groups=pick(1, 2, 4),
                    bias=pick(True, False),
                    padding_mode=pick(*modes),
                )
            elif kind == "norm":
                norm = pick(plain, nn.SyncBatchNorm, syncbn.SyncBatchNorm)
                part = norm(4, affine=pick(True, False), track_running_stats=True)
                if not after_conv:
                    self.unfolded.append(f"parts.{i}")
            else:
                part = nn.ReLU()
            # A convolution whose output is also added to something has a second user.
            shortcut = kind != "conv" and pick(True, False, False)
            after_conv = kind == "conv"
            self.parts.append(part)
            self.plan.append(shortcut)
        self.shape = (2, 4, *(5, 4, 3)[:axes])

    def forward(self, x):
        for part, shortcut in zip(self.parts, self.plan):
            y = part(x)
            x = y + 1 if shortcut else y
        return x


@pytest.mark.parametrize("seed", range(40))
def test_random_networks_exact(seed):
    model = RandomNet(seed)
    check_equal(make_exact(model, seed), exact_input(*model.shape), left=model.unfolded)
