"""The training step as one operator with a gradient. torch.export keeps of an autograd function its
forward alone, so that its graph would train without gradients."""

from types import SimpleNamespace

import torch

from . import _cuda, _training
from ._groups import Sharing
from ._layer import Layer
from ._ops import _normalized, _parameter_gradients, ops
from ._traced import operator
from ._where import Call

# A Layer's fields; momentum and inplace are not the operators' concern.
_LAYER = (
    "str name, int number, str? group, str limit, str engine, bool sync, float eps, "
    "str affine_grad, str activation, float negative_slope, str statistics"
)


def _constants(layer: Layer) -> tuple:
    options = (layer.affine_grad, layer.activation, layer.negative_slope, layer.statistics)
    return (layer.name, layer.number, *layer.sharing, layer.sync, layer.eps, *options)


def _layer(name, number, group, limit, engine, sync, eps, affine_grad, activation, slope, mode):
    sharing = Sharing(group, limit, engine)
    return Layer(name, number, sharing, sync, eps, None, affine_grad, activation, slope, mode)


@torch.compiler.assume_constant_result
def exporting() -> bool:
    """torch.compile takes torch.compiler.is_exporting for true while it traces, but not in here."""
    return torch.compiler.is_exporting()


def training_step(x, weight, bias, residual, mask, counter, layer, peers, segment, updates):
    """As _BatchNormTraining.apply."""
    y, mean, var, _, info, _ = ops.training_step(
        x, weight, bias, residual, mask, counter, *_constants(layer)
    )
    return y, mean, var, info


@operator(
    "training_step",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? mask, Tensor? counter, "
    f"{_LAYER}) -> "
    "(Tensor y, Tensor mean, Tensor var, Tensor rstd, Tensor info, Tensor activation_mask)",
)
def _training_step(x, weight, bias, residual, mask, counter, *constants):
    if x.is_cuda:
        _cuda.load()  # a program that was loaded from a file may be the first to need it
    layer = _layer(*constants)
    ctx = SimpleNamespace(mark_non_differentiable=lambda *_: None)
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    y, mean, var, info = _training._BatchNormTraining.forward(
        ctx, x, weight, bias, residual, mask, counter, layer, layer.peers(), None, None
    )
    *_, rstd, _, activation_mask, _ = ctx.saved_tensors
    return y, mean, var, rstd, info, activation_mask


@_training_step.register_fake
def _(x, weight, bias, residual, mask, counter, *constants):
    """y like x; statistics and activation mask as of normalize."""
    return _normalized(x, residual, _layer(*constants).activation_kind)


@operator(
    "training_step_backward",
    "(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, Tensor info, "
    "Tensor activation_mask, Tensor? mask, ScalarType? bias_dtype, bool[] needs, "
    f"{_LAYER}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _training_step_backward(
    dy, x, weight, bias, mean, rstd, info, activation_mask, mask, bias_dtype, needs, *constants
):
    layer = _layer(*constants)
    ctx = SimpleNamespace(layer=layer, peers=layer.peers(), bias_dtype=bias_dtype)
    ctx.call = Call(layer.name, None, "backward", x.shape[1], x.dtype, layer)
    ctx.needs_input_grad = needs
    dx, dweight, dbias, dresidual = _training._backward(
        ctx, dy, x, weight, bias, mean, rstd, info, activation_mask, mask
    )
    if dresidual is dy:  # an operator's output is a tensor of its own
        dresidual = dy.clone()
    return tuple(x.new_empty(0) if g is None else g for g in (dx, dweight, dbias, dresidual))


@_training_step_backward.register_fake
def _(dy, x, weight, bias, mean, rstd, info, activation_mask, mask, bias_dtype, needs, *constants):
    """Gradients of x, weight, bias and residual; those that are not needed are empty."""
    dtypes = (weight.dtype if needs[1] else None, bias_dtype if needs[2] else None)
    dx, dresidual = (torch.empty_like(x) if need else x.new_empty(0) for need in needs[::3])
    return dx, *_parameter_gradients(x, *dtypes), dresidual


@torch._disable_dynamo
def _setup_context(ctx, inputs, output):
    x, weight, bias, residual, mask, _, *ctx.constants = inputs
    _, mean, _, rstd, info, activation_mask = output
    ctx.bias_dtype = None if bias is None else bias.dtype
    # Without an activation mask, the activation's sign is computed again, which takes the bias.
    again = _layer(*ctx.constants).activation != "none" and residual is None
    ctx.save_for_backward(
        x, weight, bias if again else None, mean, rstd, info, activation_mask, mask
    )


@torch._disable_dynamo
def _backward(ctx, dy, *_):
    needs = list(ctx.needs_input_grad[:4])
    gradients = ops.training_step_backward(
        dy, *ctx.saved_tensors, ctx.bias_dtype, needs, *ctx.constants
    )
    gradients = [g if need else None for g, need in zip(gradients, needs, strict=True)]
    return *gradients, None, None, *(None for _ in ctx.constants)


_training_step.register_autograd(_backward, setup_context=_setup_context)
