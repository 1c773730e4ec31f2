# SPDX-License-Identifier: Apache-2.0
"""syncbn.fold: synchronized layers whose place no plain layer can take stay, and work."""

import pytest
from torch import nn

import syncbn
from fold_support import Calls, check_equal, exact_input, make_exact


def residual(m, x):
    y = m.conv(x)
    return m.bn(m.conv2(y), y)


def residual_twice(m, x):
    y = residual(m, x)
    return m.bn(y, residual=y)


def residual_of_none(m, x):
    return m.bn(m.conv(x), None)


def residual_of_none_twice(m, x):
    return m.bn(m.bn(m.conv(x), None), residual=None)


def one_call_of_two(m, x):
    y = m.bn(m.conv(x))
    return m.bn(y, y)


def devices(m, x):
    y = m.conv(x)
    return m.bn([y, m.conv2(y)])[1]


def parameter_read(m, x):
    return m.bn(m.conv(x)) * m.bn.weight.sum()


def option_read(m, x):
    return m.bn(m.conv(x)) if m.bn.statistics == "reproducible" else x


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.bn = syncbn.SyncBatchNorm(3)

    def forward(self, x):
        return self.bn(self.conv(x), x if x.sum() > 0 else -x)


ARGUMENTS = "bn is called with other arguments than one tensor"


@pytest.mark.parametrize("activation", ("none", "relu"))
@pytest.mark.parametrize(
    "function, reason",
    (
        (residual, ARGUMENTS),
        (residual_twice, ARGUMENTS),
        (residual_of_none, ARGUMENTS),
        (residual_of_none_twice, ARGUMENTS),
        (one_call_of_two, ARGUMENTS),
        (devices, ARGUMENTS),
        (parameter_read, "bn has tensors that the model reads elsewhere"),
        (option_read, "bn has attributes that the model reads"),
    ),
)
def test_what_no_plain_layer_can_do_keeps_the_layer(function, reason, activation):
    model = Calls(function)
    model.bn, model.bn2 = syncbn.SyncBatchNorm(4, activation=activation), nn.Identity()
    x = exact_input(2, 3, 5, 5)
    assert reason in check_equal(make_exact(model), x, left=["bn"], kept=["bn"])
    # The hook sees what the whole layer gives, its activation included.
    model.bn.register_forward_hook(lambda module, args, output: output)
    assert "bn has hooks" in check_equal(model, x, left=["bn"], kept=["bn"])


def test_untraceable_submodules_keep_their_layers():
    model = make_exact(nn.Sequential(nn.Conv2d(3, 3, 1), syncbn.SyncBatchNorm(3), Untraceable()))
    for sign in (1, -1):
        x = sign * exact_input(2, 3, 5, 5)
        report = check_equal(model, x, left=["2.bn"], kept=["2.bn"])
    assert "2.bn lies in 2, which torch.fx cannot trace" in report
