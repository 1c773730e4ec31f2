"""Loads the operators and registers their fakes (shapes and dtypes for tracing).

In all of them x is (N, C, *spatial) and k is the number of int64 words per channel:
6 for float16, 19 for bfloat16 and float32, 83 for float64.
"""

import pathlib

import torch

from . import _build

_LIBRARY = pathlib.Path(_build.__file__).parent / "lib" / "libsyncbn_torch_cpu.so"
torch.ops.load_library(_LIBRARY)

ops = torch.ops.syncbn

HEADER_WORDS = 4
_WORDS = {torch.float16: 6, torch.bfloat16: 19, torch.float32: 19, torch.float64: 83}

_fake = torch.library.register_fake


def _message(x: torch.Tensor, frame: int) -> torch.Tensor:
    words = HEADER_WORDS + x.shape[1] * _WORDS[x.dtype]
    return x.new_empty((max(frame, words),), dtype=torch.int64)


@_fake("syncbn::local_moments")
def _(x, layer, call, eps, frame):
    """int64 message [max(frame, 4 + C * k)]: header and exact sums of x and x * x."""
    return _message(x, frame)


@_fake("syncbn::rejection")
def _(like, frame):
    """int64 message [max(frame, 4)] of a rank that refused its input."""
    return like.new_empty((max(frame, HEADER_WORDS),), dtype=torch.int64)


@_fake("syncbn::header")
def _(merged, ranks):
    """int64 [4]: count, ranks agree, some rank refused, dtype of the ranks with data or -1."""
    return merged.new_empty((4,))


@_fake("syncbn::remaining_words")
def _(message, merged, ranks, channels, size):
    """int64 [size]: the words beyond the frame; size -1 (not traceable) takes the group's."""
    return message.new_empty((size,))


@_fake("syncbn::normalize")
def _(x, message, merged, rest, weight, bias, eps, ranks):
    """y like x; mean, var, rstd float64 [C]; info int64 [2]: count and fingerprint."""
    channel = x.new_empty((x.shape[1],), dtype=torch.float64)
    info = x.new_empty((2,), dtype=torch.int64)
    return torch.empty_like(x), channel, channel.clone(), channel.clone(), info


@_fake("syncbn::update_running_statistics")
def _(running_mean, running_var, num_batches_tracked, call, mean, var, info, momentum):
    """Updates the first four in place; a count of 0 leaves all but `call` as they are."""


@_fake("syncbn::local_gradients")
def _(dy, x, info, frame):
    """int64 message as for local_moments, with the sums of dy and dy * x."""
    return _message(x, frame)


def _parameter_gradients(x, *dtypes):
    """[C] each, empty where the dtype is None."""
    return [
        x.new_empty((0 if dtype is None else x.shape[1],), dtype=dtype or torch.float32)
        for dtype in dtypes
    ]


@_fake("syncbn::affine_gradient_shares")
def _(message, x, mean, rstd, weight_dtype, bias_dtype):
    """dweight and dbias of this rank's samples, from the message that it sent."""
    return tuple(_parameter_gradients(x, weight_dtype, bias_dtype))


@_fake("syncbn::input_gradient")
def _(dy, x, merged, rest, mean, rstd, info, weight, weight_dtype, bias_dtype, ranks):
    """dx like x; dweight and dbias of all ranks' samples."""
    return torch.empty_like(x), *_parameter_gradients(x, weight_dtype, bias_dtype)
