# SPDX-License-Identifier: Apache-2.0
"""Random shapes, layouts, splits, types and options, every bit against the oracle.

By default the examples are the same in each run, and more in the weekly one. With
SYNCBN_EXAMPLES=1000 in the environment they are others, 1,000 of them; `make soak` draws for as
long as one likes. A failure prints the smallest
example that was found, and a line that repeats it.
"""

import dataclasses
import os

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import oracle
import syncbn
from played import check_played, expect
from rank import Rank
from support import TORCH_DTYPES, assert_same_bits, available_levels, rough_samples, to_tensor
from syncbn.operators import ops

EXAMPLES = int(os.environ.get("SYNCBN_EXAMPLES", "0"))


def examples(number: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=EXAMPLES or number,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


LEVELS = available_levels()
ACTIVATIONS = ("none", "relu", "leaky_relu")
LAYOUTS = ("contiguous", "channels-last", "permuted", "slice", "gaps")


@pytest.fixture(autouse=True)
def _restore():
    level, threads = ops.cpu_instruction_set(), torch.get_num_threads()
    yield
    ops.cpu_instruction_set(level)
    torch.set_num_threads(threads)


@dataclasses.dataclass
class Step:
    """A training step over several ranks; tensors are drawn from `seed`."""

    dtype: str
    shape: tuple[int, ...]
    ranks: list[list[int]]  # the samples of each
    layouts: list[str]  # of x, dy, residual
    expanded: list[int]  # axes along which x repeats one element, with strides of 0
    data: str
    special: bool  # a few values that are not finite
    mask: str | None
    residual: bool
    keep: bool  # the residual's gradient is wanted
    activation: str
    slope: float
    eps: float
    weight: str | None  # its type
    bias: str | None
    level: str
    threads: int
    seed: int


@st.composite
def shapes(draw):
    """2 to 5 axes, at most about 1,500 elements; seldom none, seldom very many channels."""
    channels = draw(st.integers(1, 70) | st.sampled_from((1, 8, 16, 17, 64, 65, 1023, 2048)))
    spatial = draw(st.lists(st.integers(1, 9), max_size=3) | st.sampled_from(([511], [513], [530])))
    while channels * int(np.prod(spatial)) > 2048:
        channels = (channels + 1) // 2
    most = max(1, 1500 // (channels * int(np.prod(spatial))))
    samples = draw(st.integers(0, min(most, 30)))
    return (samples, channels, *spatial)


@st.composite
def steps(draw):
    shape = draw(shapes())
    ranks = draw(st.integers(1, 4))
    where = draw(st.lists(st.integers(0, ranks - 1), min_size=shape[0], max_size=shape[0]))
    order = draw(st.permutations(range(shape[0])))
    parameter = st.none() | st.sampled_from(tuple(TORCH_DTYPES))
    residual = draw(st.booleans())
    return Step(
        dtype=draw(st.sampled_from(tuple(TORCH_DTYPES))),
        shape=shape,
        ranks=[[n for n in order if where[n] == rank] for rank in range(ranks)],
        layouts=[draw(st.sampled_from(LAYOUTS)) for _ in range(3)],
        expanded=draw(st.just([]) | st.lists(st.integers(0, len(shape) - 1), unique=True)),
        data=draw(st.sampled_from(("rough", "offset", "constant"))),
        special=draw(st.integers(0, 5)) == 0,
        mask=draw(st.none() | st.sampled_from(("elements", "samples", "nothing"))),
        residual=residual,
        keep=residual and draw(st.booleans()),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        slope=draw(st.sampled_from((0.01, -0.5, 0.0, 1.0))),
        eps=draw(st.sampled_from((1e-5, 0.0, 1e-3))),
        weight=draw(parameter),
        bias=draw(parameter),
        level=draw(st.sampled_from(LEVELS)),
        threads=draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


class Data:
    """The arrays of a step, whole batches."""

    def __init__(self, step: Step):
        rng = np.random.default_rng(step.seed)
        shape, dtype = step.shape, step.dtype
        self.x = rough_samples(rng, shape, dtype)
        if step.data == "offset":
            self.x = oracle.round_to(1e4 + rng.standard_normal(shape), dtype)
        elif step.data == "constant":
            self.x = oracle.round_to(np.full(shape, -0.3), dtype)
        if self.x.size:
            for axis in step.expanded:
                self.x = np.repeat(self.x.take([0], axis), shape[axis], axis)
        self.dy, self.residual = (rough_samples(rng, shape, dtype) for _ in range(2))
        if step.special and self.x.size:
            values = rng.choice([np.nan, np.inf, -np.inf, -0.0, 1e30, 2.0**-149, -65504.0], 3)
            of = self.dy if step.expanded or rng.random() < 0.5 else self.x
            of.reshape(-1)[rng.integers(0, of.size, 3)] = oracle.round_to(values, dtype)
        self.mask = None
        if step.mask is not None:
            chance = {"elements": 0.6, "samples": 0.5, "nothing": 0.0}[step.mask]
            size = (shape[0], *shape[2:]) if step.mask == "elements" else shape[:1]
            kept = rng.random(size) < chance
            kept = kept.reshape(size + (1,) * (len(shape) - 1 - len(size)))
            self.mask = np.broadcast_to(kept, (shape[0], *shape[2:])).copy()
        self.weight, self.bias = (
            None if kind is None else oracle.round_to(rng.uniform(-2, 2, shape[1]), kind)
            for kind in (step.weight, step.bias)
        )
        self.seed = int(rng.integers(0, 2**31))


def parts(values, step):
    """One array per rank, or None."""
    return None if values is None else [values[samples] for samples in step.ranks]


def placed(values, dtype, layout, rng, expanded=()):
    """A tensor of these values in a layout of its own, nothing but rubbish around them."""
    tensor = to_tensor(values, dtype)
    if expanded and tensor.numel():
        for axis in expanded:
            tensor = tensor.narrow(axis, 0, 1)
        return tensor.expand(values.shape)
    axes = list(range(tensor.dim()))
    if layout == "channels-last":
        axes = [0, *axes[2:], 1]
    elif layout == "permuted":
        axes = rng.permutation(tensor.dim()).tolist()
    tensor = tensor.permute(axes).contiguous()
    if layout in ("slice", "gaps"):
        step = 2 if layout == "gaps" else 1
        wide = torch.full([step * s + 3 for s in tensor.shape], torch.nan, dtype=tensor.dtype)
        window = wide[tuple(slice(1, 1 + step * s, step) for s in tensor.shape)]
        tensor = window.copy_(tensor)
    return tensor.permute(np.argsort(axes).tolist())


def tensors_of(step, data, rng):
    """x, dy, residual and mask, each a list of the ranks' own or None."""
    xs = [placed(x, step.dtype, step.layouts[0], rng, step.expanded) for x in parts(data.x, step)]
    dys = [placed(dy, step.dtype, step.layouts[1], rng) for dy in parts(data.dy, step)]
    zs = None
    if step.residual:
        zs = [placed(z, step.dtype, step.layouts[2], rng) for z in parts(data.residual, step)]
    masks = None if data.mask is None else [torch.tensor(m) for m in parts(data.mask, step)]
    return xs, dys, zs, masks


def oracle_step(step, data, parameter_dtype="float64"):
    fused = {
        "weight": data.weight,
        "bias": data.bias,
        "residuals": parts(data.residual, step) if step.residual else None,
        "activation": step.activation,
        "slope": step.slope,
        "masks": parts(data.mask, step),
    }
    xs, dys = parts(data.x, step), parts(data.dy, step)
    forward = oracle.forward(xs, step.dtype, eps=step.eps, **fused)
    backward = oracle.backward(
        dys, xs, step.dtype, forward, parameter_dtype=parameter_dtype, **fused
    )
    return forward, backward


def operators_on_ranks(step):
    """Dtypes of parameters are mixed at will."""
    data = Data(step)
    forward, backward = oracle_step(step, data)
    assert ops.cpu_instruction_set(step.level) == step.level
    torch.set_num_threads(step.threads)
    rng = np.random.default_rng(data.seed)
    kind, count = ACTIVATIONS.index(step.activation), len(step.ranks)
    xs, dys, zs, masks = tensors_of(step, data, rng)
    zs, masks = ([None] * count if t is None else t for t in (zs, masks))
    weight = None if step.weight is None else to_tensor(data.weight, step.weight)
    bias = None if step.bias is None else to_tensor(data.bias, step.bias)

    options = {"eps": step.eps, "kind": kind, "slope": step.slope}
    ranks = [Rank(x, weight, bias, z, m, **options) for x, z, m in zip(xs, zs, masks)]
    check_played(ranks, dys, forward, backward, (torch.float64,) * 2, step.keep)


def layer_on_devices(step, momentum, affine, track, affine_grad):
    """The layer, its ranks devices of one process; also its buffers, after two equal steps."""
    parameters = step.weight or "float32"
    if parameters not in ("float32", step.dtype):
        parameters = step.dtype
    step.weight = step.bias = parameters if affine else None
    data = Data(step)
    forward, backward = oracle_step(step, data, parameters)
    assert ops.cpu_instruction_set(step.level) == step.level
    torch.set_num_threads(step.threads)
    rng = np.random.default_rng(data.seed)
    layer = syncbn.SyncBatchNorm(
        step.shape[1],
        step.eps,
        momentum,
        affine,
        track,
        dtype=TORCH_DTYPES[parameters],
        affine_grad=affine_grad,
        activation=step.activation,
        negative_slope=step.slope,
    )
    if affine:
        layer.weight.data.copy_(torch.from_numpy(data.weight))
        layer.bias.data.copy_(torch.from_numpy(data.bias))
    running = np.zeros(step.shape[1]), np.ones(step.shape[1]), 0
    for _ in range(2):
        layer.zero_grad()
        xs, dys, zs, masks = tensors_of(step, data, rng)
        xs = [x.detach().requires_grad_() for x in xs]
        zs = zs and [z.detach().requires_grad_(step.keep) for z in zs]
        alone = len(xs) == 1
        arguments = [v if v is None or not alone else v[0] for v in (xs, zs, masks)]
        if forward.count == 1:
            with pytest.raises(ValueError, match="more than 1 value per channel"):
                layer(*arguments)
            break
        ys = layer(*arguments)
        ys = [ys] if alone else ys
        torch.autograd.backward(ys, dys)
        expect(ys, forward.ys, "y")
        expect([x.grad for x in xs], backward.dxs, "dx")
        if step.keep:
            expect([z.grad for z in zs], backward.dresiduals, "the residual's gradient")
        if affine:
            assert_same_bits(layer.weight.grad, backward.dweight, "dweight")
            assert_same_bits(layer.bias.grad, backward.dbias, "dbias")
        running = oracle.update_running(*running, forward, momentum, parameters)
    if track:
        assert_same_bits(layer.running_mean, running[0], "running_mean")
        assert_same_bits(layer.running_var, running[1], "running_var")
        assert layer.num_batches_tracked == running[2]


ON_RANKS = hypothesis.given(steps())
ON_DEVICES = hypothesis.given(
    steps(),
    st.sampled_from((0.1, None, 0.0, 1.0)),
    st.booleans(),
    st.booleans(),
    st.sampled_from(("share", "global")),
)
test_operators_on_ranks_exact = examples(120)(ON_RANKS(operators_on_ranks))
test_layer_on_devices_exact = examples(120)(ON_DEVICES(layer_on_devices))
test_many_operators_on_ranks_exact = pytest.mark.weekly(
    examples(1000)(ON_RANKS(operators_on_ranks))
)
test_many_layers_on_devices_exact = pytest.mark.weekly(examples(1000)(ON_DEVICES(layer_on_devices)))
