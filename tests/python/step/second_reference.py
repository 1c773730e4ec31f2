# SPDX-License-Identifier: Apache-2.0
"""Second derivatives of a training step in one process and float64, by PyTorch's batch norm, whose
double backward is a formula of its own; and the layer's, to be compared with them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import syncbn

EPS = 0.1  # large, so that a formula without it is wrong
SLOPE = 0.25  # exact in all dtypes


def data(parts, shape, dtype, seed):
    """x, dy, residual of the whole batch, weight, bias (numbers of dtype, as float64), and the
    directions of the second derivative: of dx and dresidual, and per rank of dweight and dbias."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*size, mean=0.0):
        values = mean + torch.randn(*size, generator=generator, dtype=torch.float64)
        return values.to(dtype).double()

    channels, ranks = shape[1], len(parts)
    return {
        "x": randn(*shape, mean=1.0),
        "dy": randn(*shape),
        "z": randn(*shape),
        "weight": randn(channels),
        "bias": randn(channels),
        "vx": randn(*shape),
        "vz": randn(*shape),
        "vw": randn(ranks, channels),
        "vb": randn(ranks, channels),
    }


def _activate(v, activation):
    if activation == "none":
        return v
    return F.leaky_relu(v, 0.0 if activation == "relu" else SLOPE)


def reference(d, parts, activation, residual, affine_grad):
    """Gradients of x and dy of the whole batch, and of the weight, of the sum over ranks of
    <vx, dx> + <vw, dweight> + <vb, dbias> + <vz, dresidual>.

    Each rank has its own copy of weight and bias, so that its first gradient is the rank's share.
    """
    x, dy, z = (d[name].clone().requires_grad_() for name in ("x", "dy", "z"))
    weights = [d["weight"].clone().requires_grad_() for _ in parts]
    biases = [d["bias"].clone().requires_grad_() for _ in parts]
    normalized = F.batch_norm(x, None, None, training=True, eps=EPS)
    view = (1, -1, *(1,) * (x.dim() - 2))
    scaled = [
        normalized[p] * w.view(view) + b.view(view)
        for p, w, b in zip(parts, weights, biases, strict=True)
    ]
    y = _activate(torch.cat(scaled) + (z if residual else 0), activation)
    sources = (x, z, *weights, *biases)
    dx, dz, *shares = torch.autograd.grad(
        y, sources, dy, create_graph=True, allow_unused=True, materialize_grads=True
    )
    dweights, dbiases = torch.stack(shares[: len(parts)]), torch.stack(shares[len(parts) :])
    if affine_grad == "global":  # every rank has the sum
        dweights = dweights.sum(0).expand_as(dweights)
        dbiases = dbiases.sum(0).expand_as(dbiases)
    total = (dx * d["vx"]).sum() + (dweights * d["vw"]).sum() + (dbiases * d["vb"]).sum()
    if residual:
        total = total + (dz * d["vz"]).sum()
    gx, gdy, *gweights = torch.autograd.grad(total, (x, dy, *weights))
    return gx, gdy, sum(gweights)


def layer_of(d, activation, affine_grad, statistics, dtype):
    layer = syncbn.SyncBatchNorm(
        d["weight"].numel(),
        EPS,
        activation=activation,
        negative_slope=SLOPE,
        affine_grad=affine_grad,
        statistics=statistics,
        dtype=torch.float64 if dtype == torch.float64 else torch.float32,
    )
    with torch.no_grad():
        layer.weight.copy_(d["weight"])
        layer.bias.copy_(d["bias"])
    return layer


def check_second(rank, parts, dtype, activation, residual, affine_grad, statistics="reproducible"):
    """This rank's second derivatives against the reference, those of the weight summed over the
    ranks unless the layer gives the sum.

    Bound: they are computed in float64 from exact inputs and rounded once to the dtype, hence
    eps / 2 of the rounded value, or half of the smallest number. In float64 sums of at most 55
    products of order 1 and some 20 operations per element stay below 1e-13 of the largest value.
    """
    d = data(parts, (11, 3, 5), dtype, 50)
    part = parts[rank]
    layer = layer_of(d, activation, affine_grad, statistics, dtype)
    if part.start == part.stop:  # as autocast may leave it
        dtype = torch.float32
    x, dy, z = (d[name][part].to(dtype).requires_grad_() for name in ("x", "dy", "z"))
    y = layer(x, z) if residual else layer(x)
    sources = (x, layer.weight, layer.bias, *([z] if residual else []))
    gradients = torch.autograd.grad(y, sources, dy, create_graph=True)
    directions = [d["vx"][part], d["vw"][rank], d["vb"][rank], d["vz"][part]]
    directions = [v.to(g.dtype) for v, g in zip(directions, gradients)]
    found = torch.autograd.grad(gradients, (x, dy, layer.weight), directions)
    expected = reference(d, parts, activation, residual, affine_grad)
    largest = max(t.abs().max() for t in expected)
    for name, got, e in zip(("x", "dy", "weight"), found, expected, strict=True):
        assert got.dtype == (layer.weight.dtype if name == "weight" else dtype)
        rounding = torch.finfo(got.dtype).eps / 2 if got.dtype != torch.float64 else 0.0
        got = got.double()
        rounded = got.abs()  # all numbers that were rounded
        if name != "weight":
            e = e[part]
        elif affine_grad == "share" and len(parts) > 1:
            dist.all_reduce(got)
            dist.all_reduce(rounded)
        error = (got - e).abs()
        smallest = torch.finfo(dtype).smallest_normal * rounding
        allowed = rounding * rounded + smallest + 1e-12 * largest
        assert (error <= allowed).all(), f"{name}: {error.max():.2g}, {dtype}, {activation}"
