# SPDX-License-Identifier: Apache-2.0
"""What each process is refused: text_*, an error's text, equal on all ranks of a world."""

import itertools

import torch
import torch.distributed as dist
from torch import nn

import share_programs
import syncbn
from share_cases import batches_of
from syncbn.models import recording


def caught(*errors):
    """The text of the error that a function ends with."""

    def run(function):
        try:
            function()
        except errors as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError("no error")

    return run


refused = caught(ValueError)
either = caught(ValueError, syncbn.DivergenceError)


def text_of_more_processes_than_shares(rank, world, folder):
    return refused(lambda: syncbn.Shares(nn.Linear(2, 2), world - 1))


def text_of_other_seeds(rank, world, folder):
    return refused(lambda: syncbn.Shares(nn.Linear(2, 2), world, seed=rank))


def text_of_an_argument_that_one_rank_refuses(rank, world, folder):
    text = refused(lambda: syncbn.Shares(nn.Linear(2, 2), world, seed=-rank if rank == 1 else 0))
    return text.partition("seed: ")[2]


def text_of_a_buffer_of_another_shape(rank, world, folder):
    network = nn.Linear(2, 2)
    network.register_buffer("more", torch.zeros(2 if rank == 1 else 3))
    return refused(lambda: syncbn.Shares(network, world)).partition(": got")[0]


def text_of_a_step_that_one_rank_refuses(rank, world, folder):
    training = syncbn.Shares(nn.Linear(4, 3), world)
    batches = batches_of(training, 0)
    text = either(lambda: training.step(share_programs.loss, batches * (2 if rank == 1 else 1)))
    training.step(share_programs.loss, batches)  # and they go on together
    assert training.steps == 1
    return text.partition("batches: ")[2]


def text_of_a_frozen_parameter_on_one_rank(rank, world, folder):
    network = nn.Linear(4, 3)
    training = syncbn.Shares(network, world)
    network.weight.requires_grad_(rank != 1)
    step = caught(syncbn.DivergenceError)
    text = step(lambda: training.step(share_programs.loss, batches_of(training, 0)))
    assert "frozen parameters: none on rank" in text
    return text[text.index("weight on") :]


def text_of_other_data(rank, world, folder):
    """Each difference by its name, and none of them is silent."""
    training, step = syncbn.Shares(nn.Linear(4, 3), world), caught(syncbn.DivergenceError)
    own, found = rank == 1, []
    for name in ("samples", "batch size", "shuffle", "epoch", "batch"):
        data = [(torch.ones(4), 1)] * (8 * world + (name == "samples" and own))
        size = world * (1 + (name == "batch size" and own))
        loader = training.loader(data, size, shuffle=name == "shuffle" and own)
        if name == "epoch" and own:
            loader.set_epoch(1)
        batches = iter(loader)
        for _ in range(1 + (name == "batch" and own)):
            parts = next(batches)
        text = step(lambda parts=parts: training.step(share_programs.loss, parts))
        assert f" {name}: " in text, text
        found.append(name)
    return found


def text_of_other_options(rank, world, folder):
    """That change after the constructor; learning rates, and optimizers' states."""
    training, step = syncbn.Shares(nn.Linear(4, 3), world, compare_every=1), either
    batches, found = batches_of(training, 0), []
    optimizer = torch.optim.SGD(training.module.parameters(), lr=1e-3, momentum=0.5)

    def differ(name, change, back):
        if rank == 1:
            change()
        text = step(lambda: training.step(share_programs.loss, batches))
        if rank == 1:
            back()
        assert f" {name}: " in text, text
        training.step(share_programs.loss, batches)
        found.append(name)

    differ("threads", lambda: torch.set_num_threads(2), lambda: torch.set_num_threads(1))
    dtype = torch.get_default_dtype()
    differ(
        "default dtype",
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(dtype),
    )
    differ(
        "denormal numbers",
        lambda: torch.set_flush_denormal(True),
        lambda: torch.set_flush_denormal(False),
    )
    weight = training.module.weight.data
    kept = weight.clone()
    differ("parameters", lambda: weight.add_(1), lambda: weight.copy_(kept))
    own = [0.1 if rank == 1 else 0.2]
    optimizer.param_groups[0]["lr"] = own[0]
    optimizer.step()
    text = step(lambda: training.step(share_programs.loss, batches))
    assert " learning rates: " in text and " parameters: " in text, text
    assert " optimizers: " in text, text
    return found


def text_of_a_model_that_fails_on_one_rank(rank, world, folder):
    """Before the first layer, after it, in backward, and in a model without layers, with one share
    of each process and with two."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 1 / 0

    def told(shares, at, backward, norm):
        last = nn.BatchNorm1d(3) if norm else nn.Linear(3, 3)
        network = nn.Sequential(nn.Linear(4, 3), last, nn.ReLU(), nn.Linear(3, 3))
        training = syncbn.Shares(syncbn.convert_sync_batchnorm(network), shares)
        batches = batches_of(training, 0)

        def fail(module, inputs):
            if rank == 1:
                return (Fails.apply(inputs[0]),) if backward else 1 / 0

        handle = network[at].register_forward_pre_hook(fail)
        text = caught(ZeroDivisionError, syncbn.DivergenceError)(
            lambda: training.step(share_programs.loss, batches)
        )
        assert all(p.grad is None for p in network.parameters())
        handle.remove()
        training.step(share_programs.loss, batches)  # and they go on together
        return text.rpartition("ZeroDivisionError: ")[2]

    cases = itertools.product((world, 2 * world), (1, 3), (False, True), (False, True))
    return " or ".join({told(*case) for case in cases})


def text_of_a_batch_that_one_rank_cannot_load(rank, world, folder):
    training = syncbn.Shares(nn.Linear(4, 3), world)

    def collate(samples):
        if rank == 1:
            raise KeyError("no such file")
        return torch.ones(1, 4), torch.ones(1, dtype=torch.long)

    def run():
        for batches in training.loader(range(world), world, collate_fn=collate):
            training.step(share_programs.loss, batches)

    text = caught(KeyError, syncbn.DivergenceError)(run)
    training.loader(range(world), world)  # the others had begun with the epoch
    training.step(share_programs.loss, batches_of(training, 0))
    return text.rpartition("KeyError: ")[2]


def text_of_ranks_that_differ(rank, world, folder):
    """One rank changes a gradient, which the others do not see."""
    training = syncbn.Shares(nn.Linear(4, 3), world)
    optimizer = torch.optim.SGD(training.module.parameters(), lr=0.1)
    with syncbn.record(training, folder / "differing"):
        training.step(share_programs.loss, batches_of(training, 0))
        if rank == world - 1:
            training.module.bias.grad[0] *= 1 + 2.0**-23
        optimizer.step()
    dist.barrier()
    text = recording.first_difference(folder / "differing", folder / "differing")
    return text.rpartition("/")[2]
