# SPDX-License-Identifier: Apache-2.0
"""What the tests of folding share: networks on which nothing rounds, and the comparison of models.

Networks are tested on numbers with which both ways of computing are exact, so that outputs must be
equal; rounding is tested one pair at a time against a derived bound.
"""

import copy
import re
import warnings

import torch
from torch import nn

import syncbn

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, syncbn.SyncBatchNorm)


class Calls(nn.Module):
    """Two pairs and a forward given as a function of the module and its input."""

    def __init__(self, function):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(4)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def integers(low, high, shape, generator):
    return torch.randint(low, high + 1, tuple(shape), generator=generator).double()


@torch.no_grad()
def make_exact(model: nn.Module, seed: int = 0) -> nn.Module:
    """float64, weights and biases small integers, var + eps a power of 4 and the other numbers
    of batch norm small integers or powers of two: every product and sum of a few layers on integer
    input fits 53 bits, folded or not, so neither rounds."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.double().modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eps = 2.0**-10
            shape = (module.num_features,)
            if module.running_var is not None:
                power = 4.0 ** integers(-1, 1, shape, generator)
                module.running_var.copy_(power - module.eps)
                module.running_mean.copy_(integers(-3, 3, shape, generator))
            if module.weight is not None:
                sign = 1 - 2 * integers(0, 1, shape, generator)
                module.weight.copy_(sign * 2.0 ** integers(-1, 1, shape, generator))
                module.bias.copy_(integers(-3, 3, shape, generator))
        else:
            for parameter in module.parameters(recurse=False):
                parameter.copy_(integers(-2, 2, parameter.shape, generator))
    return model


def exact_input(*shape):
    return integers(-3, 3, shape, torch.Generator().manual_seed(1))


def fold_reporting(model):
    """The folded model and the text of the warning, empty if there was none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folded = syncbn.fold(model)
    texts = [str(w.message) for w in caught if "syncbn.fold" in str(w.message)]
    assert len(texts) <= 1
    return folded, "".join(texts)


def norms_of(model):
    return [name for name, m in model.named_modules() if isinstance(m, NORMS)]


def check_equal(model, *inputs, left=(), kept=()):
    """Folds; `left` are the names of the batch norms that must not fold, `kept` those of them that
    must stay layers of this package. Returns the report."""
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    kinds = [type(m) for m in model.modules()]
    folded, report = fold_reporting(model)
    assert type(folded) is type(model)
    assert [m.training for m in model.modules()] == modes
    assert [type(m) for m in model.modules()] == kinds
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} changed"
    assert not any(m.training for m in folded.modules())
    own = [n for n, m in folded.named_modules() if type(m).__module__.startswith("syncbn")]
    assert own == list(kept)
    assert norms_of(folded) == list(left), report
    reported = re.findall(r"^  (\S+) ", report, re.MULTILINE)
    assert reported == list(left), report
    with torch.no_grad():
        expected, got = copy.deepcopy(model).eval()(*inputs), folded(*inputs)
    assert torch.equal(got, expected)
    return report
