# SPDX-License-Identifier: Apache-2.0
"""Who takes part in backward: gradients that not all ranks want; run by test_distributed.py as
rank_cases.py is.

torch.nn.SyncBatchNorm exchanges where the rank's own input requires a gradient: the others are
waited for until the time is up.
"""

import itertools
import time

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import syncbn
from rank_cases import diverges
from support import new_layer

LEAKY = {"activation": "leaky_relu", "negative_slope": 0.25}


def share(rank: int, size: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3 + rank, size, 5, generator=generator)


def step(layer, forward, x, wanted: bool) -> torch.Tensor | None:
    """One step; the gradient of x, if it is wanted."""
    x = x.clone().requires_grad_(wanted)
    forward(x).square().sum().backward()
    return x.grad


def compiled(layer):
    torch._dynamo.reset()
    return torch.compile(layer, backend="aot_eager", fullgraph=True)


def reentrant(layer):
    return lambda x: checkpoint(layer, x, use_reentrant=True)


FORMS = {
    "eager": lambda layer: layer,
    "compiled": compiled,
    "lists": lambda layer: lambda x: layer([x])[0],
}


def case_a_gradient_wanted_on_one_rank_is_right_exact(rank, world):
    """The others take part in its exchange: their weights want gradients, their inputs do not."""
    for (name, form), wanting in itertools.product(FORMS.items(), range(2)):
        for options in ({}, LEAKY, {"statistics": "welford"}):
            if name == "lists" and "statistics" in options:
                continue
            reference = new_layer(4, **options)
            expected = step(reference, reference, share(rank), True)
            layer = new_layer(4, **options)
            dx = step(layer, form(layer), share(rank), rank == wanting)
            assert (dx is None) == (rank != wanting)
            assert dx is None or torch.equal(dx, expected), (name, options)
            for p, q in zip(layer.parameters(), reference.parameters()):
                assert torch.equal(p.grad, q.grad), (name, options)


def case_global_gradients_on_one_rank_are_right_exact(rank, world):
    for form in FORMS.values():
        reference = new_layer(4, affine_grad="global")
        step(reference, reference, share(rank), False)
        own = new_layer(4)
        step(own, own, share(rank), False)
        layer = new_layer(4, affine_grad="global" if rank == 0 else "share")
        step(layer, form(layer), share(rank), False)
        for p, q in zip(layer.parameters(), (reference if rank == 0 else own).parameters()):
            assert torch.equal(p.grad, q.grad)


def _check_absent(rank, world, form, absent: int) -> None:
    """The forward succeeds on all ranks; a backward says at once who cannot come."""
    layer = syncbn.SyncBatchNorm(4, affine=False, timeout=20)
    x = share(rank).requires_grad_(rank != absent)
    y = form(layer)(x)
    if rank != absent:
        began = time.monotonic()
        text = f"backward, 4 channels, .*rank {rank} of {world}: rank {absent} made the forward "
        diverges(text, y.square().sum().backward)
        assert time.monotonic() - began < 5
    else:
        assert not y.requires_grad
    # The group goes on, and so does the layer.
    x = share(rank).requires_grad_()
    form(layer)(x).square().sum().backward()
    assert x.grad is not None


def case_a_rank_that_cannot_come_to_backward_is_named(rank, world):
    """No parameter and no input of it requires a gradient."""
    for form, absent in itertools.product(FORMS.values(), (0, world - 1)):
        _check_absent(rank, world, form, absent)


def case_a_rank_under_no_grad_is_named_if_others_go_back(rank, world):
    for form in FORMS.values():
        layer = syncbn.SyncBatchNorm(4, timeout=20)
        x = share(rank).requires_grad_()
        with torch.set_grad_enabled(rank != 1):
            y = form(layer)(x)
        if rank != 1:
            text = f"rank {rank} of {world}: rank 1 made the forward without gradients"
            diverges(text, y.sum().backward)
        dist.barrier()


def case_ranks_that_all_do_without_gradients_are_no_error(rank, world):
    layer = syncbn.SyncBatchNorm(4)
    for _ in range(2):
        with torch.no_grad():
            layer(share(rank))
    layer.requires_grad_(False)
    layer(share(rank))
    assert layer.state.call == 3


def case_reentrant_checkpoints_on_some_ranks_exact(rank, world):
    """Whose first run does not know whether gradients will be wanted."""
    reference = new_layer(4)
    expected = step(reference, reference, share(rank), True)
    layer = new_layer(4)
    dx = step(layer, reentrant(layer) if rank == 0 else layer, share(rank), True)
    assert torch.equal(dx, expected)
    layer = new_layer(4)
    dx = step(layer, reentrant(layer) if rank == 0 else layer, share(rank), rank == 0)
    assert rank != 0 or torch.equal(dx, expected)


def case_second_derivatives_of_other_gradients_are_an_error_on_every_rank(rank, world):
    """They replay the gradients that were asked for, which must be the same on all ranks."""
    layer = new_layer(4).double()
    x = share(rank).double().requires_grad_(rank == 0)
    wanted = [x, layer.weight] if rank == 0 else [layer.weight]
    first = torch.autograd.grad(layer(x).square().sum(), wanted, create_graph=True)
    text = r"same call: direction: second backward \(.*\) on rank 0, second"
    diverges(text, first[-1].square().sum().backward)
