# SPDX-License-Identifier: Apache-2.0
"""Loads the operators of a step.

forward_begin takes sums of x and goes as far as its way lets it: to the end, or to a message that
the ranks have to add up. forward_finish makes the rest of the sum. backward_begin and
backward_finish do the same of the gradient. In all of them x is (N, C, *spatial) and a message has
8 words and, for each channel, 6 words for float16, 19 for bfloat16 and float32, 83 for float64.
mask is None or contiguous, bool or uint8, (N, *spatial): where it is 0 an element is left out of
sums and count, and y, u and dx are 0. bindings/torch/forward_ops.hpp and
backward_ops.hpp have what they give.
"""

import contextlib
import pathlib

import torch
from torch._C import _len_torch_dispatch_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from . import _build

_LIBRARIES = pathlib.Path(_build.__file__).parent / "lib"
torch.ops.load_library(_LIBRARIES / "libsyncbn_torch_cpu.so")

ops = torch.ops.syncbn

_as_it_is = contextlib.nullcontext()


def without_modes() -> contextlib.AbstractContextManager:
    """Gives a context in which modes of the caller's, such as one that makes tensors fake, see
    nothing. Where there are none, as mostly, entering it takes no time."""
    if _len_torch_dispatch_stack() == 0 and _len_torch_dispatch_stack_pre_dispatch() == 0:
        return _as_it_is
    return _disable_current_modes()


with without_modes():
    _numbers = ops.constants()
(
    #: How far a begin goes; 0 and more are the numbers of groups in shared memory, over which it
    #: goes to the end. ALONE does so for one rank; MESSAGE stops at the message, FRAMED at one of
    #: FRAME_WORDS words or more; OWN is a backward without an exchange.
    ALONE, MESSAGE, FRAMED, OWN,
    #: What a backward's begin is asked for: the gradient that comes back through the activation;
    #: gradients of weight and bias of this rank's samples.
    WANTS_U, WANTS_SHARE,
    #: Statuses of an operator of a group in shared memory.
    DONE, PENDING, TIMEOUT, LOST, DIVERGED, UNCHECKED, NO_MEMORY,
    #: Words of a message in front of its channels', and words of the first message over Gloo.
    HEADER_WORDS, FRAME_WORDS,
    #: Where a message says, as REJECTED, that a rank raised an error, and a forward's who takes
    #: part in backward.
    HEADER_FLAGS, HEADER_BACKWARD, REJECTED,
    MAX_RANKS,
    #: Milliseconds that an operator waits in shared memory before Python looks for signals.
    SLICE,
    *_words,
) = _numbers  # fmt: skip
#: Counters of ranks in the header's word about backward: of those that want the gradient of x, of
#: those that want the global gradients of weight and bias, and of those that can come.
_COUNTER = 2 * MAX_RANKS
WANTS_X, WANTS_SUMS, COMES = 1, _COUNTER, _COUNTER**2
#: Words per channel, in the order of the core's DType.
MESSAGE_WORDS = dict(
    zip((torch.float16, torch.bfloat16, torch.float32, torch.float64), _words, strict=True)
)
DTYPES = tuple(MESSAGE_WORDS)


def message_words(channels: int, dtype: torch.dtype, records: int = 0) -> int:
    """Tells how many words a message has. records: of how many ranks it has room for in the welford
    mode; 0: it is of the other mode."""
    if records == 0:
        return HEADER_WORDS + channels * MESSAGE_WORDS[dtype]
    return HEADER_WORDS + records * (1 + channels * (2 if dtype.itemsize == 8 else 1))


def saved_of(x: torch.Tensor) -> torch.Tensor:
    """Gives a new tensor for what a forward knows of its batch: float64 [3 C + 2]: mean, biased
    variance and rstd, then as int64 the count over all ranks (-1 where ranks disagreed on CUDA) and
    the call's fingerprint."""
    return x.new_empty((3 * x.shape[1] + 2,), dtype=torch.float64)


def info_of(saved: torch.Tensor) -> torch.Tensor:
    """Gives count and fingerprint, int64 [2], of what a forward saved."""
    return saved[-2:].view(torch.int64)


def activation_mask_of(x):
    """Gives a new tensor with room for one bit per element in any layout: uint8."""
    samples, channels, *spatial = x.shape
    plane = 1
    for size in spatial:
        plane = plane * size
    by_planes, by_rows = channels * ((plane + 7) // 8), plane * ((channels + 7) // 8)
    return x.new_empty((samples * torch.sym_max(by_planes, by_rows),), dtype=torch.uint8)


@torch.library.register_fake("syncbn::update_running_statistics")
def _(running_mean, running_var, num_batches_tracked, saved, momentum):
    """Updates the first three in place, by what a forward saved; a count of 0 leaves them as they
    are. momentum None: cumulative averaging by num_batches_tracked."""


_cuda_loaded = False


def why_not_cuda() -> str | None:
    """Says why the operators on CUDA cannot be used; None if they can."""
    if _build.cuda_version is None:
        return "this build has no CUDA library"
    if not torch.backends.cuda.is_built():
        return "this PyTorch is for CPU only"
    if torch.version.cuda is None or _major(torch.version.cuda) != _major(_build.cuda_version):
        return (
            f"it was built with CUDA {_build.cuda_version}, and this PyTorch is for "
            f"{'CUDA ' + torch.version.cuda if torch.version.cuda else 'another kind of GPU'}"
        )
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    return None


def _major(version: str) -> str:
    return version.partition(".")[0]


def _remedy() -> str:
    """Gives what to do about why_not_cuda()."""
    if _build.cuda_version is not None and torch.version.cuda is None:
        return "install a PyTorch for CUDA"
    wanted = _major(torch.version.cuda or "12")
    text = (
        f"build it again with CUDA {wanted}: nvcc on PATH, or CUDA_HOME set, and "
        "`SYNCBN_CUDA=ON pip install .` beside this PyTorch"
    )
    if _build.cuda_version is None:
        return text
    if _major(_build.cuda_version) != wanted:
        return f"{text}; or install a PyTorch for CUDA {_major(_build.cuda_version)}"
    return "see torch.cuda.is_available(), which needs a driver and a visible device"


@torch.compiler.assume_constant_result
def load_cuda() -> None:
    """Loads the operators on CUDA, once, at the first tensor there: the CPU needs nothing of them.
    Raises RuntimeError: why that cannot be, and what to do."""
    global _cuda_loaded
    if _cuda_loaded:
        return
    reason = why_not_cuda()
    if reason is not None:
        raise RuntimeError(f"syncbn cannot work on CUDA: {reason}; {_remedy()}")
    torch.ops.load_library(_LIBRARIES / "libsyncbn_torch_cuda.so")
    _cuda_loaded = True
