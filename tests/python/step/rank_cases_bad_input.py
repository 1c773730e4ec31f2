# SPDX-License-Identifier: Apache-2.0
"""Bad input on one rank is an error on every rank and changes nothing on any; run by
test_distributed.py as rank_cases.py is.

Where torch.nn.SyncBatchNorm refuses on one rank, before its exchange, the others wait.
"""

import copy
import math

import torch
import torch.distributed as dist

import syncbn
from rank_cases import raises, unchanged
from syncbn.ops import batch_norm_

X = torch.linspace(-2, 3, 60).sin().view(5, 4, 3)


def _step(layer):
    x = X.clone().requires_grad_()
    y = layer(x)
    y.backward(X.cos())
    return y.detach(), x.grad, *(b.clone() for b in layer.buffers())


def case_bad_options_and_buffers_of_one_rank(rank, world):
    expected = _step(syncbn.SyncBatchNorm(4))
    for name, bad in (
        ("eps", math.inf),
        ("eps", "1e-5"),
        ("momentum", "0.1"),
        ("negative_slope", None),
        ("activation", ["relu"]),
        ("num_batches_tracked", torch.tensor(1, dtype=torch.int32)),
        ("num_batches_tracked", torch.zeros(0, dtype=torch.int64)),
        ("running_mean", torch.zeros(1).expand(4)),
        ("running_var", torch.ones(1).expand(4)),
    ):
        layer = syncbn.SyncBatchNorm(4)
        before = copy.deepcopy(layer.state_dict())
        if rank == 0:
            good = getattr(layer, name)
            setattr(layer, name, bad)
            raises(ValueError, f"^{name}: got .*, expected", lambda layer=layer: layer(X))
            setattr(layer, name, good)
        else:
            text = f"a rank refused its input: rank 0: .*ValueError: {name}: got "
            raises(syncbn.DivergenceError, text, lambda layer=layer: layer(X))
        unchanged(layer, before)
        assert all(map(torch.equal, _step(layer), expected)), name


def case_bad_lists_of_one_rank(rank, world):
    layer = syncbn.SyncBatchNorm(4)
    before = copy.deepcopy(layer.state_dict())
    for name, *bad in (("mask", None, 5), ("residual", X, None), ("mask", None, [X > 0])):
        if rank == 0:
            text = f"^{name}: got .*, expected a list of 2"
            raises(ValueError, text, lambda bad=bad: layer([X, X], *bad))
        else:
            text = f"rank 0: .*ValueError: {name}: got "
            raises(syncbn.DivergenceError, text, lambda: layer([X, X]))
        unchanged(layer, before)
    layer([X, X])


def case_bad_input_of_the_operator_on_one_rank(rank, world):
    names = ("estimated_mean", "estimated_var", "batches")
    for name, bad in (
        ("x", None),
        ("x", X.to_sparse()),
        ("estimated_mean", None),
        ("estimated_var", torch.ones(1).expand(4)),
        ("batches", 1),
        ("epsilon", "1"),
        ("momentum", None),
        ("is_infer", "no"),
    ):
        given = {
            "x": X,
            "estimated_mean": torch.zeros(4),
            "estimated_var": torch.ones(4),
            "scale": None,
            "bias": None,
            "batches": torch.tensor([2]),
        }
        before = [given[n].clone() for n in names]
        if rank == 0:
            raises(
                ValueError,
                f"^{name}: got .*, expected",
                lambda given=given, name=name, bad=bad: batch_norm_(**{**given, name: bad}),
            )
        else:
            text = f"a rank refused its input: rank 0: .*ValueError: {name}: got "
            raises(syncbn.DivergenceError, text, lambda given=given: batch_norm_(**given))
        assert all(map(torch.equal, (given[n] for n in names), before)), name
        batch_norm_(**given)
        assert given["batches"].item() == 3


def case_a_destroyed_group_changes_nothing_and_can_be_replaced(rank, world):
    group = dist.new_group(list(range(world)))
    layer = syncbn.SyncBatchNorm(4, process_group=group)
    layer(X)
    before = copy.deepcopy(layer.state_dict())
    name = group.group_name
    dist.barrier()
    dist.destroy_process_group(group)
    for _ in range(2):
        text = f"^process_group: no process group named '{name}' in this process; was it destroyed"
        raises(RuntimeError, text, lambda: layer(X))
        unchanged(layer, before)
    syncbn.set_group(layer)
    layer(X)
    assert layer.num_batches_tracked == 2
