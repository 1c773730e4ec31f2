# SPDX-License-Identifier: Apache-2.0
"""A process that flushes subnormals, or rounds in another direction, gets the same bits, and keeps
its mode."""

import contextlib

import pytest
import torch

import syncbn
from rank_cases_float_modes import (
    MODES,
    differing,
    float_mode,
    layer_of,
    numbers,
    step,
    step_cases,
)
from support import TORCH_DTYPES, bits


@pytest.fixture(scope="module")
def plain():
    """Of all cases what a step computes without a mode."""
    return [step(layer_of(*case), contextlib.nullcontext(), 0, *case) for case in step_cases()]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_modes_exact(plain, mode):
    failures = []
    for case, expected in zip(step_cases(), plain, strict=True):
        if names := differing(expected, layer_of(*case), case, float_mode(*mode), 0):
            failures.append((*case, names))
    assert not failures, "\n".join(map(str, [len(failures), *failures[:20]]))


def operator(dtype: torch.dtype, mode, training: bool, estimates: bool) -> list[torch.Tensor]:
    x, dy = (numbers(seed, (6, 9, 4, 3), dtype) for seed in (4, 5))
    x.requires_grad_()
    scale, bias, mean, var = (numbers(i, (1, 9), torch.float32)[0] for i in range(4))
    affine = [scale.requires_grad_(), bias.requires_grad_()]
    with mode:
        y, *saved = syncbn.ops.batch_norm(
            *(x, mean, var.abs(), *affine, torch.tensor([3])),
            is_infer=not training, use_global_est=estimates, epsilon=1e-310, momentum=0.9,
        )  # fmt: skip
        gradients = torch.autograd.grad(y, (x, *affine), dy)
    return [t.detach() for t in (y, *saved, *gradients)]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_modes_and_the_operator_exact(mode):
    for dtype in TORCH_DTYPES.values():
        for training, estimates in ((True, False), (True, True), (False, False)):
            arguments = dtype, contextlib.nullcontext(), training, estimates
            expected = operator(*arguments)
            actual = operator(dtype, float_mode(*mode), training, estimates)
            for number, (a, b) in enumerate(zip(expected, actual, strict=True)):
                assert torch.equal(bits(a), bits(b)), (dtype, training, estimates, number)


def test_a_negative_subnormal_number_is_refused_in_each_mode():
    """Flushing would take it for 0."""
    for mode, option in [(m, o) for m in MODES for o in ("eps", "momentum")]:
        with float_mode(*mode), pytest.raises(ValueError, match=f"^{option}: got"):
            syncbn.SyncBatchNorm(3, **{option: -5e-324})
