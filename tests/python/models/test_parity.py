# SPDX-License-Identifier: Apache-2.0
"""syncbn.testing.parity. PyTorch has nothing like it; torch.nn.SyncBatchNorm's statistics are sums
in float32, whose bits change with the number of ranks."""

import copy
import math

import pytest
import torch
from torch import nn

import syncbn
from syncbn import testing
from syncbn.testing import parity


class Elementwise(nn.Module):
    """Nothing but batch norm and elementwise functions: no bit depends on the batch's split."""

    def __init__(self):
        super().__init__()
        self.first = syncbn.SyncBatchNorm(3)
        self.twice = syncbn.SyncBatchNorm(3, activation="relu")

    def forward(self, x, *others):
        z = self.first(x)
        return self.twice(self.twice(torch.sin(z)), residual=z)


class DependsOnTheShare(syncbn.SyncBatchNorm):
    def forward(self, x):
        return super().forward(x) * len(x)


def cube(y):
    """Not degenerate: the mean of squares after a batch norm hardly depends on its input."""
    return (y**3).sum() / 1000


@pytest.mark.parametrize("samples, ranks", ((8, 4), (7, 3), (2, 4), (5, 1)))
def test_without_other_layers_nothing_drifts_exact(samples, ranks):
    """Uneven and empty shares too; the whole network has the same bits."""
    torch.manual_seed(0)
    x = torch.randn(samples, 3, 5, 6) * torch.exp2(torch.randint(-20, 20, (samples, 3, 5, 6)))
    result = parity(Elementwise(), x, ranks, cube)
    assert [(r.path, r.call) for r in result] == [("first", 0), ("twice", 0), ("twice", 1)]
    assert all(row[3:] == (0.0,) * 5 and row.shape == x.shape for row in result)
    assert result.exact and result.losses[0] == result.losses[1] != 0
    # A layer called once: its gradients are exact sums. The one called twice adds two of them.
    assert result.gradient_drift == 0.0


def test_the_model_is_not_changed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    before, types = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    x = torch.randn(6, 3, 8, 8)
    state = torch.get_rng_state()
    result = parity(model, x, ranks=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert result.exact and [r.path for r in result] == ["1"]
    assert [type(m) for m in model.modules()] == types and not model[1]._forward_hooks
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_layer_that_depends_on_its_share_is_found():
    """8 samples in one process, 2 on each of 4 ranks: factors of 8 and 2."""
    torch.manual_seed(0)
    model = nn.Sequential(syncbn.SyncBatchNorm(3), DependsOnTheShare(3), syncbn.SyncBatchNorm(3))
    x = torch.randn(8, 3, 4, 4)
    result = parity(model, x, 4, cube)
    assert not result.exact and "same bits" in str(result)
    first, wrong, last = result
    assert first[3:6] == last[3:6] == (0.0,) * 3
    assert first.output_drift == 0.0
    assert wrong.statistics == 0.0 and wrong.input_gradient > 0
    y = syncbn.SyncBatchNorm(3)(syncbn.SyncBatchNorm(3)(x))
    # 8 y and 2 y are exact, and their difference is rounded once in float64, if at all.
    assert wrong.output == float(6 * y.detach().double().abs().max()) == wrong.output_drift
    assert last.output_drift > 0 and result.losses[0] != result.losses[1]


def test_dropout_is_drift():
    """Random numbers are drawn once per rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), syncbn.SyncBatchNorm(3))
    (row,) = parity(model, torch.randn(8, 3, 4), 2)
    assert row[3:6] == (0.0, 0.0, 0.0)
    fixed = nn.Sequential(nn.Dropout(0.0), syncbn.SyncBatchNorm(3))
    assert parity(fixed, torch.randn(8, 3, 4), 2)[0].output_drift == 0.0


class Masked(syncbn.SyncBatchNorm):
    def forward(self, x, residual=None, mask=None):
        assert mask is not None and mask.shape == (len(x), x.shape[2])
        return super().forward(x, residual, mask)


@pytest.mark.parametrize("by_name", (True, False))
def test_masks_are_part_of_the_call_exact(by_name):
    """Padding that is NaN would be seen by a layer that is examined without its mask."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = Masked(3)

        def forward(self, x, mask):
            return self.bn(x, mask=mask) if by_name else self.bn(x, None, mask)

    mask = torch.arange(5) < torch.tensor([5, 2, 0, 3]).view(-1, 1)
    x = torch.randn(4, 3, 5).masked_fill(~mask.unsqueeze(1), math.nan)
    result = parity(Model(), (x, mask), 3, cube)
    assert result.exact and not math.isnan(result.losses[0])


def test_difference():
    nan, inf = math.nan, math.inf

    def of(a, b):
        return testing._difference(torch.tensor(a), torch.tensor(b))

    assert of([1.0, nan, inf], [1.0, nan, inf]) == 0.0
    assert of([1.0, nan], [1.5, nan]) == 0.5
    assert of([0.0], [-0.0]) > 0.0
    assert of([1.0, 0.0], [nan, 0.0]) == of([inf], [-inf]) == inf


class Scalar(Elementwise):
    def forward(self, x):
        return super().forward(x).mean()


WELFORD = nn.Sequential(syncbn.SyncBatchNorm(3, statistics="welford"))


@pytest.mark.parametrize(
    "model, options, text",
    (
        (Elementwise(), {"ranks": 0}, "^ranks: got 0, expected an integer of at"),
        (Elementwise(), {"ranks": 1.5}, "^ranks: got 1.5"),
        (Elementwise(), {"ranks": True}, "^ranks: got True"),
        (Elementwise(), {"loss": "mse"}, "^loss: got 'mse', expected a function"),
        (Elementwise(), {"loss": lambda y: y}, r"^loss: got shape \(4, 3\) as"),
        (Elementwise(), {"loss": lambda y: 1.0}, "^loss: got 1.0 as its result"),
        (Elementwise().eval(), {}, "^model: got no batch norm layer in training"),
        (nn.ReLU(), {}, "^model: got no batch norm layer in training mode"),
        (WELFORD, {}, "^model: got statistics='welford' in 0, expected 'reproducible'"),
        ("model", {}, "^model: got str, expected a torch.nn.Module"),
        (Scalar(), {}, "^model: got Tensor tensor.* in its output, expected"),
    ),
)
def test_bad_arguments_are_refused(model, options, text):
    with pytest.raises(ValueError, match=text):
        parity(model, torch.ones(4, 3), **options)
