# SPDX-License-Identifier: Apache-2.0
"""Ranks compare the paths of layers before a layer's first exchange in a group; run by
test_distributed.py as rank_cases.py is.

torch.nn.SyncBatchNorm compares nothing: layers called in another order mix their statistics.
"""

import copy
import functools
import pickle
import re
from unittest import mock

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import syncbn
from rank_cases import CountCollectives, diverges, raises, unchanged
from support import assert_same_layers
from syncbn.exchange import agreement, groups
from syncbn.exchange.call import Call
from syncbn.exchange.host import engine_of
from syncbn.step import layer_state


class Twins(nn.Module):
    """Two layers of equal shape."""

    def __init__(self, make=lambda: syncbn.SyncBatchNorm(3)):
        super().__init__()
        self.first, self.second = make(), make()

    def forward(self, x, order=("first", "second")):
        for name in order:
            x = getattr(self, name)(x)
        return x


IN_ORDER, SWAPPED = ("first", "second"), ("second", "first")


def order_of(rank: int) -> tuple[str, str]:
    return SWAPPED if rank == 0 else IN_ORDER


def share(rank: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randn(3 + rank, 3, generator=generator)


def swapped(rank: int, model: nn.Module, text: str) -> None:
    """The error of a call in another order on rank 0."""
    diverges(text, model, share(rank), order_of(rank))


def different(rank: int, world: int, own: str, at_0: str, at_1: str, call: str = "call 0") -> str:
    """The error of ranks that call different layers."""
    return (
        f"^{own}, {call}, forward, .*, rank {rank} of {world}: the ranks call different layers: "
        f"rank 0: {at_0}; rank 1: {at_1}"
    )


def names(rank: int, at_0: str = "second", at_1: str = "first") -> tuple[str, str, str]:
    return (at_0 if rank == 0 else at_1), at_0, at_1


def case_layers_swapped_from_the_first_step_exact(rank, world):
    """An error on every rank that names both; nothing is updated, and the group stays usable."""
    model, reference = Twins(), syncbn.convert_sync_batchnorm(Twins(lambda: nn.BatchNorm1d(3)))
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        swapped(rank, model, different(rank, world, *names(rank)))
        unchanged(model, before)
    for seed in range(2):
        assert torch.equal(model(share(rank, seed)), reference(share(rank, seed)))
    assert_same_layers(model, reference)


def case_converted_layers_swapped_from_the_first_step(rank, world):
    """Also where sub-models were converted apart, so that names are ends of each other."""
    model = nn.Module()
    model.backbone = nn.ModuleDict({"block": nn.ModuleDict({"bn": nn.BatchNorm1d(3)})})
    model.head = nn.ModuleDict({"bn": nn.BatchNorm1d(3)})
    for part in (model.backbone, model.head):
        syncbn.convert_sync_batchnorm(part)
    layers = [model.backbone["block"]["bn"], model.head["bn"]]
    for own in range(2):
        mine = layers[own if rank == 0 else 1 - own]
        both = ("block.bn; rank 1: bn", "bn; rank 1: block.bn")[own]
        diverges(f"the ranks call different layers: rank 0: {both}", mine, share(rank))
    for layer in layers:
        layer(share(rank))
    diverges("the ranks did not", layers[int(rank == 0)], share(rank))


def case_layers_swapped_later(rank, world):
    """What was agreed on first is in the header of all exchanges; errors name the path."""
    model = Twins()
    for _ in range(2):
        model(share(rank)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    own = order_of(rank)[0]
    expected = f"^{own}, call 2, forward, .*, rank {rank} of {world}: the ranks did not make the"
    swapped(rank, model, expected)
    unchanged(model, before)
    model(share(rank))


def case_paths_in_wrappers(rank, world):
    """A rank may wrap its model: prefixes of wrappers do not count, and other modules around the
    model make a path longer."""

    def around(model):
        outer = nn.Module()
        outer.trainer = nn.Sequential(model)
        return outer

    wraps = (
        lambda model: nn.ModuleDict({"module": model}),
        lambda model: torch.compile(model, backend="eager"),
        lambda model: nn.ModuleDict({"_fsdp_wrapped_module": model}),
        checkpoint_wrapper,
        around,
    )
    for own in range(2):
        for wrap in wraps:
            model = Twins()
            wrapped = wrap(model) if rank == own else model
            model(share(rank)).sum().backward()
            swapped(rank, model, "did not make")
            model = Twins()
            wrapped = wrap(model) if rank == own else model
            swapped(rank, model, "different layers.*rank 0: .*second; rank 1: .*first")
            del wrapped
    wrapped = DistributedDataParallel(Twins())
    wrapped(share(rank)).sum().backward()
    assert wrapped.module.first.state.name == "first"


def case_models_of_equal_paths(rank, world):
    """They are told apart by the order in which they were made; copies on one rank do not count."""
    extra = [Twins() for _ in range(2)] if rank == 0 else []
    one, two = Twins(), Twins()
    for model in (two, one, two, one):
        model(share(rank))
    diverges("did not make the same call", one if rank == 0 else two, share(rank))
    one, two = Twins(), Twins()
    mine, other = (one, two) if rank == 0 else (two, one)
    mine(share(rank), ["first"])
    text = (
        "rank 0: first, made after ([0-9]+) of \\1 others of that path; rank 1: first, made after"
    )
    diverges(text, other, share(rank))
    del extra


def case_layers_that_nobody_holds(rank, world):
    """By the order of first use. A swap from the first step on is not seen, as the documentation
    says; a later one is."""
    layers = [syncbn.SyncBatchNorm(3) for _ in range(2)]
    if rank == 0:
        layers.reverse()
    for layer in (*layers, *layers):
        layer(share(rank))
    expected = f"^SyncBatchNorm, call 2, .*, rank {rank} of {world}: the ranks did not make"
    diverges(expected, layers[int(rank == 0)], share(rank))


def case_a_layer_that_nobody_holds_is_none_of_a_model(rank, world):
    model, layer = nn.Sequential(syncbn.SyncBatchNorm(3)), syncbn.SyncBatchNorm(3)
    text = "rank 0: 0; rank 1: a layer that no module holds"
    diverges(text, model if rank == 0 else layer, share(rank))
    model(share(rank))
    layer(share(rank))


def case_paths_of_compiled_layers(rank, world):
    """The first step, and one after it; a rank that is not compiled agrees with one that is."""
    torch._dynamo.reset()
    for compiled_on in (range(world), range(1)):
        model = Twins()
        if rank in compiled_on:
            for layer in (model.first, model.second):
                layer.compile(fullgraph=True, backend="aot_eager")
        swapped(rank, model, different(rank, world, *names(rank)))
        model(share(rank)).sum().backward()
        swapped(rank, model, "did not make")
        model(share(rank)).sum().backward()


def case_one_comparison_per_layer_and_group(rank, world):
    """One message; one more where the group has met another layer of that path."""
    model = Twins(lambda: syncbn.SyncBatchNorm(3, timeout=29.5))  # a group of its own
    for expected in (4, 2, 2):
        with CountCollectives() as forward:
            y = model(share(rank))
        with CountCollectives() as backward:
            y.sum().backward()
        assert len(forward.names) == expected and len(backward.names) == 1, forward.names
    syncbn.reset_groups(model)
    for expected in (4, 2):
        with CountCollectives() as forward:
            model(share(rank))
        assert len(forward.names) == expected, forward.names
    for expected in (4, 6):
        syncbn.set_group(model, timeout=31.5)
        with CountCollectives() as forward:
            model(share(rank))
        assert len(forward.names) == expected, forward.names
        model = Twins()


def case_copies_compare_anew(rank, world):
    model = Twins()
    model(share(rank))
    for make in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        again = make(model)
        assert again.first.state.path == "SyncBatchNorm"
        own, at_0, at_1 = names(rank)
        copied = r" \(copy\)" if make is copy.deepcopy else ""
        swapped(rank, again, different(rank, world, own + copied, at_0, at_1))
        again(share(rank))
        model(share(rank))


def case_averaged_copies_have_names_of_their_own(rank, world):
    """The same on all ranks, whatever one of them has copied besides."""
    model = syncbn.convert_sync_batchnorm(nn.ModuleDict({"norm": nn.BatchNorm1d(3)}))
    kept = [copy.deepcopy(model) for _ in range(3 * rank)]  # of which the others do not know
    models = [model, AveragedModel(model), copy.deepcopy(model)]
    layers = [model["norm"], models[1].module["norm"], models[2]["norm"]]
    shown = ["norm", "norm (copy)", "norm (copy 2)"]
    for layer in layers:
        layer(share(rank))
    assert [layer.state.name for layer in layers] == shown and len(kept) == 3 * rank
    pickle.loads(pickle.dumps(models))
    # On one rank another one than on the others.
    for one in range(3):
        for other in {0, 1, 2} - {one}:
            chosen = layers[one if rank == 0 else other]
            texts = rf"layer: {re.escape(shown[one])} on rank 0, {re.escape(shown[other])} on rank"
            diverges(texts, chosen, share(rank))
            for layer in layers:
                layer(share(rank))


def case_a_rank_at_another_call_than_one_that_compares(rank, world):
    """A later call of another layer, its backward, a sum of numbers."""
    known = Twins()
    y = known(share(rank).requires_grad_())
    peers = groups.peers(known.first.state.sharing)
    others = (
        lambda: known(share(rank)),
        lambda: y.sum().backward(retain_graph=True),
        lambda: agreement.numbers_of_ranks(1, 5, engine_of(peers), Call("numbers")),
    )
    for other in others:
        model = Twins()
        mine = other if rank == 0 else lambda model=model: model(share(rank))
        diverges("the ranks did not make the same call", mine)
        model(share(rank))
        known(share(rank))


def case_functions_compare_nothing(rank, world):
    function = syncbn.functional.sync_batch_norm
    with CountCollectives() as counted:
        function(share(rank), torch.zeros(3), torch.ones(3), training=True)
    assert len(counted.names) == 1, counted.names


def case_a_capture_without_a_step_before_is_an_error(rank, world):
    model = Twins()
    peers, options = groups.peers(model.first.state.sharing), model.first.options()
    engine = engine_of(peers)
    x = mock.Mock(is_cuda=True)  # as much of a tensor as is looked at
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        expected = "^first: got its first exchange in a group while a CUDA graph is captured"
        compare = functools.partial(layer_state.compare, model.first.state, engine, x, options)
        raises(RuntimeError, expected, compare)
    model(share(rank))
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        compare()
