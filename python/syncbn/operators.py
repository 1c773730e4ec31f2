# SPDX-License-Identifier: Apache-2.0
"""Loads the operators and registers their fakes (shapes and dtypes for tracing).

In all of them x is (N, C, *spatial) and k is the number of int64 words per channel:
6 for float16, 19 for bfloat16 and float32, 83 for float64. mask is None or contiguous, bool or
uint8, (N, *spatial): where it is 0 an element is left out of sums and count, and y, u and dx are 0.
"""

import pathlib

import torch

from . import _build

_LIBRARY = pathlib.Path(_build.__file__).parent / "lib" / "libsyncbn_torch_cpu.so"
torch.ops.load_library(_LIBRARY)

ops = torch.ops.syncbn

HEADER_WORDS = 8
#: Where a forward's message says who takes part in backward.
HEADER_BACKWARD = 4
#: Words per channel, in the order of the core's DType.
MESSAGE_WORDS = {torch.float16: 6, torch.bfloat16: 19, torch.float32: 19, torch.float64: 83}
DTYPES = tuple(MESSAGE_WORDS)

_fake = torch.library.register_fake


def message_words(x: torch.Tensor, mask: torch.Tensor | None) -> int:
    """How many words an exchange about x is made of; the most of all dtypes if x may have no
    samples, because autocast may have given the other ranks another one."""
    has_samples = x.numel() > 0 and mask is None
    return HEADER_WORDS + x.shape[1] * MESSAGE_WORDS[x.dtype if has_samples else torch.float64]


def record_words(channels: int, dtype: torch.dtype) -> int:
    """How many words a rank's record of the welford mode has behind its header."""
    return 1 + channels * (2 if dtype.itemsize == 8 else 1)


def _message(x: torch.Tensor, frame: int) -> torch.Tensor:
    words = HEADER_WORDS + x.shape[1] * MESSAGE_WORDS[x.dtype]
    return x.new_empty((max(frame, words),), dtype=torch.int64)


@_fake("syncbn::local_moments")
def _(x, layer, call, eps, frame, mask=None, backward=0):
    """int64 message [max(frame, 8 + C * k)]: header and exact sums of x and x * x. backward: a word
    of the header, handed on."""
    return _message(x, frame)


@_fake("syncbn::rejection")
def _(like, frame):
    """int64 message [max(frame, 8)] of a rank that refused its input."""
    return like.new_empty((max(frame, HEADER_WORDS),), dtype=torch.int64)


@_fake("syncbn::header")
def _(merged, ranks):
    """int64 [4]: count, ranks agree, some rank refused, dtype of the ranks with data or -1."""
    return merged.new_empty((4,))


@_fake("syncbn::remaining_words")
def _(message, merged, ranks, channels, size):
    """int64 [size]: the words beyond the frame; size -1 (not traceable) takes the group's."""
    return message.new_empty((size,))


def _statistics(x):
    """mean, var, rstd float64 [C]; info int64 [2]: count and fingerprint."""
    channel = x.new_empty((x.shape[1],), dtype=torch.float64)
    return channel, channel.clone(), channel.clone(), x.new_empty((2,), dtype=torch.int64)


def _activation_mask(x):
    """uint8: room for one bit per element in any layout."""
    samples, channels, *spatial = x.shape
    plane = 1
    for size in spatial:
        plane = plane * size
    by_planes, by_rows = channels * ((plane + 7) // 8), plane * ((channels + 7) // 8)
    return x.new_empty((samples * torch.sym_max(by_planes, by_rows),), dtype=torch.uint8)


def _normalized(x, residual, activation):
    """y like x; statistics; activation mask, empty unless residual and activation are there. rest:
    of the merged message; on CUDA a group whose devices exchange `merged`, this rank's message."""
    kept = residual is not None and activation != 0
    activation_mask = _activation_mask(x) if kept else x.new_empty((0,), dtype=torch.uint8)
    return torch.empty_like(x), *_statistics(x), activation_mask


@_fake("syncbn::forward_outputs")
def _(x, activation_mask):
    """Uninitialized: y like x; statistics; the activation mask, empty unless it is wanted."""
    return list(_normalized(x, x if activation_mask else None, int(activation_mask)))


@_fake("syncbn::normalize")
def _(
    x,
    message,
    merged,
    rest,
    weight,
    bias,
    residual,
    eps,
    ranks,
    activation,
    slope,
    mask=None,
    room=None,
):
    """room: what forward_outputs gave, to be written to."""
    return _normalized(x, residual, activation)


@_fake("syncbn::local_welford")
def _(x, layer, call, eps, mask=None, backward=0):
    """int64 message [8 + n]: header; count, then mean and M2 of each channel, packed."""
    return x.new_empty((HEADER_WORDS + record_words(x.shape[1], x.dtype),), dtype=torch.int64)


@_fake("syncbn::normalize_gathered")
def _(
    x,
    message,
    merged,
    records,
    weight,
    bias,
    residual,
    eps,
    ranks,
    activation,
    slope,
    mask=None,
    room=None,
):
    """As normalize, from all ranks' records of the welford mode; on CUDA from their messages."""
    return _normalized(x, residual, activation)


@_fake("syncbn::normalize_in_place")
def _(x, message, merged, rest, weight, bias, eps, ranks, negative_slope):
    """Statistics; leaky_relu of the normalized values is written over x."""
    return _statistics(x)


@_fake("syncbn::recover_input")
def _(y, mean, rstd, weight, bias, negative_slope):
    """x like y, and the activation mask, from what normalize_in_place wrote."""
    return torch.empty_like(y), _activation_mask(y)


@_fake("syncbn::update_running_statistics")
def _(running_mean, running_var, num_batches_tracked, call, mean, var, info, momentum):
    """Updates the first four in place; a count of 0 leaves all but `call` as they are."""


@_fake("syncbn::local_gradients")
def _(
    dy,
    x,
    mean,
    rstd,
    info,
    weight,
    bias,
    activation_mask,
    activation,
    negative_slope,
    keep,
    frame,
    mask=None,
    twice=False,
):
    """int64 message as for local_moments, with the sums of u and u * x, u being dy come back
    through the activation (by its mask, or, if that is None or empty, by what x gave); u like x,
    empty unless keep. twice: on CUDA a copy of the message follows it."""
    message = _message(x, frame)
    if twice and x.is_cuda:
        message = message.new_empty((2 * message.numel(),))
    return message, torch.empty_like(x) if keep else x.new_empty((0,))


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


@_fake("syncbn::backward_outputs")
def _(x, weight_dtype, bias_dtype):
    """Uninitialized: dx like x; dweight and dbias; three numbers per channel."""
    gradients = _parameter_gradients(x, weight_dtype, bias_dtype)
    return [torch.empty_like(x), *gradients, x.new_empty(3 * x.shape[1], dtype=torch.float64)]


@_fake("syncbn::input_gradient")
def _(
    dy,
    x,
    merged,
    rest,
    mean,
    rstd,
    info,
    weight,
    bias,
    activation_mask,
    activation,
    negative_slope,
    weight_dtype,
    bias_dtype,
    ranks,
    mask=None,
    own=None,
    room=None,
):
    """dx like x; dweight and dbias of all ranks' samples, or, with the message that this rank sent
    as own, of this rank's. room: what backward_outputs gave, to be written to."""
    return torch.empty_like(x), *_parameter_gradients(x, weight_dtype, bias_dtype)
