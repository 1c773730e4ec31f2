# SPDX-License-Identifier: Apache-2.0
"""all_reduce over the devices of one process; device_cases.py has it over processes."""

import copy

import pytest
import torch

from syncbn.parallel import AllReduce, all_reduce


@pytest.mark.parametrize("dtype", (torch.float64, torch.complex128), ids=str)
def test_gradcheck_of_all_reduce(dtype):
    torch.manual_seed(8)
    xs = [torch.randn(2, 3, dtype=dtype, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *xs: tuple(all_reduce(xs)), xs)
    assert torch.autograd.gradgradcheck(lambda *xs: tuple(all_reduce(xs)), xs)
    assert torch.autograd.gradcheck(all_reduce, xs[0])
    assert torch.autograd.gradcheck(lambda *xs: AllReduce.apply(None, *xs), xs)
    xs += [torch.randn(4, dtype=dtype, requires_grad=True) for _ in range(3)]
    pairs = [xs[k] for k in (0, 3, 1, 4, 2, 5)]
    assert torch.autograd.gradcheck(lambda *xs: AllReduce.apply(2, *xs), pairs)
    assert torch.autograd.gradgradcheck(lambda *xs: AllReduce.apply(2, *xs), pairs)


def test_sums_of_all_reduce_exact():
    xs = [torch.full((2,), 2.0**k) for k in range(5)]
    kept = copy.deepcopy(xs)
    sums = all_reduce(xs)
    assert len(sums) == 5 and all(torch.equal(s, torch.full((2,), 31.0)) for s in sums)
    sums[0].zero_()
    assert torch.equal(sums[1], torch.full((2,), 31.0))  # tensors of their own
    assert all(torch.equal(a, b) for a, b in zip(xs, kept, strict=True))
    assert torch.equal(all_reduce(torch.arange(3)), torch.arange(3))


def test_the_call_of_pytorch_encoding_exact():
    """Of each device some tensors: the sums of the first ones, of the second ones."""
    tensors = [torch.full((k % 2 + 1,), 2.0**k) for k in range(6)]
    expected = [torch.full((1,), 21.0), torch.full((2,), 42.0)] * 3
    assert all(map(torch.equal, AllReduce.apply(2, *tensors), expected))
    assert all(map(torch.equal, AllReduce.apply(6, *tensors), tensors))
    for n in (0, 4):
        with pytest.raises(ValueError, match=f"num_inputs: got {n} for 6 tensors, expected how"):
            AllReduce.apply(n, *tensors)
