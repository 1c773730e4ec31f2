# SPDX-License-Identifier: Apache-2.0
"""Between PyTorch tensors and the oracle's arrays; data that breaks ordinary sums; what several
tests compare or run."""

import contextlib
import importlib
import os
import re
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import syncbn
from snippets import blocks
from syncbn.operators import ops

PROJECT = Path(__file__).resolve().parents[3]
TORCH_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
LEVELS = ("reference", "avx2", "avx512", "avx512_bf16", "neon")


def available_levels() -> list[str]:
    """The vector codes that this processor can run."""
    before = ops.cpu_instruction_set()
    levels = [level for level in LEVELS if ops.cpu_instruction_set(level) == level]
    assert ops.cpu_instruction_set(before) == before
    return levels


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, which tell -0.0 from 0.0 and have equal NaNs."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.element_size()])


class Operators(TorchDispatchMode):
    """The operators that run meanwhile, and their arguments."""

    def __enter__(self):
        self.calls = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func._opname, args))
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """float64 array of the same values."""
    return tensor.detach().to(torch.float64).contiguous().numpy()


def to_tensor(values: np.ndarray, dtype: str) -> torch.Tensor:
    """Values that are representable in dtype."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(TORCH_DTYPES[dtype])


def assert_same_bits(actual: torch.Tensor, expected: np.ndarray, what: str) -> None:
    """Equal values, zeros of equal sign, NaN where NaN is."""
    got = to_array(actual)
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    nan = np.isnan(expected)
    same = np.where(
        nan, np.isnan(got), (got == expected) & (np.signbit(got) == np.signbit(expected))
    )
    if not same.all():
        where = tuple(int(i) for i in np.argwhere(~same)[0])
        raise AssertionError(
            f"{what}: {int((~same).sum())} of {same.size} differ, first at {where}: "
            f"got {float(got[where]).hex()}, expected {float(expected[where]).hex()}"
        )


def rough_samples(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Exponents over 60 binades (what fits, for float16) with every sample's negative close by, so
    that sums cancel and plain float64 sums depend on their order."""
    spread = 6 if dtype == "float16" else 30
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-spread, spread + 1, shape))
    flat = values.reshape(shape[0], int(np.prod(shape[1:])))
    half = shape[0] // 2
    flat[half : 2 * half] = -flat[:half] * np.where(rng.random((half, flat.shape[1])) < 0.9, 1, 0.5)
    return to_array(torch.from_numpy(values).to(TORCH_DTYPES[dtype]))


def layouts_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values in contiguous, channels-last and odd strides."""
    rows = tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    # Every second entry of a larger tensor along every axis.
    gaps = torch.zeros([2 * s for s in tensor.shape], dtype=tensor.dtype)
    gaps = gaps[tuple(slice(None, None, 2) for _ in tensor.shape)]
    gaps.copy_(tensor)
    # Channels cut out of a wider tensor, in both layouts.
    wide = torch.zeros(
        [tensor.shape[0], tensor.shape[1] + 3, *tensor.shape[2:]], dtype=tensor.dtype
    )
    slice_of = wide[:, 2 : 2 + tensor.shape[1]].copy_(tensor)
    wide_rows = wide.movedim(1, -1).contiguous().movedim(-1, 1)[:, 2 : 2 + tensor.shape[1]]
    return {
        "contiguous": tensor.contiguous(),
        "channels-last": rows,
        "gaps": gaps,
        "slice": slice_of,
        "channels-last slice": wide_rows,
    }


def new_layer(channels: int, dtype: torch.dtype = torch.float32, **options) -> syncbn.SyncBatchNorm:
    """A layer with a weight and a bias of its own for each channel."""
    layer = syncbn.SyncBatchNorm(channels, dtype=dtype, **options)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-2, 2, channels))
        layer.bias.copy_(torch.linspace(1, 3, channels))
    return layer


def assert_same_layers(a: torch.nn.Module, b: torch.nn.Module) -> None:
    """Equal parameters, buffers and gradients; NaN equals NaN."""
    for (name, p), q in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0, equal_nan=True, msg=name)
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0, equal_nan=True, msg=name)


def raises(error: type | tuple, text: str, function, *args, **options) -> None:
    """The call function(*args, **options) does."""
    try:
        function(*args, **options)
    except error as e:
        assert re.search(text, str(e)), f"{text!r} not in {e}"
        return
    raise AssertionError(f"no {error}")


def unchanged(module: torch.nn.Module, before: dict) -> None:
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} changed"


def train_step(model, x, count=contextlib.nullcontext):
    """Output, input gradient, and what counted the collectives of both directions."""
    # The reentrant form adds to a gradient part by part: what is there would round between.
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    with count() as forward:
        y = model(x)
    with count() as backward:
        y.float().pow(3).sum().backward()
    return y, x.grad, forward, backward


def assert_same_step(model, reference, x, count=contextlib.nullcontext):
    """One step of both has the same bits; returns what counted the collectives of the first."""
    y, dx, *counts = train_step(model, x, count)
    expected, gradient, *_ = train_step(reference, x)
    assert torch.equal(y, expected) and torch.equal(dx, gradient)
    assert_same_layers(model, reference)
    return counts


def assert_near(model: torch.nn.Module, plain: torch.nn.Module) -> None:
    """Of float64; rank_cases_parallel.py derives the bound."""
    for (name, p), q in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-10, atol=1e-10, msg=name)


def join(processes: list, seconds: float) -> None:
    """Waits for all of them, at most so long together, and ends those that are still there."""
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0, until - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join(5)  # one that is stuck in a driver stays


def snippets(page: str) -> list[str]:
    """The Python snippets of a page of the docs, without what it quotes from a file."""
    return [b.text for b in blocks(PROJECT / page) if b.kind == "python" and b.source is None]


def run_snippets(page: str) -> dict:
    """Runs the snippets of a page, one after the other; their names."""
    names: dict = {}
    for snippet in snippets(page):
        exec(compile(snippet, page, "exec"), names)
    return names


def library(name: str) -> types.ModuleType:
    """The module. A test without it is skipped, unless `make interop` says that all are there."""
    if os.environ.get("SYNCBN_INTEROP"):
        return importlib.import_module(name)
    return pytest.importorskip(name)
