# SPDX-License-Identifier: Apache-2.0
"""Modes of a process's floating-point arithmetic, which change no bit: test_float_modes.py runs
these steps on one rank, test_distributed.py on several, of which one has the mode."""

import contextlib
import ctypes
import itertools

import torch
from torch.utils.checkpoint import checkpoint

import syncbn
from support import TORCH_DTYPES, bits
from syncbn.step.options import STATISTICS

#: fesetround's numbers on x86-64: down, up, toward zero.
ROUNDING = {"nearest": 0, "down": 0x400, "up": 0x800, "toward zero": 0xC00}
MODES = [(flush, name) for name in ROUNDING for flush in (False, True)][1:]

_libm = ctypes.CDLL("libm.so.6")


@contextlib.contextmanager
def float_mode(flush: bool, rounding: str):
    """Of the calling thread, for the block."""
    assert torch.set_flush_denormal(flush) and _libm.fesetround(ROUNDING[rounding]) == 0
    try:
        yield
        assert _libm.fegetround() == ROUNDING[rounding], "the layer changed the rounding mode"
        tiny = torch.full((1,), torch.finfo(torch.float32).smallest_normal) * 0.5
        assert bool(tiny.view(torch.int32).any()) is not flush, "the layer changed the mode"
    finally:
        torch.set_flush_denormal(False)
        _libm.fesetround(0)


def numbers(seed: int, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    """A third of them subnormal, and some channels of them alone."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    tiny = torch.finfo(dtype).smallest_normal
    small = torch.rand(shape, generator=generator) < 1 / 3
    small[:, ::4] = True
    return torch.where(small, values * 0.25 * tiny, values).to(dtype)


SHAPES = {"planes": (6, 9, 4, 3), "rows": (6, 9, 4, 3), "odd": (6, 9, 5), "flat": (40, 17)}


def shape_of(layout: str) -> tuple[int, ...]:
    return (2, 64, 128, 128) if layout == "large" else SHAPES[layout]


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "rows":
        return x.contiguous(memory_format=torch.channels_last)
    return torch.stack((x, x), -1)[..., 0] if layout == "odd" else x


def step_cases():
    """(Name, options, and the kind of data and call) of each."""
    activations = [("none", 0.01), ("relu", 0.01), ("leaky_relu", 0.1), ("leaky_relu", 1e-40)]
    for dtype, layout in itertools.product(TORCH_DTYPES, SHAPES):
        for (activation, slope), residual in itertools.product(activations, (False, True)):
            options = {"activation": activation, "negative_slope": slope}
            yield options, dtype, layout, {"residual": residual, "mask": residual != (slope > 0.01)}
    for dtype in TORCH_DTYPES:
        some = {"activation": "leaky_relu", "negative_slope": 0.3}
        yield some | {"eps": 5e-324}, dtype, "planes", {"parameters": dtype}
        yield some | {"momentum": None}, dtype, "planes", {"batches": torch.tensor(6)}
        yield some | {"momentum": None}, dtype, "planes", {"batches": torch.tensor(2.5)}
        yield some | {"affine_grad": "global"}, dtype, "rows", {"parameters": dtype}
        yield some | {"inplace": True}, dtype, "planes", {}
        yield some | {"statistics": "welford"}, dtype, "planes", {"residual": True}
        yield some, dtype, "planes", {"checkpointed": True}
        yield some | {"activation": "relu"}, dtype, "rows", {"devices": 2}
    yield {"activation": "relu"}, "float32", "large", {}


def layer_of(options: dict, dtype: str, layout: str, how: dict) -> syncbn.SyncBatchNorm:
    channels = shape_of(layout)[1]
    layer = syncbn.SyncBatchNorm(channels, **options)
    with torch.no_grad():
        for seed, name in enumerate(("weight", "bias", "running_mean", "running_var")):
            getattr(layer, name).copy_(numbers(seed, (1, channels), torch.float32)[0])
        layer.running_var.abs_()
        if options.get("inplace"):  # which refuses small weights
            layer.weight.fill_(0.7)
            layer.bias.fill_(0.3)
    layer.to(TORCH_DTYPES[how.get("parameters", "float32")])
    if "batches" in how:
        layer.num_batches_tracked = how["batches"].clone()
    return layer


def step(layer, mode, rank: int, options: dict, dtype: str, layout: str, how: dict) -> list:
    """All that a training step computes."""
    kind, shape = TORCH_DTYPES[dtype], shape_of(layout)
    x, dy, z = (laid_out(numbers(4 + 3 * rank + i, shape, kind), layout) for i in range(3))
    mask = None
    if how.get("mask"):
        mask = torch.rand((shape[0], *shape[2:]), generator=torch.Generator().manual_seed(3)) < 0.8
    x.requires_grad_()
    z = z.requires_grad_() if how.get("residual") else None
    wanted = [t for t in (x, layer.weight, layer.bias, z) if t is not None]
    given = x.clone() if options.get("inplace") else x
    with mode:
        if "devices" in how:
            y = torch.cat(layer(list(given.chunk(how["devices"]))))
        elif "checkpointed" in how:
            y = checkpoint(layer, given, use_reentrant=False)
        else:
            y = layer(given, z, mask=mask)
        gradients = torch.autograd.grad(y, wanted, dy)
    return [y.detach(), *gradients, *layer.buffers()]


def differing(expected: list, layer, case: tuple, mode, rank: int) -> list[str]:
    """Names of what has other bits than expected, of a step in that mode; exact."""
    actual = step(layer, mode, rank, *case)
    names = ["y", "dx", "dweight", "dbias", "dresidual"][: 5 if case[3].get("residual") else 4]
    names += ["running mean", "running var", "batches"]
    pairs = zip(names, expected, actual, strict=True)
    return [name for name, a, b in pairs if not torch.equal(bits(a), bits(b))]


def case_one_rank_with_a_mode_exact(rank, world):
    failures = []
    cases = list(step_cases())
    # Together, so that one search finds their paths.
    layers = torch.nn.ModuleList(layer_of(*case) for case in cases for _ in range(2))
    for number, case in enumerate(cases):
        mode, two = MODES[number % len(MODES)], layers[2 * number : 2 * number + 2]
        expected = step(two[0], contextlib.nullcontext(), rank, *case)
        context = float_mode(*mode) if rank == number % world else contextlib.nullcontext()
        if names := differing(expected, two[1], case, context, rank):
            failures.append((mode, *case, names))
    assert not failures, "\n".join(map(str, [len(failures), *failures[:20]]))


def case_modes_and_the_options_that_ranks_share(rank, world):
    """A number that flushing would make 0, and -0.0, which is 0 in each rounding mode."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    zero = -0.0 if rank == 0 else 0.0
    options = [{"eps": eps, "statistics": s} for eps in (5e-324, zero) for s in STATISTICS]
    options += [{"activation": "leaky_relu", "negative_slope": s} for s in (5e-324, zero)]
    layers = torch.nn.ModuleList(syncbn.SyncBatchNorm(3, **o) for o in options for _ in MODES)
    for layer, mode in zip(layers, MODES * len(options)):
        with float_mode(*mode) if rank == world - 1 else contextlib.nullcontext():
            layer(x)
