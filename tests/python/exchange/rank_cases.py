# SPDX-License-Identifier: Apache-2.0
"""What each rank of a process group runs; test_distributed.py starts them and reads the results.

A case is a function case_*(rank, world), called on every rank in the order of this file; it raises
if something is wrong on this rank. Many cases share one start of the processes (seconds each).
"""

import copy
import logging
import pickle
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import oracle
import syncbn
from support import (
    assert_same_bits,
    new_layer,
    raises,
    rough_samples,
    to_array,
    to_tensor,
    unchanged,
)
from syncbn.exchange import failing

DTYPES = ("float16", "bfloat16", "float32", "float64")


def shards(samples: int, world: int, kind: str) -> list[slice]:
    """Bounds of each rank's samples: even, uneven, or with an empty rank in front."""
    fractions = {
        "even": [r / world for r in range(world + 1)],
        "uneven": [(r / world) ** 2 for r in range(world + 1)],
        "empty first": [max(0, (r - 1)) / (world - 1) for r in range(world + 1)],
    }[kind]
    bounds = [round(samples * f) for f in fractions]
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def diverges(text: str, function, *args, **options) -> None:
    raises(syncbn.DivergenceError, text, function, *args, **options)


class LogLines(logging.Handler):
    """What the package logs meanwhile, on all ranks."""

    def __enter__(self):
        self.lines = []
        logging.getLogger("syncbn").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("syncbn").removeHandler(self)
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.lines)
        self.of_all_ranks = [line for lines in gathered for line in lines]

    def emit(self, record):
        self.lines.append(record.getMessage())


def refused(rank, layer, text, bad, good=None, error=ValueError) -> None:
    """Rank 0 makes the call `bad`, which is refused with that text; the others make the good one,
    and their error quotes it. Nothing is changed, and the group stays usable."""
    before = copy.deepcopy(layer.state_dict())
    if rank == 0:
        raises(error, f"^{text}", bad)
    else:
        quoted = f"a rank raised an error: rank 0: .*{error.__name__}: {text}"
        diverges(quoted, good or bad)
    unchanged(layer, before)


def check_layer(
    rank, world, x, dy, dtype, kind, affine_grad="share", z=None, masks=None, activation="none"
):
    """One step of a layer on this rank's shard against the oracle, bit for bit. z: a residual;
    masks: of each rank, NaN where nothing counts."""
    fused = {"activation": activation, "negative_slope": 0.3}
    layer = new_layer(x.shape[1], momentum=1.0, affine_grad=affine_grad, **fused)
    xs, dys, zs = (
        None if t is None else [t[part] for part in shards(x.shape[0], world, kind)]
        for t in (x, dy, z)
    )
    mask = None if masks is None else masks[rank]
    if mask is not None:
        xs[rank], mask = np.where(mask[:, None], xs[rank], np.nan), torch.from_numpy(mask)
    options = {"weight": to_array(layer.weight), "bias": to_array(layer.bias), "residuals": zs}
    options |= {"activation": activation, "slope": 0.3, "masks": masks}
    forward = oracle.forward(xs, dtype, **options)
    backward = oracle.backward(dys, xs, dtype, forward, **options)
    given = [None if t is None else to_tensor(t[rank], dtype).requires_grad_() for t in (xs, zs)]
    y = layer(*given, mask)
    y.backward(to_tensor(dys[rank], dtype))
    what = f"{dtype}, {kind}, {activation}, "
    assert_same_bits(y, forward.ys[rank], what + "y")
    assert_same_bits(given[0].grad, backward.dxs[rank], what + "dx")
    if z is not None:
        assert_same_bits(given[1].grad, backward.dresiduals[rank], what + "dresidual")
    start = np.zeros(x.shape[1]), np.ones(x.shape[1]), 0
    mean, var, _ = oracle.update_running(*start, forward, 1.0, "float32")
    assert_same_bits(layer.running_mean, mean, what + "running_mean")
    assert_same_bits(layer.running_var, var, what + "running_var")
    whole = affine_grad == "global"
    dweight = backward.dweight if whole else backward.dweight_shares[rank]
    dbias = backward.dbias if whole else backward.dbias_shares[rank]
    assert_same_bits(layer.weight.grad, dweight, what + "dweight")
    assert_same_bits(layer.bias.grad, dbias, what + "dbias")


def case_bits_equal_the_oracle_exact(rank, world):
    for dtype in DTYPES:
        rng = np.random.default_rng(20)
        x = rough_samples(rng, (13, 5, 6, 7), dtype)
        dy = oracle.round_to(rng.standard_normal(x.shape), dtype)
        for kind in ("even", "uneven", "empty first"):
            check_layer(rank, world, x, dy, dtype, kind)
        check_layer(rank, world, x, dy, dtype, "uneven", "global")


def case_layers_wider_than_the_frame_exact(rank, world):
    """More than 512 channels of float32 (or 117 of float64) take a second message."""
    rng = np.random.default_rng(22)
    for channels, dtype in (
        (512, "float32"),
        (513, "float32"),
        (1100, "bfloat16"),
        (130, "float64"),
    ):
        x = rough_samples(rng, (7, channels), dtype)
        dy = oracle.round_to(rng.standard_normal(x.shape), dtype)
        for kind in ("uneven", "empty first"):
            check_layer(rank, world, x, dy, dtype, kind)


def case_empty_rank_of_another_dtype(rank, world):
    """Under autocast an empty rank may arrive with another type than the group."""
    for channels in (6, 600):
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            layer = syncbn.SyncBatchNorm(channels)
            x = torch.randn(0 if rank == 0 else 4, channels, 3)
            x = (x if rank == 0 else x.to(dtype)).requires_grad_()
            y = layer(x)
            y.sum().backward()
            assert y.dtype == x.dtype and y.shape == x.shape
            gathered = [None] * world
            dist.all_gather_object(gathered, layer.running_var.tolist())
            assert all(g == gathered[0] for g in gathered)
            assert layer.num_batches_tracked == 1
            assert rank != 0 or not layer.weight.grad.any()


def case_all_ranks_empty(rank, world):
    layer = syncbn.SyncBatchNorm(4)
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(0, 4, 5, requires_grad=True)
    layer(x).sum().backward()
    unchanged(layer, before)
    assert x.grad.shape == x.shape
    assert not layer.weight.grad.any() and not layer.bias.grad.any()


def case_global_count_of_one(rank, world):
    layer = syncbn.SyncBatchNorm(4)
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(1 if rank == 0 else 0, 4, 1)
    raises(ValueError, "more than 1 value per channel", layer, x)
    unchanged(layer, before)
    # One value on each rank is enough.
    layer(torch.randn(1, 4))
    assert layer.num_batches_tracked == 1


def case_disagreement_is_an_error_on_every_rank(rank, world):
    last = rank == world - 1
    x, wide = torch.randn(3, 4, 5), torch.randn(2, 900)

    def call(x=x, residual=None, **options):
        layer = syncbn.SyncBatchNorm(x.shape[1], **options)
        before = copy.deepcopy(layer.state_dict())
        try:
            layer(x, residual)
        finally:
            unchanged(layer, before)

    leaky = {"activation": "leaky_relu", "negative_slope": 0.1}
    for said, usual, odd in (
        ("dtype: float32 on .*, float64 on", {}, {"x": x.double()}),
        ("channels: 4 on .*, 3 on", {}, {"x": x[:, :3]}),
        ("channels: 4 on .*, 900 on", {}, {"x": wide}),
        ("eps: 1e-05 on .*, 0.001 on", {}, {"eps": 1e-3}),
        ("statistics: reproducible on .*, welford on", {}, {"statistics": "welford"}),
        ("activation: leaky_relu on .*, none on", leaky, leaky | {"activation": "none"}),
        ("negative_slope: 0.1 on .*, 0.2 on", leaky, leaky | {"negative_slope": 0.2}),
        ("weight: given on .*; bias: given on .*, absent on", {}, {"affine": False}),
        ("bias: given on .*, absent on", {}, {"bias": False}),
        ("residual: absent on .*, given on", {}, {"residual": x}),
    ):
        text = f"the ranks did not make the same call: {said} rank {world - 1}$"
        diverges(text, call, **(odd if last else usual))
    # Two layers in another order.
    model = nn.ModuleDict({n: nn.BatchNorm1d(4) for n in ("first", "second")})
    model = syncbn.convert_sync_batchnorm(model)
    before, mine = copy.deepcopy(model.state_dict()), "second" if last else "first"
    diverges(rf"^{mine}, call 0, .*, rank {rank} of {world}: ", model[mine], x)
    unchanged(model, before)
    # One rank has made a call more than the others.
    layer = syncbn.SyncBatchNorm(4)
    layer(x)
    layer.state.call += int(last)
    diverges(f"same call: call: 1 on .*, 2 on rank {world - 1}$", layer, x)
    # A backward meets the others' next forward: the rest of their fields says nothing more.
    layer = syncbn.SyncBatchNorm(4)
    y = layer(x.clone().requires_grad_())
    text = "same call: call: 1 on .*, 0 on {0}; direction: forward on .*, backward on {0}$"
    diverges(text.format(f"rank {world - 1}"), *((y.sum().backward,) if last else (layer, x)))
    # The groups are still good.
    syncbn.SyncBatchNorm(4)(x)
    dist.barrier()


def case_evaluation_exchanges_nothing(rank, world):
    layer = syncbn.SyncBatchNorm(4)
    layer(torch.randn(5, 4))
    layer.eval()
    if rank == 0:
        layer(torch.randn(5, 4))
        syncbn.SyncBatchNorm(4, track_running_stats=False).eval()(torch.randn(5, 4))


class CountCollectives(TorchDispatchMode):
    """Names of the collectives, through shared memory too: "all_reduce", "all_gather"."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        begins = func._opname in ("forward_begin", "backward_begin") and args[-1] >= 0
        if begins or func._opname == "shm_sum":
            self.names.append("all_reduce")
        if func.namespace in ("_c10d_functional", "c10d") and "wait" not in func._opname:
            kinds = ("all_reduce", "all_gather")
            plain = func._opname.replace("_", "")
            known = [kind for kind in kinds if plain.startswith(kind.replace("_", ""))]
            self.names.append(*known or [func._opname])
        return func(*args, **(kwargs or {}))


def case_ranks_that_go_different_ways_exact(rank, world):
    """Rank 0 by one operator for each direction, the others in a checkpointed segment."""
    layer, alone = syncbn.SyncBatchNorm(4), syncbn.SyncBatchNorm(4, sync=False)
    share = [torch.randn(3, 4, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    for number in range(3):
        x = (share[rank] + number).requires_grad_()
        y = layer(x) if rank == 0 else checkpoint(layer, x, use_reentrant=False)
        y.square().sum().backward()
        whole = (torch.cat(share) + number).requires_grad_()
        expected = alone(whole)
        expected.square().sum().backward()
        own = slice(3 * rank, 3 * rank + 3)
        assert torch.equal(y, expected[own]) and torch.equal(x.grad, whole.grad[own])
    assert torch.equal(layer.running_var, alone.running_var)


def case_one_exchange_per_direction(rank, world):
    """As the operators show it, and as the package counts its own."""
    layer = syncbn.SyncBatchNorm(64)
    layer(torch.randn(2, 64))  # makes the group, and compares paths
    x = torch.randn(2, 64, requires_grad=True)
    with CountCollectives() as forward:
        y = layer(x)
    with CountCollectives() as backward:
        y.sum().backward()
    assert forward.names == ["all_reduce"], forward.names
    assert backward.names == ["all_reduce"], backward.names
    entered, enter = [], failing.Attempt.__enter__

    def noted(attempt):
        entered.append(attempt.call.direction)
        return enter(attempt)

    with mock.patch.object(failing.Attempt, "__enter__", noted):
        layer(torch.randn(2, 64, requires_grad=True)).square().sum().backward()
    assert entered == ["forward", "backward"], entered


def case_collectives_of_the_user_in_between(rank, world):
    """On the same group, at another place on each rank: not the layer's business."""
    layer, last = syncbn.SyncBatchNorm(4), rank == world - 1
    work = dist.all_reduce(torch.ones(3), async_op=True) if last else None
    layer(torch.randn(3, 4))
    if not last:
        work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    layer(torch.randn(3, 4))


def case_skip_takes_part(rank, world):
    """One rank leaves out a branch; the others' numbers are those of their samples alone."""
    model = nn.ModuleDict({"stem": nn.BatchNorm1d(4), "head": nn.BatchNorm1d(4)})
    model, skips = syncbn.convert_sync_batchnorm(model), rank == world - 1
    x = torch.randn(3, 4, requires_grad=True)
    for part in (model["stem"], model):
        whole = model["stem"] if part is not model else lambda x: model["head"](model["stem"](x))
        (syncbn.skip(part) if skips else whole(x)).sum().backward()
    assert model["stem"].num_batches_tracked == 2
    assert model["stem"].weight.grad is not None


def case_copies_and_pickles_with_a_group(rank, world):
    group = dist.new_group(list(range(world)))
    layer = syncbn.SyncBatchNorm(4, process_group=group)
    assert layer.process_group is group
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        other(torch.randn(3, 4))
        assert other.process_group is group


def case_subgroups(rank, world):
    """Layers over a part of the ranks, beside one over all, which are called in turns; the others
    go on alone."""
    both = syncbn.SyncBatchNorm(4)
    pair = dist.new_group([0, 1])
    alone = dist.new_group([rank], use_local_synchronization=True)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    both(x)
    layer = syncbn.SyncBatchNorm(4, process_group=pair)
    if rank < 2:
        y = layer(x[rank * 2 : rank * 2 + 2 + rank])
        whole = syncbn.SyncBatchNorm(4, process_group=alone)
        expected = whole(x[:5])[rank * 2 : rank * 2 + 2 + rank]
        assert torch.equal(y, expected)
        assert torch.equal(layer.running_var, whole.running_var)
    else:
        raises(RuntimeError, "not a member", layer, x)
    for _ in range(3):
        both(x)
        if rank < 2:
            layer(x)
    dist.barrier()
