# SPDX-License-Identifier: Apache-2.0
"""What each rank of a process group runs for syncbn.ops and syncbn.graph; see rank_cases.py."""

import copy

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oracle
import syncbn
from rank_cases import DTYPES, diverges, shards
from support import assert_near, raises, rough_samples, to_tensor, unchanged
from syncbn.functional import sync_batch_norm
from syncbn.ops import batch_norm, batch_norm_
from syncbn.parallel import SelfDataParallel


def variables(channels):
    """estimated_mean, estimated_var, scale, bias, batches."""
    return (
        torch.zeros(channels),
        torch.ones(channels),
        torch.linspace(-2, 2, channels),
        torch.linspace(1, 3, channels),
        torch.tensor([1]),
    )


def check_operator(rank, world, alone, channels, dtype, kind, **options):
    """A step on this rank's samples against one process with all of them."""
    rng = np.random.default_rng(30)
    values = rough_samples(rng, (9, channels, 3), dtype)
    gradients = oracle.round_to(rng.standard_normal(values.shape), dtype)
    part = shards(9, world, kind)[rank]
    results = []
    for group, rows in ((None, part), (alone, slice(None))):
        x = to_tensor(values[rows], dtype).requires_grad_()
        out = batch_norm(x, *variables(channels), group=group, **options)
        out.y.backward(to_tensor(gradients[rows], dtype))
        results.append((out, x.grad))
    (out, dx), (whole, whole_dx) = results
    assert torch.equal(out.y, whole.y[part])
    assert torch.equal(dx, whole_dx[part])
    for actual, expected in zip(out[1:], whole[1:], strict=True):
        assert torch.equal(actual, expected)


def case_operator_has_the_bits_of_one_rank_exact(rank, world):
    """Below and above the 512 channels of float32 (117 of float64) that one message carries."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    for dtype in DTYPES:
        for kind in ("uneven", "empty first"):
            check_operator(rank, world, alone, 5, dtype, kind)
            check_operator(rank, world, alone, 5, dtype, kind, use_global_est=True)
    for channels, dtype in ((512, "float32"), (513, "float32"), (130, "float64")):
        check_operator(rank, world, alone, channels, dtype, "empty first")


def case_operator_on_an_empty_rank_of_another_dtype(rank, world):
    for channels in (6, 600):
        for dtype in (torch.float16, torch.float64):
            given = variables(channels)
            x = torch.randn(0 if rank == 0 else 4, channels, 3)
            x = (x if rank == 0 else x.to(dtype)).requires_grad_()
            out = batch_norm_(x, *given)
            out.y.sum().backward()
            assert out.y.dtype == x.dtype and given[4].item() == 2
            gathered = [None] * world
            dist.all_gather_object(gathered, out.saved_var.tolist())
            assert all(g == gathered[0] for g in gathered)


def case_operator_disagreement_is_an_error_on_every_rank(rank, world):
    last = rank == world - 1
    x = torch.randn(3, 4, 5)
    wide = torch.randn(2, 900)
    for options in (
        {"epsilon": 1e-3},
        {"momentum": 0.99 + 1e-10},
        {"scale": None},
        {"bias": None},
        {"use_global_est": True},
        {"layer_name": "another"},
        {"batches": torch.tensor([7])},
        {"x": x.double()},
        dict(
            zip(("x", "estimated_mean", "estimated_var", "scale", "bias"), (wide, *variables(900)))
        ),
    ):
        names = ("estimated_mean", "estimated_var", "scale", "bias", "batches")
        arguments = {"x": x, **dict(zip(names, variables(4), strict=True))}
        arguments.update(options if last else {})
        names = [name for name in names if arguments[name] is not None]
        before = {name: arguments[name].clone() for name in names}
        text = rf"(another|batch_norm), .*, rank {rank} of {world}: .* the same call: \w"
        diverges(text, batch_norm_, **arguments)
        for name in names:
            assert torch.equal(arguments[name], before[name]), name
    batch_norm_(x, *variables(4))


def case_operator_backward_disagreement(rank, world):
    """One rank brings its gradients to another step's exchange."""
    last = rank == world - 1
    x = torch.randn(3, 4, requires_grad=True)
    first = batch_norm(x, *variables(4)).y
    second = batch_norm(x, *variables(4), layer_name="second").y
    diverges("did not make the same call", (first if last else second).sum().backward)


def case_inference_of_the_operator_exchanges_nothing(rank, world):
    x = torch.randn(3, 4, requires_grad=True)
    if rank == 0:
        batch_norm_(x, *variables(4), is_infer=True).y.sum().backward()
    # Constant estimates: no exchange in backward either.
    y = batch_norm_(x, *variables(4), use_global_est=True).y
    if rank == 0:
        y.sum().backward()


class _Function(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x):
        return sync_batch_norm(
            x, self.mean, self.var, training=self.training, process_group=self.group
        )


def case_function_in_a_network_exchanges_in_training_alone_exact(rank, world):
    """Whatever the mode in which the model was traced."""
    x = torch.randn(2 * world, 3, 5, generator=torch.Generator().manual_seed(0))
    part = slice(2 * rank, 2 * rank + 2)
    alone = _Function(dist.new_group([rank], use_local_synchronization=True))
    expected = alone.train()(x)
    for training in (True, False):
        model = _Function(dist.group.WORLD).train(training)
        net = syncbn.graph.Network(model)
        if rank == 0:
            net.infer(x[part])  # the other ranks do not come
        assert torch.equal(model.mean, torch.zeros(3))
        assert torch.equal(net.train(x[part]), expected[part])
        assert torch.equal(model.mean, alone.mean) and torch.equal(model.var, alone.var)


def case_network_trains_with_the_bits_of_one_rank_exact(rank, world):
    """Elementwise operations and batch normalization alone, so that all bits are comparable."""
    alone = dist.new_group([rank], use_local_synchronization=True)

    def network(group):
        model = nn.Sequential(
            syncbn.graph.BatchNorm(4, group=group),
            nn.ReLU(),
            syncbn.graph.BatchNorm(4, group=group, use_global_est=True),
        )
        return syncbn.graph.Network(model)

    net, whole = network(None), network(alone)
    for step in range(3):
        x = torch.randn(8, 4, 5, generator=torch.Generator().manual_seed(step))
        part = shards(8, world, "uneven")[rank]
        mine, all_ = x[part].requires_grad_(), x.clone().requires_grad_()
        y, expected = net.train(mine), whole.train(all_)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(y, expected[part])
        assert torch.equal(mine.grad, all_.grad[part])
    unchanged(net.module, whole.module.state_dict())
    if rank == 0:  # inference exchanges nothing
        before = copy.deepcopy(net.module.state_dict())
        assert torch.equal(net.infer(x), whole.infer(x))
        unchanged(net.module, before)


def case_network_on_devices_of_ranks_exact(rank, world):
    """Each rank has two devices; all have the bits of one network with all samples."""
    alone = dist.new_group([rank], use_local_synchronization=True)

    def network(group):
        norms = (syncbn.graph.BatchNorm(4, group=group) for _ in range(2))
        return syncbn.graph.Network(nn.Sequential(next(norms), nn.ReLU(), next(norms)))

    net, whole = network(None), network(alone)
    devices = SelfDataParallel(net, ["cpu"] * 2)
    for step in range(2):
        x = torch.randn(9, 4, 5, generator=torch.Generator().manual_seed(step))
        part = shards(9, world, "uneven")[rank]
        mine, all_ = x[part].requires_grad_(), x.clone().requires_grad_()
        y, expected = torch.cat(devices(mine)), whole.train(all_)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(y, expected[part]) and torch.equal(mine.grad, all_.grad[part])
    unchanged(net.module, whole.module.state_dict())
    # Where devices disagree on one rank, the others hear of it.
    bad = [x[:2], x[:2, :, 1:]] if rank == 0 else [x, x]
    before = copy.deepcopy(net.module.state_dict())
    if rank == 0:
        raises(ValueError, "x of device 1: got torch.float32 and", devices, bad)
    else:
        diverges("raised an error", devices, bad)
    unchanged(net.module, before)


def case_network_under_ddp(rank, world):
    """Trains as one process; rank_cases_parallel.py derives the bound. All ranks have equal
    estimates, and infer alone."""
    alone = dist.new_group([rank], use_local_synchronization=True)

    def network(group):
        torch.manual_seed(7)
        layers = nn.Conv1d(4, 6, 2), syncbn.graph.BatchNorm(6, group=group), nn.Conv1d(6, 2, 4)
        return syncbn.graph.Network(nn.Sequential(*layers).double(), loss=nn.MSELoss())

    net, whole = network(None), network(alone)
    trained = (DistributedDataParallel(net), slice(rank, None, world)), (whole, slice(None))
    for step in range(3):
        x = torch.randn(4 * world, 4, 5, generator=torch.Generator().manual_seed(step)).double()
        target = x[:, :2, :1]
        for model, part in trained:
            model.zero_grad()
            model(x[part], target=target[part]).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
    assert_near(net, whole)
    for value in net.buffers():
        every = [torch.empty_like(value) for _ in range(world)]
        dist.all_gather(every, value)
        assert all(torch.equal(other, value) for other in every)
    assert net.module[1].batches == 3
    if rank == 0:
        assert net.infer(x[:1]).shape == (1, 2, 1)
        trained[0][0].eval()
