# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing in one process: the bits, the running statistics and the passes of a
network without it. rank_cases_checkpoint.py has what several ranks do.

torch.nn.SyncBatchNorm, like every batch norm of PyTorch, updates its running statistics in both
runs of a segment, and on several ranks exchanges twice.
"""

import copy
import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import syncbn
from checkpoint_support import FORMS, Net, assert_same_steps, plain, recomputing, reentrant
from support import Operators, assert_same_layers, unchanged
from syncbn.step import recomputation


@pytest.mark.parametrize("form", FORMS)
def test_forms_exact(form):
    """Every nesting of both forms, around and inside of each other; a layer is used twice."""
    with Operators() as operators:
        assert_same_steps(Net(*FORMS[form]), Net())
    assert operators.count("forward_begin") == 16  # four calls a step, of two networks


@pytest.mark.parametrize(
    "options",
    (
        {"statistics": "welford"},
        {"momentum": None, "affine_grad": "global"},
        {"activation": "relu"},
        {"activation": "leaky_relu", "inplace": True},
        {"track_running_stats": False},
        {"affine": False},
    ),
    ids=str,
)
@pytest.mark.parametrize("form", (recomputing, reentrant))
def test_options_exact(form, options):
    assert_same_steps(Net(form, **options), Net(**options))


@pytest.mark.parametrize("form", (recomputing, reentrant))
def test_second_backward_exact(form):
    """Each backward over a retained graph runs the segment again; still one update."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    results = []
    for net in (Net(form), Net()):
        y = net(x)
        for power in (2, 3, 2):
            (y**power).sum().backward(retain_graph=True)
        results.append(net)
    assert_same_layers(*results)


@pytest.mark.parametrize("all_but", (None, torch.ops.aten.sin.default))
def test_selective_policy_exact(all_but):
    """That saves one operator and the step, or all but one."""

    def policy(context, op, *args, **kwargs):
        saved = op in (torch.ops.aten.addmm.default, torch.ops.syncbn.forward_begin.default)
        saved = saved if all_but is None else op is not all_but
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    form = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
    assert_same_steps(Net(form), Net())


@pytest.mark.parametrize("form", (recomputing, reentrant))
def test_other_hooks_of_saved_tensors_exact(form):
    """Hooks of the user inside and outside of the segment."""

    def offloading(function, x):
        with torch.autograd.graph.save_on_cpu():
            return function(x)

    with torch.autograd.graph.save_on_cpu():
        assert_same_steps(Net(form, offloading), Net())


@pytest.mark.parametrize("form", (recomputing, reentrant))
def test_list_of_inputs_exact(form):
    """One process with two devices."""

    class Halves(nn.Module):
        def __init__(self, run):
            super().__init__()
            self.run, self.bn = run, syncbn.SyncBatchNorm(5)

        def body(self, x):
            x = x.sin()
            return torch.cat(self.bn([x[:2], x[2:]])).exp()

        def forward(self, x):
            return self.run(self.body, x)

    assert_same_steps(Halves(form), Halves(plain))


class Swapping(nn.Module):
    """Calls its layers in another order, or one more, each time."""

    def __init__(self, run, *orders):
        super().__init__()
        self.run, self.orders = run, list(orders)
        self.layers = nn.ModuleDict({n: nn.BatchNorm1d(5) for n in ("first", "second")})

    def body(self, x):
        for name in self.orders.pop(0):
            x = self.layers[name](x).sin()
        return x

    def forward(self, x):
        return self.run(self.body, x)


@pytest.mark.parametrize("form", (recomputing, reentrant))
def test_another_order_is_an_error(form):
    """PyTorch gives wrong gradients without a word where shapes agree."""
    x = torch.randn(6, 5, requires_grad=True)
    with set_checkpoint_early_stop(False):
        for orders, text in (
            ((("first", "second"), ("second", "first")), r"^layers\.second: .* got to a call of "),
            ((("first",), ("first", "second")), r"^layers\.second: .*expected no further call"),
        ):
            model = syncbn.convert_sync_batchnorm(Swapping(form, *orders))
            y = model(x)
            before = copy.deepcopy(model.state_dict())
            with pytest.raises(RuntimeError, match=text):
                y.sum().backward()
            unchanged(model, before)


def test_gradients_switched_on_in_a_reentrant_segment_are_an_error():
    """The first run is under no_grad; a layer that it runs with gradients is not noticed there."""
    layer = syncbn.SyncBatchNorm(5)
    y = reentrant(torch.enable_grad()(lambda x: layer(x).exp()), torch.randn(6, 5).requires_grad_())
    with pytest.raises(RuntimeError, match="SyncBatchNorm: the recomputation of a checkpointed"):
        y.sum().backward()
    assert layer.num_batches_tracked == 1


def test_in_place_over_the_input_of_a_segment_is_refused():
    """PyTorch's own in-place operators end in an error in backward or, in the reentrant form if the
    input needs no gradient, in wrong gradients without a word."""
    layer = syncbn.SyncBatchNorm(5, activation="leaky_relu", inplace=True)
    x = torch.randn(6, 5, requires_grad=True)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match="^input: got an input of a checkpointed segment"):
        reentrant(layer, x * 1)
    unchanged(layer, before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        recomputing(lambda x: layer(x).sin(), x * 1).sum().backward()


def live(type_name, besides=()):
    gc.collect()
    return [
        o
        for o in gc.get_objects()
        if type(o).__name__ == type_name and not any(o is other for other in besides)
    ]


@pytest.mark.parametrize(
    "form, owner",
    ((recomputing, "_CheckpointFrame"), (reentrant, "CheckpointFunctionBackward")),
)
def test_what_is_kept_dies_with_the_graph(form, owner):
    """A call keeps three numbers per channel and two more, of 8 bytes each."""
    others = live(owner)  # PyTorch itself loses a frame whose recomputation raised
    net = Net(form)
    y = net(torch.randn(6, 5))
    (segment,) = live(owner, others)
    kept = [call.saved for call in segment._syncbn.calls]
    # Three calls in the segment; the fourth is outside.
    assert sum(w.untyped_storage().nbytes() for w in kept) == 3 * 8 * (3 * 5 + 2)
    references = [weakref.ref(w) for w in (segment, *kept)]
    del kept, segment
    y.sum().backward()
    del y
    assert [r for r in references if r() is not None] == []


def test_names_of_pytorch_are_known():
    """Fails when PyTorch organizes its checkpointing in another way: recomputation.py must follow,
    or layers in a checkpointed segment exchange twice."""
    names = recomputation.find_names()
    assert names.unpack.co_name == "unpack_hook"
    assert names.first_pack is not names.second_pack


def test_an_unknown_pytorch_warns_once(monkeypatch):
    """Then a segment updates twice, as PyTorch's batch norm does."""
    monkeypatch.delattr(torch.utils.checkpoint, "_recomputation_hook")
    monkeypatch.setattr(recomputation, "_names", functools.cache(recomputation._names.__wrapped__))
    layer = syncbn.SyncBatchNorm(5)
    x = torch.randn(6, 5, requires_grad=True)
    with pytest.warns(UserWarning, match="another activation checkpointing") as caught:
        for _ in range(2):
            reentrant(lambda x: layer(x).exp(), x).sum().backward()
    assert len([w for w in caught if "another activation" in str(w.message)]) == 1
    assert layer.num_batches_tracked == 4
