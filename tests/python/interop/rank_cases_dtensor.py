# SPDX-License-Identifier: Apache-2.0
"""DTensors as inputs; run by test_distributed.py as rank_cases.py is. The values that are right are
those of plain batch norm over the whole batch, in one process."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.utils.checkpoint import checkpoint

import syncbn
from rank_cases import raises, refused
from syncbn.functional import sync_batch_norm

X = torch.linspace(-2, 3, 7 * 3 * 5 * 4).sin().view(7, 3, 5, 4).double()
DY, Z = X.cos(), X.flip(0)


def _layer(**options):
    return syncbn.SyncBatchNorm(3, dtype=torch.float64, **options)


def _whole(residual=False):
    """Output, gradients and running variance of plain batch norm in one process."""
    plain = nn.BatchNorm2d(3, dtype=torch.float64)
    x, z = X.clone().requires_grad_(), Z.clone().requires_grad_()
    y = (plain(x) + z).relu() if residual else plain(x)
    y.backward(DY)
    return y, x.grad, z.grad, plain.weight.grad, plain.bias.grad, plain.running_var


def _close(a, b):
    torch.testing.assert_close(a.full_tensor() if isinstance(a, DTensor) else a, b)


def _check(layer, mesh, placements, call=lambda layer, *given: layer(*given), residual=False):
    wanted = _whole(residual)
    x = distribute_tensor(X, mesh, placements).requires_grad_()
    z = distribute_tensor(Z, mesh, placements).requires_grad_()
    y = call(layer, x, z) if residual else call(layer, x)
    assert isinstance(y, DTensor) and y.shape == x.shape
    assert y.placements == tuple(placements) and y.device_mesh == mesh
    y.backward(distribute_tensor(DY, mesh, placements))
    assert x.grad.placements == tuple(placements)
    for got, want in zip((y, x.grad, z.grad if residual else None), wanted):
        if got is not None:
            _close(got, want)
    for parameter, want in ((layer.weight, wanted[3]), (layer.bias, wanted[4])):
        got = parameter.grad
        if not isinstance(parameter, DTensor) and layer.affine_grad == "share":
            dist.all_reduce(got)
        _close(got, want)
    _close(layer.running_var, wanted[5])
    number = layer.num_batches_tracked
    assert int(number.to_local() if isinstance(number, DTensor) else number) == 1


def case_samples_split_over_the_group(rank, world):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    for options in ({}, {"affine_grad": "global"}, {"statistics": "welford"}):
        for distributed in (False, True):
            for reentrant in (None, False, True):
                layer = _layer(**options)
                if distributed:
                    distribute_module(layer, mesh)

                def call(layer, *given, reentrant=reentrant):
                    if reentrant is None:
                        return layer(*given)
                    return checkpoint(layer, *given, use_reentrant=reentrant)

                _check(layer, mesh, [Shard(0)], call)
    _check(_layer(activation="relu"), mesh, [Shard(0)], residual=True)


def case_parameters_of_a_mesh_train(rank, world):
    """Their gradients are sums that are still to be made; an optimizer makes them."""
    mesh = init_device_mesh("cpu", (world,))
    layer, plain = distribute_module(_layer(), mesh), nn.BatchNorm2d(3, dtype=torch.float64)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (layer, plain))
    for _ in range(3):
        (layer(distribute_tensor(X, mesh, [Shard(0)])) ** 3).sum().backward()
        (plain(X) ** 3).sum().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(layer.parameters(), plain.parameters()):
        _close(a, b)
    _close(layer.running_var, plain.running_var)


def case_copies_outside_the_group(rank, world):
    """A mesh of two axes: samples split over one, copies over the other."""
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("data", "model"))
    for placements in ([Shard(0), Replicate()], [Shard(0), Shard(0)]):
        _check(distribute_module(_layer(), mesh), mesh, placements)
    _check(_layer(process_group=mesh["data"]), mesh, [Shard(0), Replicate()])
    turned = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "model"))
    alone = _layer(process_group=turned["data"])
    wanted = _whole()
    y = alone(distribute_tensor(X, turned, [Shard(0), Replicate()]))
    _close(y, wanted[0])
    _close(alone.running_var, wanted[5])


def case_the_function_takes_them(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    y = sync_batch_norm(distribute_tensor(X, mesh, [Shard(0)]), training=True)
    assert y.placements == (Shard(0),)
    _close(y, _whole()[0])


def case_other_placements_are_refused(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    own = X[rank::world]
    split = distribute_tensor(X, mesh, [Shard(0)])
    mixed = distribute_module(_layer(), mesh)
    layer, copied = _layer(), distribute_tensor(X, mesh, [Replicate()])
    mask = DTensor.from_local(own[:, 0] > 0, mesh, [Replicate()], run_check=False)
    others = [distribute_tensor(X, mesh, [Shard(axis)]) for axis in (1, 2)]
    others.append(DTensor.from_local(own, mesh, [Partial()], run_check=False))
    sharded = {name: _layer() for name in ("weight", "running_mean")}
    for name, other in sharded.items():
        good = getattr(other, name).detach()
        delattr(other, name)
        other.register_buffer(name, distribute_tensor(good, mesh, [Shard(0)]))
    for name, call, plainly in (
        *(("input", lambda x=x: layer(x), lambda: layer(own)) for x in (copied, *others)),
        ("residual", lambda: layer(split, copied), lambda: layer(own, own)),
        ("residual", lambda: layer(own, copied), lambda: layer(own, own)),
        ("mask", lambda: layer(split, None, mask), lambda: layer(own, None, own[:, 0] > 0)),
        ("weight", lambda: mixed(own), lambda: layer(own)),
        ("weight", lambda: sharded["weight"](split), lambda: layer(own)),
        ("running_mean", lambda: sharded["running_mean"](split), lambda: layer(own)),
        ("inputs.0., of device 0: input", lambda: layer([split, own]), lambda: layer([own, own])),
    ):
        refused(rank, layer, f"{name}: got a DTensor", call, plainly)
    for x in (copied, *others):  # on all ranks
        text = r"^input: got a DTensor .*expected Shard.*to_local\(\)"
        raises(ValueError, text, layer, x)
    layer(own)
    assert layer.num_batches_tracked == 1
