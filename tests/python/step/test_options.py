# SPDX-License-Identifier: Apache-2.0
"""Types, shapes, layouts and options of the layer on one rank: their product, every bit against the
oracle.

torch.nn.SyncBatchNorm on one rank is torch.nn.functional.batch_norm, which comments here mean by
"PyTorch"; on several ranks it takes no CPU tensors.
"""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import oracle
import syncbn
from support import TORCH_DTYPES, bits, layouts_of, new_layer, to_tensor
from syncbn.step.options import Options, form_of

# Types of input, parameters and buffers. PyTorch refuses the last three ("expected scalar type
# BFloat16 but found Float"); FSDP2 with bfloat16 mixed precision gives the second of them.
TYPES = (
    *((t, t, t) for t in TORCH_DTYPES),
    ("float16", "float32", "float32"),
    ("bfloat16", "float32", "float32"),
    ("float16", "float16", "float32"),
    ("bfloat16", "bfloat16", "float32"),
    ("float64", "float32", "float32"),
)
SHAPES = ((5, 65), (3, 5, 9), (2, 6, 4, 3), (2, 3, 2, 3, 2), (2, 3, 2, 2, 2, 2))
# track_running_stats and momentum, which does nothing without them.
RUNNING = ((True, 0.1), (True, None), (False, 0.1))
FROZEN = ((), ("weight",), ("bias",), ("weight", "bias"))


def all_layouts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Also with the axes in memory in reverse."""
    axes = tuple(reversed(range(tensor.dim())))
    return layouts_of(tensor) | {"permuted": tensor.permute(axes).contiguous().permute(axes)}


def per_channel(channels: int, begin: float, end: float, dtype: str) -> np.ndarray:
    return oracle.round_to(np.linspace(begin, end, channels), dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also the type, and the signs of zeros."""
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


class Expected:
    """A step by the oracle, from running statistics of 0 and 1."""

    def __init__(self, shape, types, affine, eps):
        dtype, parameters, self.buffers = types
        rng = np.random.default_rng(60)
        x = oracle.round_to(2 * rng.standard_normal(shape) + 1, dtype)
        dy = oracle.round_to(rng.standard_normal(shape), dtype)
        values = (per_channel(shape[1], *ends, parameters) for ends in ((-2, 2), (1, 3)))
        weight, bias = values if affine else (None, None)
        self.forward = oracle.forward([x], dtype, weight=weight, bias=bias, eps=eps)
        backward = oracle.backward(
            [dy], [x], dtype, self.forward, weight, bias, parameter_dtype=parameters
        )
        self.x, self.dy = to_tensor(x, dtype), to_tensor(dy, dtype)
        self.y, self.dx = (to_tensor(t[0], dtype) for t in (self.forward.ys, backward.dxs))
        self.parameters, self.gradients = {}, {}
        if affine:
            names, tensors = ("weight", "bias"), (weight, bias, backward.dweight, backward.dbias)
            tensors = [to_tensor(t, parameters) for t in tensors]
            self.parameters = dict(zip(names, tensors))
            self.gradients = dict(zip(names, tensors[2:]))
        self.dtype = TORCH_DTYPES[parameters]

    def running(self, momentum, batches=0):
        """running_mean, running_var and num_batches_tracked after the step."""
        channels = self.x.shape[1]
        mean, var, batches = oracle.update_running(
            np.zeros(channels), np.ones(channels), batches, self.forward, momentum, self.buffers
        )
        return to_tensor(mean, self.buffers), to_tensor(var, self.buffers), torch.tensor(batches)

    def layer(self, **options) -> syncbn.SyncBatchNorm:
        layer = syncbn.SyncBatchNorm(self.x.shape[1], dtype=self.dtype, **options)
        for name, value in self.parameters.items():
            getattr(layer, name).data.copy_(value)
        if layer.track_running_stats:
            layer.running_mean = layer.running_mean.to(TORCH_DTYPES[self.buffers])
            layer.running_var = layer.running_var.to(TORCH_DTYPES[self.buffers])
        return layer

    def check_running(self, layer, running) -> None:
        got = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
        assert all(map(same_bits, got, running))


def check_step(layer, x, dy, expected, what) -> None:
    """Bits, types and layouts of all that a step gives."""
    y = layer(x)
    kept = torch.empty_like(x).stride()
    assert same_bits(y, expected.y) and y.stride() == kept, what
    wanted = {"input": x} | dict(layer.named_parameters())
    wanted = {name: t for name, t in wanted.items() if t.requires_grad}
    assert y.requires_grad == bool(wanted), what
    grads = torch.autograd.grad(y, list(wanted.values()), dy) if wanted else ()
    for name, grad in zip(wanted, grads, strict=True):
        exact = expected.dx if name == "input" else expected.gradients[name]
        assert same_bits(grad, exact), f"{what}, {name}"
        assert name != "input" or grad.stride() == kept, what


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_product_of_options_exact(types, shape):
    """With layouts by turns. PyTorch gives contiguous outputs for permuted inputs; here y and dx
    keep the layout."""
    turns = itertools.count()
    for affine, eps in itertools.product((True, False), (1e-5, 0.0)):
        expected = Expected(shape, types, affine, eps)
        running = {momentum: expected.running(momentum) for momentum in (0.1, None)}
        xs, dys = all_layouts(expected.x), all_layouts(expected.dy)
        # Gradient and input in different layouts, and in the same.
        names = list(xs)
        layouts = [*zip(names, names[1:] + names[:1], strict=True), (names[1], names[1])]
        for (track, momentum), frozen in itertools.product(
            RUNNING, FROZEN if affine else FROZEN[:1]
        ):
            layer = expected.layer(
                eps=eps, momentum=momentum, affine=affine, track_running_stats=track
            )
            for name in frozen:
                getattr(layer, name).requires_grad_(False)
            for needs_input in (True, False):
                layout, other = layouts[next(turns) % len(layouts)]
                what = f"{affine=}, {eps=}, {track=}, {momentum=}, {frozen=}, {layout}, {other}"
                x = xs[layout].detach().requires_grad_(needs_input)
                check_step(layer, x, dys[other], expected, what)
                if track:
                    expected.check_running(layer, running[momentum])
                layer.reset_running_stats()


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_expanded_and_overlapping_inputs_exact(dtype):
    """Elements that share memory give what their copies give. PyTorch, too, returns contiguous
    outputs for them."""
    rng = np.random.default_rng(61)
    small = to_tensor(oracle.round_to(rng.standard_normal((3, 4, 3, 2)), dtype), dtype)
    forms = {
        "samples": small[:1].expand(3, -1, -1, -1),
        "channels": small[:, :1].expand(-1, 4, -1, -1),
        "plane": small[:, :, :1, :1].expand(-1, -1, 3, 2),
        "all": small[:1, :1, :1, :1].expand(3, 4, 3, 2),
        "windows": small.flatten().as_strided((3, 4, 3, 2), (5, 4, 2, 1)),
    }
    for name, x in forms.items():
        assert x.stride() != x.contiguous().stride()
        dy = torch.linspace(-1, 1, 2).to(x.dtype).view(1, 1, 1, 2).expand(3, 4, 3, 2)
        results = []
        for value, upstream in ((x, dy), (x.contiguous(), dy.contiguous())):
            layer = syncbn.SyncBatchNorm(4, dtype=x.dtype)
            leaf = value.detach().requires_grad_()
            y = layer(leaf)
            grads = torch.autograd.grad(y, [leaf, *layer.parameters()], upstream)
            assert y.is_contiguous() and grads[0].is_contiguous()
            results.append((y, *grads, *layer.buffers()))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b), name
        # torch.equal takes NaN for different from itself, so there are none.


CLASSES = {
    (4, 6): nn.BatchNorm1d,
    (4, 6, 5): nn.BatchNorm1d,
    (4, 6, 5, 3): nn.BatchNorm2d,
    (4, 6, 5, 3, 2): nn.BatchNorm3d,
}


@pytest.mark.parametrize("autocast", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", CLASSES, ids=str)
def test_autocast_gives_the_dtypes_of_batch_norm(shape, autocast):
    """y has x's type under autocast, as with nn.BatchNorm*d; so has dx, and float32 parameters get
    float32 gradients. torch.nn.SyncBatchNorm is the same on one rank."""
    for dtype, training in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), (True, False)
    ):
        found = []
        for layer in (syncbn.SyncBatchNorm(6), CLASSES[shape](6)):
            x = torch.randn(shape).to(dtype).requires_grad_()
            with torch.autocast("cpu", dtype=autocast):
                y = layer.train(training)(x)
            y.float().sum().backward()
            tensors = (y, x.grad, layer.weight.grad, layer.bias.grad, *layer.state_dict().values())
            found.append([t.dtype for t in tensors])
        assert found[0] == found[1]


def test_evaluation_with_parameters_and_buffers_of_different_types():
    """PyTorch refuses them: parameters are taken in the buffers' type, which is exact, for its
    operator. float64 input with float32 parameters it refuses here, too."""
    dtype = torch.bfloat16
    mixed, same = new_layer(6, dtype), new_layer(6, dtype).float()
    for layer in (mixed, same):
        layer.running_mean, layer.running_var = torch.linspace(-1, 2, 6), torch.linspace(0.5, 2, 6)
    leaves = [torch.linspace(-3, 3, 360).view(4, 6, 5, 3).to(dtype).requires_grad_() for _ in "ab"]
    ys = [layer.eval()(leaf) for layer, leaf in zip((mixed, same), leaves, strict=True)]
    assert torch.equal(*ys) and ys[0].dtype == dtype
    for y in ys:
        y.float().square().sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    for a, b in zip(mixed.parameters(), same.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad.to(dtype))  # rounded once
    with pytest.raises(RuntimeError, match="share same datatype"):
        same(leaves[0].double())


def test_what_ranks_share_of_the_options_has_a_tag():
    """The call's fingerprint holds it, so that an option is compared as soon as shared() lists it.
    Numbers are compared by their bits in the core."""

    def tag(**options):
        return form_of(0, *Options(**options)).constants[:8].tolist()  # the layer's number

    assert tag() == tag(eps=0) == tag(eps=0.5, momentum=None, inplace=True, affine_grad="global")
    assert tag() != tag(activation="relu") != tag(statistics="welford") != tag()
