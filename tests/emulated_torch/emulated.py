# SPDX-License-Identifier: Apache-2.0
"""What the tests of this folder share. Their arguments are LIBRARY...: the operators, those on the
CPU first."""

import functools
import sys

import torch

for library in sys.argv[1:]:
    torch.ops.load_library(library)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class OnCuda:
    """In the place of torch.ops.syncbn: the kernels that are registered for CUDA, given tensors on
    the CPU."""

    def __getattr__(self, name):
        operator = getattr(torch.ops.syncbn, name).default
        if (
            name.startswith("batch_norm") or name == "form"
        ):  # in Python, of the others; on no device
            return operator
        return functools.partial(operator._op_dk, torch._C.DispatchKey.CUDA)


on_cpu, on_cuda = torch.ops.syncbn, OnCuda()


def random(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_equal(got, expected, what):
    """Equal dtypes, shapes, strides and values; NaN equals NaN, None None."""
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a is None and b is None:
            continue
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride(), (what, i)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=f"{what}, {i}")


def run_checks(functions):
    for name, check in list(functions.items()):
        if name.startswith("check_"):
            check()
            print(name, "passed")
