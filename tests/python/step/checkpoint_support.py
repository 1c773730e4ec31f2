# SPDX-License-Identifier: Apache-2.0
"""A network with a segment in a segment, and its comparison with one without."""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import syncbn
from support import assert_same_step

recomputing = functools.partial(checkpoint, use_reentrant=False)
reentrant = functools.partial(checkpoint, use_reentrant=True)


def plain(function, x):
    return function(x)


#: How the outer and the inner segment run.
FORMS = {
    f"{name} around {inside}": (outer, inner)
    for name, outer in (("plain", plain), ("non-reentrant", recomputing), ("reentrant", reentrant))
    for inside, inner in (
        ("plain", plain),
        ("non-reentrant", recomputing),
        ("reentrant", reentrant),
    )
}


class Net(nn.Module):
    """Four calls of three layers; three of them, of two layers, in a segment `outer` of which the
    first is in a segment `inner` of its own."""

    def __init__(self, outer=plain, inner=plain, **options):
        super().__init__()
        torch.manual_seed(2)
        self.outer, self.inner = outer, inner
        self.linear = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.bn = nn.ModuleList(syncbn.SyncBatchNorm(5, **options) for _ in range(3))

    def _inside(self, x):
        return self.bn[0](self.linear[1](x)).tanh()

    def _segment(self, x):
        x = self.inner(self._inside, x.sin())
        x = self.bn[0](self.bn[1](x * 2) + 1)
        return x.sigmoid()

    def forward(self, x):
        x = self.outer(self._segment, self.linear[0](x))
        return self.bn[2](self.linear[2](x))


def assert_same_steps(model, reference):
    """Of two steps."""
    reference.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        assert_same_step(model, reference, torch.randn(6, 5, generator=generator))
