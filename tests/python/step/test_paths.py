# SPDX-License-Identifier: Apache-2.0
"""Where layers are found among the living modules."""

import copy
import gc
import pickle

import pytest
from torch import nn

import syncbn
from syncbn.exchange.call import Peers
from syncbn.step import layer_state


def new_layer() -> syncbn.SyncBatchNorm:
    return syncbn.SyncBatchNorm(3)


def path_of(layer: nn.Module) -> str | None:
    return layer_state.paths_of_living().get(layer.state)


def test_path_in_the_outermost_module():
    layer = new_layer()
    assert path_of(layer) == ""
    block = nn.Sequential(nn.ReLU(), layer)
    assert path_of(layer) == "1"
    model = nn.ModuleDict({"a": block})
    assert path_of(layer) == "a.1"
    del model
    gc.collect()
    assert path_of(layer) == "1"
    assert block[1] is layer


def test_path_in_the_largest_model():
    """Parts of it elsewhere, and what is left of a constructor that failed, do not matter."""

    class Half(nn.Module):
        def __init__(self, layer):
            kept.append(self)  # before there is anything in it

    kept: list = []
    layer = new_layer()
    part = nn.ModuleList([layer])
    model = nn.ModuleDict({"stem": nn.ReLU(), "bn": layer, "again": layer})
    Half(layer)
    assert path_of(layer) == "bn"
    assert part[0] is layer is model["bn"]


def test_modules_in_a_circle_have_no_path():
    layer = new_layer()
    a, b = nn.ModuleDict({"bn": layer}), nn.ModuleDict()
    a["b"], b["a"] = b, a
    assert path_of(layer) is None
    layer.state.find_path()
    assert layer.state.name == "SyncBatchNorm"
    a.clear()


def test_names_that_are_found_are_not_copied_or_exported():
    """A copy may lie elsewhere, and a program of torch.export keeps the name that it had."""
    model = nn.Sequential(new_layer())
    model[0].state.find_path()
    assert model[0].state.name == "0" and model[0].state.identity.name == "SyncBatchNorm"
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again[0].state.path == "SyncBatchNorm"
    syncbn.set_group(model, timeout=7)
    assert model[0].state.name == "SyncBatchNorm"


def test_conversion_names_layers_that_were_made_directly():
    model = nn.Sequential(nn.Sequential(new_layer()), nn.BatchNorm1d(3))
    model[0][0].state.find_path()
    syncbn.convert_sync_batchnorm(model)
    assert [m.state.name for m in (model[0][0], model[1])] == ["0.0", "1"]
    again = syncbn.convert_sync_batchnorm(nn.ModuleDict({"inner": model}))
    assert [m.state.name for m in (model[0][0], model[1])] == ["0.0", "1"]
    assert copy.deepcopy(again)["inner"][1].state.path == "1"


@pytest.mark.parametrize("ranks, room", ((2, 504), (2048, 24)))
def test_long_paths_lose_their_beginning(ranks, room):
    peers = Peers("", ranks, 0, 1.0)
    for path in ("a" * 600, "\u00e9" * 600, "layer." * 300 + "bn", "x.y" * 400):
        end = layer_state._end_of(path, peers)
        assert path.endswith(end) and room - 8 < len(end.encode()) <= room
        assert "." not in path or path[-len(end) - 1] == "." or len(path.split(".")[-1]) > room
    assert layer_state._end_of("layer4.bn", peers) == "layer4.bn"
