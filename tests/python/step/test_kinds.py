# SPDX-License-Identifier: Apache-2.0
"""An activation that the table does not have is an error in all places that depend on one; one that
only the table has is in all of them what the table says, and the core refuses it."""

import pytest
import torch
from torch import nn

import syncbn
from syncbn.step import options
from syncbn.step.options import ACTIVATIONS, Activation, Options, finish

NAME = "made_up"


class Halved(nn.Module):
    def forward(self, x):
        return halved(x)


def halved(x):
    return torch.where(x > 0, x, x / 2)


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, NAME, Activation(len(ACTIVATIONS), 0.5, halved, Halved))


def model():
    torch.manual_seed(0)
    layer = syncbn.SyncBatchNorm(4)
    layer.activation = NAME  # where no constructor looks
    return nn.Sequential(nn.Conv2d(3, 4, 1), layer)


X = torch.linspace(-1, 1, 2 * 3 * 5 * 5).reshape(2, 3, 5, 5)
PLACES = {
    "constructor": lambda: syncbn.SyncBatchNorm(4, activation=NAME),
    "training": lambda: model()(X),
    "evaluation": lambda: model().eval()(X),
    "function": lambda: finish(X, None, Options(activation=NAME)),
    "text": lambda: repr(model()),
    "agreement": lambda: Options(activation=NAME).shared(),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_unknown_activation_is_an_error(place):
    with pytest.raises(ValueError, match=f"^activation: got '{NAME}', expected one of"):
        PLACES[place]()


def test_one_in_the_table_is_what_the_table_says(made_up):
    plain = model().eval()
    plain[1].activation = "none"
    expected = halved(plain(X))
    assert torch.equal(model().eval()(X), expected)
    assert "negative_slope" not in repr(model())
    assert "negative_slope" not in Options(activation=NAME).shared()


def test_one_in_the_table_alone_is_refused_by_the_core(made_up):
    with pytest.raises(ValueError, match="activation: got number 3, expected less than 3"):
        model()(X)
    with pytest.raises(ValueError, match=f"^inplace: got True with {NAME}, from whose output"):
        syncbn.SyncBatchNorm(4, activation=NAME, inplace=True)


def test_a_dtype_in_the_table_alone_is_refused_by_the_core(monkeypatch):
    layer = syncbn.SyncBatchNorm(4)
    x = torch.ones(2, 4).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="got torch.float8_e4m3fn, expected float16"):
        layer(x)
    monkeypatch.setattr(options, "DTYPES", (*options.DTYPES, x.dtype))
    with pytest.raises(ValueError, match="x: got dtype Float8_e4m3fn, expected float16"):
        layer(x)


def test_numbers_are_those_of_the_core():
    assert [a.number for a in ACTIVATIONS.values()] == list(range(len(ACTIVATIONS)))
