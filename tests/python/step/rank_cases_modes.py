# SPDX-License-Identifier: Apache-2.0
"""Activation, residual, sync=False, in-place and welford over the ranks of a process group; run by
test_distributed.py as rank_cases.py is."""

import inspect
import itertools

import numpy as np
import torch
import torch.distributed as dist

import oracle
import syncbn
from rank_cases import CountCollectives, check_layer, diverges, raises, shards, unchanged
from support import rough_samples, to_tensor
from syncbn.functional import sync_batch_norm


def case_activation_and_residual_exact(rank, world):
    rng = np.random.default_rng(30)
    for dtype in ("bfloat16", "float32", "float64"):
        x, z, dy = (rough_samples(rng, (11, 5, 6, 3), dtype) for _ in range(3))
        for activation, residual, kind in itertools.product(
            ("relu", "leaky_relu"), (None, z), ("uneven", "empty first")
        ):
            check_layer(rank, world, x, dy, dtype, kind, z=residual, activation=activation)


def case_in_place_forward_exact(rank, world):
    """Forward has the bits of the ordinary layer, on several ranks too."""
    x = torch.randn(3 + rank, 6, 5, generator=torch.Generator().manual_seed(rank))
    options = {"activation": "leaky_relu", "negative_slope": 0.1}
    layers = [syncbn.SyncBatchNorm(6, inplace=i, **options) for i in (True, False)]
    for layer in layers:
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 1.5, 6))
            layer.bias.copy_(torch.linspace(1.5, 0.5, 6))
    leaves = [x.clone().requires_grad_() for _ in layers]
    ys = [layer(leaf * 1) for layer, leaf in zip(layers, leaves, strict=True)]
    assert torch.equal(*ys)
    assert torch.equal(layers[0].running_var, layers[1].running_var)
    for y in ys:
        y.square().sum().backward()
    # The bound itself: test_in_place.py. Gradients here are of order 1, and k is 7e-7.
    assert (leaves[0].grad - leaves[1].grad).abs().max() < 1e-4


def case_small_weights_in_place_are_an_error_on_every_rank(rank, world):
    layer = syncbn.SyncBatchNorm(3, activation="leaky_relu", inplace=True)
    with torch.no_grad():
        layer.weight.zero_()
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    raises(ValueError, "weight: got entries so small", layer, torch.randn(4, 3))
    unchanged(layer, before)
    # Where one rank alone refuses, the others learn of it.
    with torch.no_grad():
        layer.weight.fill_(1 if rank else 0)
    if rank:
        diverges("raised an error", layer, torch.randn(4, 3))
    else:
        raises(ValueError, "weight: got entries so small", layer, torch.randn(4, 3))


def case_sync_false_exchanges_nothing(rank, world):
    layer = syncbn.SyncBatchNorm(4, sync=False, activation="relu")
    x = torch.randn(3 + rank, 4, 5, requires_grad=True)
    with CountCollectives() as count:
        layer(x).sum().backward()
    assert count.names == []


def case_the_function_has_the_options_of_the_layer_exact(rank, world):
    own, whole = (inspect.signature(f).parameters for f in (sync_batch_norm, syncbn.SyncBatchNorm))
    assert {n for n, p in whole.items() if p.kind is p.KEYWORD_ONLY} - {"bias"} <= own.keys()
    for options in ({"affine_grad": "global"}, {"sync": False}, {"engine": "process_group"}):
        layer, results, counts = syncbn.SyncBatchNorm(4, **options), [], []
        weight, bias = (p.detach().clone().requires_grad_() for p in layer.parameters())
        given = torch.zeros(4), torch.ones(4), weight, bias, True
        for call in (layer, lambda x, g=given, o=options: sync_batch_norm(x, *g, **o)):
            x = torch.randn(3 + rank, 4, 5, generator=torch.Generator().manual_seed(rank))
            with CountCollectives() as count:
                y = call(x.requires_grad_())
                y.pow(3).sum().backward()
            results.append([y, x.grad])
            counts.append(count.names)
        results[0] += layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var
        results[1] += weight.grad, bias.grad, *given[:2]
        assert all(map(torch.equal, *results)), options
        assert counts[0][-2:] == counts[1][-2:] and bool(counts[1]) == ("sync" not in options)


def welford_layer(channels, **options):
    return syncbn.SyncBatchNorm(channels, momentum=1.0, statistics="welford", **options)


def check_welford(layer, x, additions, u=2.0**-24):
    """The statistics of samples (N, C, L) are the same on every rank, and within the bound of Chan,
    Golub and LeVeque: n kappa u for n additions in a row; see tests/cpp."""
    gathered = [torch.empty_like(layer.running_mean) for _ in range(dist.get_world_size())]
    for value in (layer.running_mean, layer.running_var):
        dist.all_gather(gathered, value)
        assert all(torch.equal(g, value) for g in gathered), "not the same on every rank"
    n, mean, var = len(x) * x.shape[2], x.mean((0, 2)), x.var((0, 2))
    kappa = np.sqrt(1 + mean**2 / var)
    rounding = 2.0**-24  # of the buffers
    error = np.abs(layer.running_mean.double().numpy() - mean)
    allowed = 4 * additions * u * (np.abs(mean) + np.sqrt(var)) + rounding * np.abs(mean)
    assert (error <= allowed).all()
    unbiased = var * n / (n - 1)
    error = np.abs(layer.running_var.double().numpy() - unbiased)
    assert (error <= (4 * additions * kappa * u + 2 * rounding) * unbiased).all()


def case_welford_within_bound(rank, world):
    """Uneven and empty ranks; records that fit the frame, and records that do not."""
    rng = np.random.default_rng(33)
    for channels, dtype in ((7, "float16"), (7, "float32"), (7, "float64"), (3000, "float32")):
        x = oracle.round_to(2 + rng.standard_normal((12, channels, 9)), dtype)
        for kind in ("even", "uneven", "empty first"):
            mine = to_tensor(x[shards(12, world, kind)[rank]], dtype)
            layer = welford_layer(channels)
            layer(mine)
            check_welford(layer, x, 12 * 9, 2.0**-53 if dtype == "float64" else 2.0**-24)


def case_welford_gradients(rank, world):
    """float64 against autograd over the whole batch: sums of 84 numbers near 1, 1e-12 is 4,500
    units in the last place."""
    generator = torch.Generator().manual_seed(34)
    x, dy = (torch.randn(12, 3, 7, generator=generator).double() for _ in range(2))
    part = shards(12, world, "uneven")[rank]
    layer = welford_layer(3, activation="relu", dtype=torch.float64)
    plain = torch.nn.BatchNorm1d(3, momentum=1.0, dtype=torch.float64)
    mine, whole = x[part].clone().requires_grad_(), x.clone().requires_grad_()
    layer(mine).backward(dy[part])
    plain(whole).relu().backward(dy)
    torch.testing.assert_close(mine.grad, whole.grad[part], rtol=0, atol=1e-12)
    total = layer.weight.grad.clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, plain.weight.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.running_var, plain.running_var, rtol=0, atol=1e-12)


def case_welford_is_reproducible_exact(rank, world):
    x = torch.randn(5, 4, 50, generator=torch.Generator().manual_seed(35 + rank))
    outputs = [welford_layer(4)(x) for _ in range(3)]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def case_welford_one_exchange_per_direction(rank, world):
    """Over Gloo, records that do not fit the frame and messages of over 512 channels take two."""
    for channels in (64, 5000):
        layer = welford_layer(channels)
        x = torch.randn(2, channels, requires_grad=True)
        layer(x)
        wide = channels > 512 and syncbn.report(layer)[0].engine == "gloo"
        with CountCollectives() as count:
            y = layer(x)
        assert count.names == ["all_reduce"] * (1 + wide), count.names
        with CountCollectives() as count:
            y.sum().backward()
        assert count.names == ["all_reduce"] * (1 + wide), count.names


def case_welford_disagreement_and_empty_ranks(rank, world):
    for channels in (4, 5000):
        layer = welford_layer(channels, eps=1e-5 if rank else 1e-3)
        x = torch.randn(3, channels)
        diverges("same call", layer, x)
    layer = welford_layer(5000)
    either = (ValueError, syncbn.DivergenceError)
    raises(either, "raised an error|shape", layer, torch.randn(3, 5000 if rank else 4))
    layer = welford_layer(4)
    y = layer(torch.empty(0, 4))
    assert y.shape == (0, 4) and layer.num_batches_tracked == 0
    # An empty rank may be of another dtype than the group.
    for channels in (4, 5000):
        layer = welford_layer(channels)
        layer(torch.empty(0, channels) if rank == 0 else torch.randn(4, channels).double())
        assert layer.num_batches_tracked == 1
        assert layer.running_var.isfinite().all()
