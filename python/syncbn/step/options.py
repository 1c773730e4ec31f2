# SPDX-License-Identifier: Apache-2.0
"""The options of a layer, and the checks of what it is given."""

import functools
import math
import numbers
import struct
import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..exchange.call import tag_of
from ..operators import DTYPES, load_cuda, ops, without_modes

AffineGrad = Literal["share", "global"]
Statistics = Literal["reproducible", "welford"]  # in the order of the core's Statistics
ActivationName = Literal["none", "relu", "leaky_relu"]

AFFINE_GRADS: tuple[AffineGrad, ...] = get_args(AffineGrad)
STATISTICS: tuple[Statistics, ...] = get_args(Statistics)
#: What training updates, by name.
RUNNING = ("running_mean", "running_var", "num_batches_tracked")
#: Of the core: that of the words of a message.
_MOST_CHANNELS = 2**31
#: Of the core.
_MOST_AXES = 12
_LARGEST = torch.finfo(torch.float32).max


class Activation(NamedTuple):
    """The end of a layer. Where it does not hand its input on, it multiplies by a slope."""

    number: int  #: of the core's ActivationKind
    slope: float | None  #: None: the option negative_slope
    function: Callable[..., Tensor]  #: PyTorch's; with the option negative_slope as an argument
    module: Callable[..., nn.Module]  #: the same as a module


ACTIVATIONS: dict[ActivationName, Activation] = {
    "none": Activation(0, 1.0, lambda y: y, nn.Identity),
    "relu": Activation(1, 0.0, F.relu, nn.ReLU),
    "leaky_relu": Activation(2, None, F.leaky_relu, nn.LeakyReLU),
}


def activation_of(name: ActivationName) -> Activation:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation: got {name!r}, expected one of {tuple(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class Options(NamedTuple):
    """The constants over the calls of a layer. sync False: no exchange."""

    sync: bool = True
    eps: float = 1e-5
    momentum: float | None = 0.1
    affine_grad: AffineGrad = "share"
    activation: ActivationName = "none"
    negative_slope: float = 0.01
    statistics: Statistics = "reproducible"
    inplace: bool = False

    def shared(self) -> dict[str, object]:
        """Gives those that ranks must have in common, by name."""
        own: dict[str, object] = {
            "eps": self.eps,
            "statistics": self.statistics,
            "activation": self.activation,
        }
        if activation_of(self.activation).slope is None:
            own["negative_slope"] = self.negative_slope
        return own

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.shared().items())

    @property
    def writes_over_input(self) -> bool:
        return self.inplace and self.activation != "none"


#: What a plain layer has not, in the order of texts; with its defaults.
ADDED_OPTIONS: dict[str, Any] = {
    name: Options._field_defaults[name]
    for name in ("affine_grad", "activation", "negative_slope", "sync", "statistics", "inplace")
}


def values_per_channel(x: Tensor, mask: Tensor | None) -> int:
    """Counts them in the input; 0 with a mask, which is not read for it."""
    return x.shape[0] * math.prod(x.shape[2:]) if mask is None else 0


def is_strided(x: object) -> TypeGuard[Tensor]:
    """Tells whether it is a tensor with one stride per axis."""
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested


def check_strided(name: str, x: object) -> None:
    if not is_strided(x):
        got = f"a tensor of layout {x.layout}" if isinstance(x, Tensor) else type(x).__name__
        got = "a nested tensor" if isinstance(x, Tensor) and x.is_nested else got
        raise ValueError(f"{name}: got {got}, expected a tensor with strides")


def check_plain(alone: bool, **tensors: Tensor | None) -> None:
    """Refuses a tensor of a class that decides itself about each operator, if it takes none of this
    package, or if other ranks would get a message of that class."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
            continue
        cause = None
        if alone:
            try:
                ops.header(tensor.detach(), 1)  # a small one
                continue
            except Exception as error:
                if str(error).startswith("merged: "):  # it came to the operator, which refused it
                    continue
                cause = error
        what = "does not take this package's operators" if alone else "cannot be exchanged"
        raise ValueError(
            f"{name}: got a {type(tensor).__name__}, which {what}, expected a plain tensor"
        ) from cause


def check_like_input(name: str, tensor: Tensor, x: Tensor) -> None:
    check_strided(name, tensor)
    if tensor.shape != x.shape or tensor.dtype != x.dtype or tensor.device != x.device:
        raise ValueError(
            f"{name}: got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}, "
            f"expected the input's {x.dtype}, {tuple(x.shape)} and {x.device}"
        )


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float, numbers.Real)) and not isinstance(value, bool)


def _is_from_0_to(most: float, value: Any) -> bool:
    """Tells whether it is such a number, by its bits, if need be: a process that flushes subnormals
    takes them for 0. Compilers do not know the bits."""
    if not (is_number(value) and 0 <= value <= most):
        return False
    if value > 0 or torch.compiler.is_compiling():
        return True
    return struct.pack(">d", value) <= struct.pack(">d", -0.0)


def check_options(options: Options) -> None:
    """Raises an error that names the option, what was given and what is allowed."""
    if not _is_from_0_to(sys.float_info.max, options.eps):
        raise ValueError(f"eps: got {options.eps!r}, expected a finite number of at least 0")
    momentum = options.momentum
    if momentum is not None and not _is_from_0_to(1.0, momentum):
        raise ValueError(f"momentum: got {momentum!r}, expected a number in [0, 1], or None")
    activation = activation_of(options.activation)
    for name, allowed in (("affine_grad", AFFINE_GRADS), ("statistics", STATISTICS)):
        value = getattr(options, name)
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{name}: got {value!r}, expected one of {allowed}")
    for name in ("sync", "inplace"):
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name}: got {value!r}, expected True or False")
    if not (is_number(options.negative_slope) and abs(options.negative_slope) <= _LARGEST):
        raise ValueError(
            f"negative_slope: got {options.negative_slope!r}, expected a finite number of float32"
        )
    if not options.inplace:
        return
    if activation.slope is not None and options.activation != "none":
        raise ValueError(
            f"inplace: got True with {options.activation}, from whose output the input cannot be "
            "recovered; expected leaky_relu"
        )
    if options.statistics != "reproducible":
        raise ValueError(
            f"inplace: got True with statistics={options.statistics!r}, expected False"
        )
    if activation.slope is None and not 2**-10 <= options.negative_slope <= 2**10:
        raise ValueError(
            f"negative_slope: got {options.negative_slope} with inplace=True, expected a number in "
            "[2^-10, 2^10]"
        )


class Form(NamedTuple):
    """The options as a step takes them. acts: it ends with an activation. gathers: statistics are
    merged from records. in_place: y lies over x. shares: gradients of parameters are this rank's
    shares. constants: what the operators take of them."""

    acts: bool
    gathers: bool
    in_place: bool
    shares: bool
    constants: Tensor


@functools.lru_cache(maxsize=1024, typed=True)
def form_of(number: int, *options: Any) -> Form:
    """Gives the form of a step of the layer of that number with these Options, which it checks."""
    own = Options(*options)
    check_options(own)
    # Without numbers: the core compares their bits, which modes of the process change here.
    common = [(k, v) for k, v in own.shared().items() if not is_number(v)]
    activation, mode = activation_of(own.activation), STATISTICS.index(own.statistics)
    with without_modes(), torch.inference_mode(False):
        constants = ops.form(
            layer=number ^ tag_of(*common),
            eps=own.eps,
            momentum=own.momentum,
            activation=activation.number,
            negative_slope=own.negative_slope,
            statistics=mode,
            in_place=own.writes_over_input,
        )
    shares = own.affine_grad == "share"
    return Form(activation.number > 0, mode > 0, own.writes_over_input, shares, constants)


#: Largest error of a recovered input, in standard deviations, at one deviation from the mean.
RECOVERY_LIMIT = 2**-7


def recovery_bound(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, negative_slope: float
) -> float:
    """Gives the bound of the error of an input that backward recovers from an in-place output, at
    one standard deviation from the mean and in units of it: k (1 + |bias / weight|) + underflow
    with k = 11 u32 + u and underflow = eta / (min(1, slope) |weight|) (docs/options.md), the
    largest of all channels."""
    info = torch.finfo(x.dtype)
    unit = info.eps / 2
    factor = 11 * min(unit, 2.0**-24) + unit
    underflow = info.smallest_normal * info.eps / 2 / min(1.0, negative_slope)
    if x.shape[1] == 0:
        return 0.0
    shift = x.new_zeros(1, dtype=torch.float64) if bias is None else bias.detach().double().abs()
    scale = x.new_ones(1, dtype=torch.float64) if weight is None else weight.detach().double().abs()
    bound = factor * (1 + shift / scale) + underflow / scale
    # Below this the scale, a weight by 1 / deviation, and its reciprocal may leave binary32.
    return float(bound.masked_fill(scale < 2.0**-40, math.inf).max())


def check_in_place(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    negative_slope: float,
) -> None:
    if residual is not None:
        raise ValueError("inplace: got True with a residual, expected False")
    if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
        raise ValueError(
            "input: got a leaf that requires a gradient with inplace=True, expected an "
            "intermediate result"
        )
    if x._is_view():
        raise ValueError("input: got a view of another tensor with inplace=True, expected none")
    if not (x.numel() == 0 or x.is_contiguous() or x.movedim(1, -1).is_contiguous()):
        raise ValueError(
            f"input: got strides {x.stride()} with inplace=True, expected contiguous or "
            "channels-last memory"
        )
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # the bound is a number on the device
    bound = recovery_bound(x, weight, bias, negative_slope)
    if not bound <= RECOVERY_LIMIT:
        raise ValueError(
            f"weight: got entries so small, alone or beside the bias, that backward would recover "
            f"the input with an error of up to {bound:.2g} standard deviations, expected at most "
            f"{RECOVERY_LIMIT:.2g}; use inplace=False"
        )


def check_counter(
    momentum: float | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    traced: bool = False,
) -> None:
    """Checks the number of batches, which averaging divides by. traced: it has no value."""
    tracked = num_batches_tracked
    reference = running_var if running_mean is None else running_mean
    if tracked is None:
        if momentum is None and reference is not None:
            raise ValueError(
                "momentum: got None without num_batches_tracked, expected a number in [0, 1]"
            )
        return
    check_strided("num_batches_tracked", tracked)
    device = tracked.device if reference is None else reference.device
    known = tracked.dtype == torch.int64 or tracked.is_floating_point()
    if not known or tracked.numel() != 1 or tracked.device != device:
        raise ValueError(
            f"num_batches_tracked: got {tracked.dtype} of shape {tuple(tracked.shape)} on "
            f"{tracked.device}, expected one torch.int64, or a floating-point average, on {device}"
        )
    check_written("num_batches_tracked", tracked)
    # On a GPU nobody waits for the number.
    if device.type == "cpu" and not traced:
        if tracked.untyped_storage().nbytes() == 0:
            raise ValueError(
                "num_batches_tracked: got a storage of 0 bytes, expected a number in it"
            )
        number = tracked.item()
        if momentum is None and not 0 <= number <= 2**53:
            raise ValueError(f"num_batches_tracked: got {number}, expected 0 to 2^53")
        if number == 2**63 - 1 and tracked.dtype == torch.int64:
            raise ValueError("num_batches_tracked: got 2^63 - 1, expected room for one batch more")


def check_dtype(name: str, dtype: object) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise ValueError(f"{name}: got {dtype}, expected float16, bfloat16, float32 or float64")


def check_module(module: object, name: str = "module") -> None:
    """Refuses what is no module."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"{name}: got {type(module).__name__}, expected a torch.nn.Module")


def check_integer(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: got {value!r}, expected an integer of at least {least}")


def check_num_features(channels: int) -> None:
    """Takes integers of other libraries, too."""
    integer = isinstance(channels, (int, numbers.Integral)) and not isinstance(channels, bool)
    if not (integer and 0 <= channels <= _MOST_CHANNELS):
        raise ValueError(f"num_features: got {channels!r}, expected an integer from 0 to 2^31")


def check_input(name: str, x: Tensor, traced: bool = False) -> None:
    """Checks an input, (N, C, ...); loads what its device needs. traced: it may have no values."""
    check_strided(name, x)
    kind = x.device.type
    if kind == "cuda":
        load_cuda()
    elif kind != "cpu" and not (traced and kind == "meta"):
        raise ValueError(f"{name}: got a tensor on {x.device}, expected the CPU or CUDA")
    if x.dim() < 2:
        raise ValueError(f"{name}: got {x.dim()}D input, expected at least 2D (N, C, ...)")
    if x.dim() > _MOST_AXES:
        raise ValueError(f"{name}: got {x.dim()}D input, expected at most {_MOST_AXES}D")
    check_dtype(name, x.dtype)


def check_per_channel(name: str, tensor: Tensor, x: Tensor) -> None:
    check_strided(name, tensor)
    check_dtype(name, tensor.dtype)
    if tensor.shape != (x.shape[1],):
        raise ValueError(
            f"{name}: got shape {tuple(tensor.shape)}, expected ({x.shape[1]},), one entry per "
            f"channel of the input {tuple(x.shape)}"
        )
    if tensor.device != x.device:
        raise ValueError(
            f"{name}: got a tensor on {tensor.device}, expected {x.device}, the input's device"
        )


def check_written(name: str, tensor: Tensor) -> None:
    """Checks that its entries have places of their own, and are what is there, not its negative."""
    if not torch.compiler.is_compiling() and tensor.is_neg():
        raise ValueError(
            f"{name}: got a tensor with the negative bit, expected the result of resolve_neg()"
        )
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride == 0 and size > 1:
            raise ValueError(
                f"{name}: got strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)}, "
                "expected memory of its own for each entry"
            )


def check_arguments(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    traced: bool = False,
) -> None:
    """Raises an error that names the argument, what was given and what is allowed."""
    check_input("input", x, traced)
    for name, tensor in (
        ("running_mean", running_mean),
        ("running_var", running_var),
        ("weight", weight),
        ("bias", bias),
    ):
        if tensor is not None:
            check_per_channel(name, tensor, x)
            if name.startswith("running"):
                check_written(name, tensor)
    if residual is not None:
        check_like_input("residual", residual, x)
