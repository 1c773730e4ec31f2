# SPDX-License-Identifier: Apache-2.0
"""What a run launches: kernels of the library, on the emulation, and those of PyTorch."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NOTHING = {"empty", "empty_like", "new_empty", "empty_strided", "detach"}
# Errors have the number of the call, if the counter is on the CPU; one on a GPU is not read.
NOTHING |= {"_local_scalar_dense"}


class OtherKernels(TorchDispatchMode):
    """PyTorch's operators that would launch something."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.partition("::")[2]
        result = function(*args, **(kwargs or {}))
        empty = isinstance(result, torch.Tensor) and result.numel() == 0
        own = function.namespace == "syncbn"
        if not (own or function.is_view or name in NOTHING or empty):
            self.names.append(name)
        return result


def counted(run, argument):
    """(What it gives, kernels of the library, PyTorch's)."""
    before = torch.ops.syncbn_emulated.launches()
    with OtherKernels() as others:
        result = run(argument)
    return result, torch.ops.syncbn_emulated.launches() - before, others.names
