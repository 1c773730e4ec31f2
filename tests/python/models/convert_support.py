# SPDX-License-Identifier: Apache-2.0
"""What the tests of conversion share: classes that are no plain batch norm, and refusals."""

import pytest
import torch
from torch import nn

import syncbn
from syncbn.models.classes import registered


class OwnBatchNorm(nn.BatchNorm2d):
    """A subclass without a forward of its own; it could override anything else."""


class FrozenBatchNorm(nn.Module):
    """As torchvision's: not derived from PyTorch's batch norm."""

    def __init__(self, channels):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(channels))


class BatchNormSilu(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: an activation behind the normalization."""

    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(super().forward(x))


class SyncBatchNormSilu(syncbn.SyncBatchNorm):
    def forward(self, x):
        return self.act(super().forward(x))


@pytest.fixture(autouse=True)
def registry():
    """What a test registers is gone after it."""
    before = dict(registered)
    yield
    registered.clear()
    registered.update(before)


def state_of(net):
    """All that an error must leave as it was."""
    return [
        (m, type(m), dict(vars(m)), dict(m._modules), dict(m._buffers), dict(m._parameters))
        for m in net.modules()
    ]


def refused(net, text, error=ValueError):
    before = state_of(net)
    with pytest.raises(error, match=text):
        syncbn.convert_sync_batchnorm(net)
    assert state_of(net) == before
