# SPDX-License-Identifier: Apache-2.0
"""The training step as one operator of a graph: of torch.compile, torch.export, and where tensors
are fake. It does what eager mode does when the graph runs. So it waits, reports and raises as eager
mode does, and knows by then which layer it is, with whom it exchanges, and at which call it is."""

import torch
from torch import Tensor
from torch.utils import checkpoint

from ..exchange.call import Backward
from ..exchange.callers import Sharing
from ..operators import COMES, WANTS_SUMS, WANTS_X, activation_mask_of, load_cuda, ops, saved_of
from . import layer_state, training
from .layer_state import Identity, LayerState
from .options import Options

#: The options that a graph holds: momentum and inplace are not the operators' concern.
_OPTIONS = [name for name in Options._fields if name not in ("momentum", "inplace")]
_ACTIVATION = _OPTIONS.index("activation") - len(_OPTIONS)
# handle: of a layer's state, in compiled graphs; else None, and the next five tell which.
_LAYER = (
    "Tensor? handle, str name, str? group, float? limit, str engine, bool counted, "
    + ", ".join(f"{type(Options._field_defaults[name]).__name__} {name}" for name in _OPTIONS)
)


def _constants(identity: Identity, options: Options) -> tuple:
    name, sharing, counted = identity
    return name, *sharing, counted, *[getattr(options, name) for name in _OPTIONS]


def _layer(handle, name, group, limit, engine, counted, *constants) -> tuple[LayerState, Options]:
    options = Options(**dict(zip(_OPTIONS, constants)), momentum=None)
    if handle is not None:
        return layer_state.of_handle(handle), options
    return layer_state.named(Identity(name, Sharing(group, limit, engine), counted)), options


def operator(name: str, schema: str):
    """Makes an operator in Python. It may wait for the device, or for other ranks over the host:
    inductor leaves it out of the CUDA graphs that it captures by itself."""
    return torch.library.custom_op(
        f"syncbn::{name}",
        mutates_args=(),
        device_types=("cpu", "cuda"),
        schema=schema,
        tags=(torch.Tag.cudagraph_unsafe,),
    )


@operator(
    "training_step",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? mask, int takes_part, "
    f"{_LAYER}) -> (Tensor y, Tensor saved, Tensor activation_mask, Tensor backward)",
)
def _training_step(x, weight, bias, residual, mask, takes_part, *layer):
    if x.is_cuda:
        load_cuda()  # a program that was loaded from a file may be the first to need it
    state, options = _layer(*layer)
    state.move(x.device)
    peers, needs = state.peers(options), (False,) * 4  # backward will tell
    given = training.Given((None,) * 3, options, state, peers, takes_part)
    with training.turn_of(state, options, peers, x, (residual, weight, bias)) as turn:
        tensors = (x, weight, bias, residual, mask)
        step, y, (*_, saved, activation_mask, _) = training.forward(turn, given, needs, *tensors)
    if activation_mask is None:
        activation_mask = x.new_empty((0,), dtype=torch.uint8)
    return y, saved, activation_mask, _words_of(step.backward)


@_training_step.register_fake
def _(x, weight, bias, residual, mask, takes_part, *layer):
    """Gives y like x; saved as of operators.saved_of(); activation mask, empty unless there is a
    residual and an activation; backward int64 [2] on the CPU: who takes part in it."""
    kept = residual is not None and layer[_ACTIVATION] != "none"
    bits = activation_mask_of(x) if kept else x.new_empty((0,), dtype=torch.uint8)
    words = torch.empty(2, dtype=torch.int64, device="cpu")
    return torch.empty_like(x), saved_of(x), bits, words


def _words_of(backward: Backward) -> Tensor:
    """Gives what is wanted, in two bits; the absent ranks as bits, as many as there is room for."""
    absent = sum(1 << rank for rank in backward.absent if rank < 62)
    absent |= (1 << 62) * (len(backward.absent) > 0 and max(backward.absent) >= 62)
    return torch.tensor([backward.x + 2 * backward.sums, absent], dtype=torch.int64, device="cpu")


def _backward_of(words: Tensor) -> Backward:
    wants, absent = words.tolist()
    return Backward(wants % 2 == 1, wants > 1, tuple(r for r in range(63) if absent >> r & 1))


def _save(mode, function, types, args=(), kwargs=None):
    """Has a checkpoint, traced or selective, save what the operator returns. To compute it again
    would exchange again; from PyTorch 2.15 on the body of an autograd function would be, too."""
    policy, mode.policy_fn = mode.policy_fn, lambda *_, **__: checkpoint.CheckpointPolicy.MUST_SAVE
    try:
        return mode.__torch_dispatch__(function, types, args, kwargs)
    finally:
        mode.policy_fn = policy


_training_step.register_torch_dispatch(checkpoint._CachingTorchDispatchMode, _save)


@operator(
    "training_step_backward",
    "(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor saved, Tensor activation_mask, "
    "Tensor? mask, Tensor backward, ScalarType? bias_dtype, bool[] needs, "
    f"{_LAYER}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _training_step_backward(dy, x, weight, bias, saved, bits, mask, backward, *arguments):
    bias_dtype, needs, *layer = arguments
    state, options = _layer(*layer)
    peers, awaited = state.peers(options), _backward_of(backward)
    made, form = (None, x.shape[1], x.dtype), state.form(options)
    step = training.Step(state, options, form, peers, made, awaited, bias_dtype, tuple(needs))
    saved = (weight, bias, x, saved, bits if bits.numel() > 0 else None, mask)
    dx, dweight, dbias, dresidual = training.backward(step, dy, *saved)
    if dresidual is dy:  # an operator's output is a tensor of its own
        dresidual = dy.clone()
    return tuple(x.new_empty(0) if g is None else g for g in (dx, dweight, dbias, dresidual))


@_training_step_backward.register_fake
def _(dy, x, weight, bias, saved, bits, mask, backward, bias_dtype, needs, *_):
    """Gradients of x, weight, bias and residual; those that are not needed are empty."""
    dx, dresidual = (torch.empty_like(x) if need else x.new_empty(0) for need in needs[::3])
    dweight = x.new_empty(x.shape[1] if needs[1] else 0, dtype=weight.dtype if needs[1] else None)
    dbias = x.new_empty(x.shape[1] if needs[2] else 0, dtype=bias_dtype if needs[2] else None)
    return dx, dweight, dbias, dresidual


def _keep(ctx, inputs, output):
    """Keeps what backward takes of a step with these inputs and outputs."""
    x, weight, bias, residual, mask, _, handle, *ctx.layer = inputs
    _, saved, activation_mask, backward = output
    ctx.bias_dtype = None if bias is None else bias.dtype
    # Without an activation mask, the activation's sign is computed again, which takes the bias.
    again = ctx.layer[_ACTIVATION] != "none" and residual is None
    bias = bias if again else None
    ctx.save_for_backward(x, weight, bias, saved, activation_mask, mask, backward, handle)


def _gradients(ctx, dy, *_) -> tuple:
    *saved, handle = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    gradients = ops.training_step_backward(dy, *saved, ctx.bias_dtype, needs, handle, *ctx.layer)
    gradients = [g if need else None for g, need in zip(gradients, needs)]
    return *gradients, None, None, None, *(None for _ in ctx.layer)


_training_step.register_autograd(
    torch._disable_dynamo(_gradients), setup_context=torch._disable_dynamo(_keep)
)


class _TrainingStep(torch.autograd.Function):
    """The operator in a compiled graph. A compiled checkpoint would recompute an operator that is
    differentiable itself, with its exchange; torch.export, however, keeps of an autograd function
    its forward alone, so that its graph would train without gradients."""

    @staticmethod
    def forward(ctx, *inputs):
        output = ops.training_step(*inputs)
        _keep(ctx, inputs, output)
        y, saved, *_ = output
        # A graph may not drop what other processes wait for. Marking the operator as having side
        # effects would do, but no graph with activation checkpointing may hold such a one, except
        # PyTorch's own wait, which does nothing to a tensor that is there.
        saved = torch.ops._c10d_functional.wait_tensor(saved)
        ctx.mark_non_differentiable(saved)
        return y, saved

    @staticmethod
    def backward(ctx, dy, *_):
        return _gradients(ctx, dy)


@torch.compiler.assume_constant_result
def _exporting() -> bool:
    """Tells whether PyTorch exports. While it traces, torch.compile elsewhere takes it for true."""
    return torch.compiler.is_exporting()


def training_step(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    options: Options,
    state: LayerState | Identity,
) -> tuple[Tensor, Tensor]:
    """Gives y of a step in a graph, and what operators.saved_of() describes. The call is counted by
    the operator."""
    tensors = (x, weight, bias, residual, mask)
    if torch.compiler.is_compiling() and not _exporting():
        handle: Tensor | None = None
        if isinstance(state, LayerState):
            handle, identity = state.handle, Identity("")
        else:
            identity = state
        needs = training.needs_of(x, weight, bias, residual)
        takes_part = training.takes_part(needs, options)
        return _TrainingStep.apply(*tensors, takes_part, handle, *_constants(identity, options))
    identity = state.identity if isinstance(state, LayerState) else state
    # Whether gradients will be wanted is not known yet.
    takes_part = WANTS_X + COMES + (options.affine_grad == "global") * WANTS_SUMS
    constants = _constants(identity, options)
    y, saved, *_ = ops.training_step(*tensors, takes_part, None, *constants)
    return y, saved
