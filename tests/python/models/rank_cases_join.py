# SPDX-License-Identifier: Apache-2.0
"""Uneven numbers of batches: syncbn.join. Run by test_distributed.py as rank_cases.py is.

torch.nn.SyncBatchNorm has no place in torch's Join, which shadows the collectives of
DistributedDataParallel alone: tried with torch 2.11 over Gloo and an all-reduce in a module's
forward in its stead (it does not run on CPUs), that meets one of Join's own, of another length, and
Gloo ends the process (SIGABRT).
"""

import copy
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import syncbn
from support import new_layer


class Network(nn.Module):
    """Elementwise but for its layers, so that only they depend on how samples are split."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.second = new_layer(4, **options), new_layer(4, **options)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def batch(rank: int, step: int) -> torch.Tensor:
    """Of a size of its own for each rank and step; the rough half cancels."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(2 + (rank + step) % 3, 4, 3, generator=generator)
    return x * torch.exp2(torch.randint(-12, 12, x.shape, generator=generator))


def numbers_of_batches(world: int) -> list[list[int]]:
    """Of each rank; the rank that goes on is the first, the last, one with a rank without any."""
    return [[3, 1, 2][:world], [1, 3, 4][:world], [0, 2, 1][:world]]


def reference(model: nn.Module, rank: int, counts: list[int], members=None):
    """The layers alone: for each step the output and the gradient of this rank's samples, in one
    process that has the batches of all ranks that have one."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, syncbn.SyncBatchNorm):
            layer.sync = False
    outputs = []
    members = range(len(counts)) if members is None else members
    for step in range(max(counts[r] for r in members)):
        parts = {r: batch(r, step) for r in members if step < counts[r]}
        x = torch.cat(list(parts.values())).requires_grad_()
        y = model(x)
        y.backward(x.detach().cos())
        sizes = [len(part) for part in parts.values()]
        if rank in parts:
            mine = list(parts).index(rank)
            outputs.append((y.split(sizes)[mine].detach(), x.grad.split(sizes)[mine]))
    return model, outputs


def run_steps(model: nn.Module, rank: int, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    outputs = []
    for step in range(steps):
        x = batch(rank, step).requires_grad_()
        y = model(x)
        y.backward(x.detach().cos())
        outputs.append((y.detach(), x.grad))
    return outputs


def same_outputs(actual, expected) -> None:
    assert len(actual) == len(expected)
    for step, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(got[0], wanted[0]), f"y of step {step}"
        assert torch.equal(got[1], wanted[1]), f"dx of step {step}"


def same_statistics(model: nn.Module, expected: nn.Module) -> None:
    for (name, buffer), other in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer, other), f"{name}: {buffer}, expected {other}"


def check_uneven(rank, world, counts, wrap, members=None, **options) -> None:
    """Outputs, gradients of inputs and running statistics are those of a job that has only the
    ranks with inputs; afterwards all ranks train on together."""
    network = Network(**options)
    expected, outputs = reference(network, rank, counts, members)
    model = wrap(network)
    with syncbn.join(model):
        actual = run_steps(model, rank, counts[rank])
    same_outputs(actual, outputs)
    same_statistics(network, expected)
    _, outputs = reference(network, rank, [1] * world, members)
    same_outputs(run_steps(model, rank, 1), outputs)


def case_join_of_ddp_exact(rank, world):
    for counts in numbers_of_batches(world):
        for broadcast in (True, False):

            def ddp(network, broadcast=broadcast):
                return DistributedDataParallel(network, broadcast_buffers=broadcast)

            check_uneven(rank, world, counts, ddp)


def case_join_of_a_plain_model_exact(rank, world):
    for counts in numbers_of_batches(world):
        check_uneven(rank, world, counts, lambda network: network)


def case_join_of_groups_exact(rank, world):
    """Statistics shared by the first two ranks; the third is alone. A group goes on while another
    has ended, and one of its ranks without the other."""
    pair = dist.new_group([0, 1])
    alone = dist.new_group([rank], use_local_synchronization=True)
    members = (0, 1) if rank < 2 else (rank,)
    for counts in ([1, 3, 2][:world], [2, 1, 4][:world]):
        check_uneven(
            rank,
            world,
            counts,
            lambda network: network,
            members,
            process_group=pair if rank < 2 else alone,
        )


class Varied(nn.Module):
    """What an iteration calls differs from iteration to iteration."""

    def __init__(self):
        super().__init__()
        self.a, self.b = new_layer(4), new_layer(4)
        self.residual = new_layer(4, activation="relu")
        self.step = 0

    def forward(self, x):
        step, self.step = self.step, self.step + 1
        y = self.a(x).tanh()
        for _ in range(step):  # several calls of a layer
            y = self.b(y).tanh()
        self.b.train(step % 2 == 0)  # evaluation mode now and then
        y = self.b(y)
        self.b.train()
        with torch.no_grad():  # forward alone
            self.a(x)
        y = checkpoint(self.residual.forward, y, x, use_reentrant=False)
        return y if step != 1 else y.detach() + self.a(x)  # backward through one call


def case_join_needs_no_sequence_exact(rank, world):
    """Iterations that differ, forward alone, and recomputation."""
    counts = [2, 4, 1][:world]
    model = Varied()
    expected, outputs = reference(model, rank, counts)
    with syncbn.join(model):
        actual = run_steps(model, rank, counts[rank])
    same_outputs(actual, outputs)
    same_statistics(model, expected)


def case_join_of_forward_alone_exact(rank, world):
    """Running statistics computed again, without gradients, over uneven shares."""
    counts = [4, 2, 3][:world]
    model = Network(momentum=None)
    expected, _ = reference(model, rank, counts)
    with syncbn.join(model), torch.no_grad():
        for step in range(counts[rank]):
            model(batch(rank, step))
        model.eval()
        model(batch(rank, 9))  # exchanges nothing, is no iteration
        model.train()
    same_statistics(model, expected)


def case_join_of_several_models_and_an_optimizer(rank, world):
    """A plain model first, then a DDP one whose optimizer is sharded: parameters stay equal."""
    counts = [1, 3, 2][:world]
    encoder, network = new_layer(4), nn.Sequential(nn.Flatten(), nn.Linear(12, 4), new_layer(4))
    torch.manual_seed(0)
    network[1].reset_parameters()
    model = DistributedDataParallel(network)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    before = network[1].weight.clone()
    with syncbn.join(encoder, model, optimizer):
        for step in range(counts[rank]):
            model.zero_grad()
            model(encoder(batch(rank, step)).detach()).square().sum().backward()
            optimizer.step()
    assert not torch.equal(network[1].weight, before)
    for tensor in itertools.chain(network.state_dict().values(), encoder.buffers()):
        first = tensor.clone()
        dist.broadcast(first, 0)
        assert torch.equal(tensor, first)
