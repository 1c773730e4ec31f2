# SPDX-License-Identifier: Apache-2.0
"""Cases for test_distributed.py, as in rank_cases.py: processes of several devices each."""

import copy
import functools
import itertools
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import oracle
import syncbn
from rank_cases import diverges, raises, shards, unchanged
from rank_cases_cuda import same_numbers, sum_over, whole_numbers
from rank_cases_modes import check_welford
from rank_cases_parallel import network, own, samples, train
from support import assert_near, assert_same_layers, new_layer, rough_samples, to_tensor
from syncbn.exchange.transport import SUMMED
from syncbn.parallel import SelfDataParallel, all_reduce
from test_list_form import step as device_step


def alone(rank):
    """A group in which this rank is alone, for what it computes without the others."""
    return dist.new_group([rank], use_local_synchronization=True)


def rough_batch(dtype, shape, seed=30):
    rng = np.random.default_rng(seed)
    return [to_tensor(rough_samples(rng, shape, dtype), dtype) for _ in range(2)]


def same(a, b, what):
    assert torch.equal(a.nan_to_num(), b.nan_to_num()), what
    assert torch.equal(a.isnan(), b.isnan()), what


class _WithDropout(nn.Module):
    """Random numbers before, between and after layers, in a checkpointed segment, too."""

    def __init__(self, group, affine_grad):
        super().__init__()
        options = {"process_group": group, "affine_grad": affine_grad}
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)
        self.norms = nn.ModuleList(
            syncbn.SyncBatchNorm(4, **options, activation="leaky_relu", inplace=own)
            for own in (False, True)
        )

    def _segment(self, x):
        return F.dropout(self.second(F.dropout(x, 0.3)), 0.3)

    def forward(self, x):
        x = self.norms[0](F.dropout(self.first(x), 0.2))
        x = self.norms[1](F.dropout(x.relu() + 0.1 * torch.randn(x.shape), 0.4))
        return checkpoint(self._segment, x, use_reentrant=False)


def case_virtual_devices_equal_processes_with_dropout_exact(rank, world):
    """Process r seeds with seed + r, the process of all devices with seed: outputs, gradients,
    parameters and running statistics of some steps have equal bits."""
    group = alone(rank)
    for replicate in (True, False) if world == 2 else (True,):  # the order of a sum of three
        torch.manual_seed(3)
        mine, whole = _WithDropout(None, "global"), _WithDropout(group, "global")
        whole.load_state_dict(mine.state_dict())
        devices = SelfDataParallel(whole, ["cpu"] * world, replicate)
        xs = list(torch.randn(4, world, 3, 3, 6, 6))
        results = []
        own = (mine, slice(rank, rank + 1), 70 + rank)
        for model, shares, seed in (own, (devices, slice(None), 70)):
            torch.manual_seed(seed)
            results.append([])
            for x in xs:
                parts = [part.clone().requires_grad_() for part in x[shares]]
                ys = [model(parts[0])] if model is mine else model(parts)
                sum(y.square().sum() for y in ys).backward()
                at = 0 if model is mine else rank
                results[-1] += [ys[at].detach(), parts[at].grad]
                with torch.no_grad():
                    for name, p in (mine if model is mine else whole).named_parameters():
                        if model is mine and "norms" not in name:
                            every = [torch.empty_like(p.grad) for _ in range(world)]
                            dist.all_gather(every, p.grad)
                            p.grad = functools.reduce(torch.add, every)
                        results[-1].append(p.grad.clone())
                        p -= 0.01 * p.grad
                        p.grad = None
        assert all(map(torch.equal, *results)) and len(results[0]) == len(results[1])
        unchanged(whole, mine.state_dict())


def case_processes_times_devices_exact(rank, world):
    """The number of devices may differ between processes; wide layers need a second message."""
    group = alone(rank)
    counts = [2 + r for r in range(world)]
    first = sum(counts[:rank])
    for dtype, shape in (("float32", (17, 5, 9)), ("float16", (17, 4)), ("float32", (17, 600))):
        x, dy = rough_batch(dtype, shape)
        for kind in ("even", "uneven", "empty first"):
            parts = shards(17, sum(counts), kind)
            xs, dys = [x[p] for p in parts], [dy[p] for p in parts]
            own = slice(first, first + counts[rank])
            layer = new_layer(shape[1], momentum=1.0, affine_grad="global")
            model = SelfDataParallel(layer, ["cpu"] * counts[rank])
            mine = [x.clone().requires_grad_() for x in xs[own]]
            ys = model(mine)
            torch.autograd.backward(ys, dys[own])
            whole = new_layer(shape[1], momentum=1.0, process_group=group)
            expected, dxs = device_step(whole, [x], [dy])
            for k, part in enumerate(parts[own]):
                same(ys[k], expected[0][part], f"{dtype}, {kind}, y")
                same(mine[k].grad, dxs[0][part], f"{dtype}, {kind}, dx")
            for name, value in whole.state_dict().items():
                same(layer.state_dict()[name], value, name)
            same(layer.weight.grad, whole.weight.grad, "dweight")
            same(layer.bias.grad, whole.bias.grad, "dbias")


def case_in_place_on_processes_times_devices_exact(rank, world):
    """The input that a device recovers depends on its own elements alone, so gradients do not
    depend on the number of devices and processes either."""
    group = alone(rank)
    counts = [1 + r for r in range(world)]
    first = sum(counts[:rank])
    options = {"activation": "leaky_relu", "inplace": True, "affine_grad": "global"}
    for dtype, kind in itertools.product(("float32", "float16"), ("uneven", "empty first")):
        x, dy = rough_batch(dtype, (17, 4, 9))
        own = shards(17, sum(counts), kind)[first : first + counts[rank]]
        layer = new_layer(4, **options)
        ys, dxs = device_step(layer, [x[p] for p in own], [dy[p] for p in own])
        whole = new_layer(4, process_group=group, **options)
        (y,), (dx,) = device_step(whole, [x], [dy])
        for k, part in enumerate(own):
            same(ys[k], y[part], f"{dtype}, {kind}, y")
            same(dxs[k], dx[part], f"{dtype}, {kind}, dx")
        assert_same_layers(layer, whole)


def case_welford_on_processes_times_devices(rank, world):
    """The bound of rank_cases_modes.py for one addition more: the joined record of a process is
    rounded again. Records that fit the frame, and records that do not."""
    options = {"statistics": "welford", "momentum": 1.0}
    counts = [2 + r for r in range(world)]
    first = sum(counts[:rank])
    for channels, kind in itertools.product((7, 3000), ("uneven", "empty first")):
        rng = np.random.default_rng(36)
        x = oracle.round_to(2 + rng.standard_normal((12, channels, 9)), "float32")
        parts = shards(12, sum(counts), kind)[first : first + counts[rank]]
        layer = syncbn.SyncBatchNorm(channels, **options)
        layer([to_tensor(x[part], "float32") for part in parts])
        check_welford(layer, x, 12 * 9 + 1)
    # One process's record of float64 is joined as those of processes are: the very bits.
    x, dy = torch.randn(2, 12, 5, 4, generator=torch.Generator().manual_seed(8)).double()
    parts = shards(12, world, "uneven")
    mine = syncbn.SyncBatchNorm(5, dtype=torch.float64, **options)
    whole = syncbn.SyncBatchNorm(5, dtype=torch.float64, process_group=alone(rank), **options)
    (y,), (dx,) = device_step(mine, [x[parts[rank]]], [dy[parts[rank]]])
    ys, dxs = device_step(whole, [x[part] for part in parts], [dy[part] for part in parts])
    same(y, ys[rank], "y")
    same(dx, dxs[rank], "dx")
    unchanged(mine, whole.state_dict())


def case_devices_of_an_empty_process(rank, world):
    """Without samples a process may have another dtype than the group."""
    layer = new_layer(6)
    x, dy = rough_batch("float16", (8, 6, 3))
    xs = [t[:0].float() for t in x.chunk(2)] if rank == 0 else x.chunk(2)
    dys = [t[:0].float() for t in dy.chunk(2)] if rank == 0 else dy.chunk(2)
    ys, dxs = device_step(layer, xs, dys)
    assert [y.dtype for y in ys] == [x.dtype for x in xs] == [dx.dtype for dx in dxs]
    assert layer.num_batches_tracked == 1
    assert rank != 0 or not layer.weight.grad.any()
    gathered = [None] * world
    dist.all_gather_object(gathered, layer.running_var.tolist())
    assert all(g == gathered[0] for g in gathered)


class _Penalty(nn.Module):
    """Takes a gradient through its layer inside forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (syncbn.SyncBatchNorm(4) for _ in range(2))

    def forward(self, x):
        y = self.first(x)
        (inner,) = torch.autograd.grad(y.pow(3).sum(), x, retain_graph=True)
        return self.second(y + inner)


def case_a_backward_inside_a_devices_forward_is_an_error_on_every_process(rank, world):
    """At once, whether the others have several devices or one, which makes it."""
    text = "got a backward pass inside the forward of one device"
    x = torch.randn(4, 4, requires_grad=True)
    for several in (range(world), range(1), range(world - 1, world)):
        model = _Penalty()
        devices = SelfDataParallel(model, ["cpu"] * (2 if rank in several else 1))
        began = time.monotonic()
        if rank in several:
            raises(RuntimeError, f"first: {text}", devices, x)
        else:
            diverges(f"a rank raised an error.*{text}", devices, x)
        assert time.monotonic() - began < 10
        assert model.first.num_batches_tracked == 1 and model.second.num_batches_tracked == 0
    assert all_reduce(torch.ones(1)).item() == world


def case_an_error_of_the_first_device_is_an_error_on_every_process(rank, world):
    """No device waits at a layer yet."""
    model = SelfDataParallel(_Layers(), ["cpu", "cpu"])
    good = torch.ones(2, 4)
    for _ in range(2):
        if rank == 0:
            raises(AttributeError, "", model, [(None,), good])
        else:
            diverges("a rank raised an error.*AttributeError", model, [good, good])
    model([good, torch.zeros(1, 4)])
    assert model.module.first.num_batches_tracked == 1


class _Layers(nn.Module):
    """A device whose first entry is negative goes to the second layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (syncbn.SyncBatchNorm(4) for _ in range(2))

    def forward(self, x):
        return (self.second if x.numel() and x.flatten()[0] < 0 else self.first)(x)


def case_devices_that_disagree_are_an_error_on_every_process(rank, world):
    model = SelfDataParallel(_Layers(), ["cpu", "cpu"])
    before = copy.deepcopy(model.module.state_dict())
    good, bad = torch.ones(2, 4), -torch.ones(2, 4)
    if rank == 0:
        text = "device 0 at layer 'first'.*device 1 at layer 'second'"
        diverges(text, model, [good, bad])
    else:
        text = "a rank raised an error"
        diverges(text, model, [good, good])
    unchanged(model.module, before)
    # A device that raises, and one whose input is refused.
    for error, second in ((AttributeError, None), (ValueError, torch.ones(2, 5))):
        if rank == 0:
            raises(error, "", model, [good, (second,)])
        else:
            diverges(text, model, [good, good])
        unchanged(model.module, before)
    model([good, torch.zeros(1, 4)])
    assert model.module.first.num_batches_tracked == 1


def case_all_reduce_over_processes(rank, world):
    """Integers in float64, so that the sums are exact."""
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3).t() * (rank + 1)  # not contiguous
    x.requires_grad_()
    total = all_reduce(x)
    factor = world * (world + 1) // 2
    assert torch.equal(total, torch.arange(6.0).view(2, 3).t() * factor)
    total.backward(torch.full_like(total, 10.0**rank).t().contiguous().t())
    assert torch.equal(x.grad, torch.full_like(x, sum(10.0**r for r in range(world))))
    # Devices of several processes, of which one gets no gradient.
    xs = [torch.full((4,), float(10 * rank + k), requires_grad=True) for k in range(3)]
    sums = all_reduce(xs)
    expected = sum(10.0 * r + k for r in range(world) for k in range(3))
    assert all(torch.equal(s, torch.full((4,), expected)) for s in sums)
    (sums[0] + 2 * sums[2]).sum().backward()
    assert all(torch.equal(x.grad, torch.full((4,), 3.0 * world)) for x in xs)


def case_all_reduce_disagreement_is_an_error_on_every_rank(rank, world):
    last = rank == world - 1
    for mine in (
        torch.zeros(4 if last else 3),
        torch.zeros(3, dtype=torch.float64 if last else torch.float32),
    ):
        diverges("did not make the same call", all_reduce, mine)
    # One rank is at a layer.
    call = (lambda: syncbn.SyncBatchNorm(3)(torch.ones(2, 3))) if last else None
    diverges("did not make the same call", call or (lambda: all_reduce(torch.ones(3))))
    if last:
        raises(ValueError, r"x\[1\]: got", all_reduce, [torch.ones(3), torch.ones(4)])
    else:
        diverges("raised an error", all_reduce, [torch.ones(3)] * 2)
    raises(ValueError, "x: got torch.int16 for", all_reduce, torch.ones(1).short())
    assert all_reduce(torch.ones(1)).item() == world


def case_all_reduce_of_every_dtype_exact(rank, world):
    for dtype in SUMMED:
        make = functools.partial(whole_numbers, (2, 3), dtype)
        same_numbers(all_reduce(make(rank)), sum_over(world, make))


def case_ddp_of_devices_equals_one_process(rank, world):
    """With the bound of rank_cases_parallel.py: the same sums in float64 in other orders."""
    plain, model = (
        network(),
        SelfDataParallel(syncbn.convert_sync_batchnorm(network()), ["cpu"] * 2),
    )
    train(plain, lambda step: samples(step, world))
    train(DistributedDataParallel(model), own(rank, world), joined=torch.cat)
    assert_near(model.module, plain)
