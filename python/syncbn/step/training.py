"""One training step of a layer: the passes, the exchange between them, and their gradient."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..exchange import agreement, merging, transports
from ..exchange.agreement import COMES, WANTS_SUMS, WANTS_X, Backward
from ..exchange.call import Call
from ..exchange.groups import Peers
from ..operators import HEADER_WORDS, message_words, ops
from . import paths
from .layer_state import LayerState
from .modes import check_not_batched, recorded
from .options import Options, values_per_channel
from .recomputation import Segment


class Step(NamedTuple):
    """What backward knows of a training step besides tensors.

    call: as errors in backward name it. backward: who takes part in it. bias_dtype: None without a
    bias. needs: whether this rank wants the gradients of x, weight, bias and residual.
    """

    state: LayerState
    options: Options
    peers: Peers | None
    call: Call
    backward: Backward
    bias_dtype: torch.dtype | None
    needs: tuple[bool, ...] = (False,) * 4

    @property
    def ranks(self) -> int:
        return 1 if self.peers is None else self.peers.ranks

    @property
    def exchanges(self) -> bool:
        """Whether backward takes an exchange."""
        alone = self.peers is None and self.needs[0]
        return alone or self.backward.x or self.backward.sums


class Inputs(NamedTuple):
    """What forward is given. takes_part: this rank's word about backward.
    segment: the checkpointed segments around the call, if any."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    mask: Tensor | None
    options: Options
    state: LayerState
    peers: Peers | None
    takes_part: int
    segment: Segment | None = None


def shared_sums(given: Inputs) -> tuple[Step, tuple]:
    """What backward will know; and (message, merged, rest or records), this rank's part and what
    all ranks share. In a checkpointed segment the header alone of this rank's part, and no more
    than is needed."""
    x, _, bias, residual, mask, options, state, peers, word, segment = given
    if segment is not None and segment.kept is not None:
        return segment.kept.step, segment.kept.words
    if peers is not None and peers.group_name != state.group:
        paths.compare(state, peers, x, options)
    call = state.call_of(x, options)
    number, channels = options.identity(state.number, residual is not None), x.shape[1]
    own = values_per_channel(x, mask)
    sums: tuple[Any, ...]
    merged: Sequence[Any]
    if options.statistics == "welford":
        sums = (x, number, state.call, options.eps, mask, word)
        message = merging.refusing(ops.local_welford, sums, x, peers, call)
        merged = merging.gather(message, channels, peers, call)
    else:
        sums = (x, number, state.call, options.eps)
        message, *merged = merging.moments(sums, mask, word, peers, call)
    if own <= 1:  # or unknown
        sizes = f"ranks (input size {list(x.shape)} on this one)"
        agreement.check_count(merged[0], own, sizes)
    backward = agreement.backward_of(merged[0], word, peers, call)
    bias_dtype = None if bias is None else bias.dtype
    step = Step(state, options, peers, call.backward(), backward, bias_dtype)
    if segment is None:
        return step, (message, *merged)
    needed = HEADER_WORDS if options.statistics == "welford" else message_words(x, mask)
    trimmed = merging.trimmed(message, *merged, needed)  # type: ignore[call-arg]  # merged: two
    return step, segment.keep(step, trimmed)


def like(tensor: Tensor, x: Tensor) -> Tensor:
    """The tensor in x's layout."""
    return tensor if tensor.stride() == x.stride() else torch.empty_like(x).copy_(tensor)


def _waiting(peers: Peers | None, x: Tensor) -> Peers | None:
    """Those who wait for this rank's host."""
    return None if peers is not None and peers.cuda and x.is_cuda else peers


def leave(error: BaseException, given: Inputs) -> None:
    x, peers = given.x, _waiting(given.peers, given.x)
    if given.segment is not None and given.segment.kept is not None:
        peers = None
    transports.leave(error, peers, given.state.call_of(x, given.options))


def forward(given: Inputs, updates: tuple = ()) -> tuple[Step, tuple, tuple]:
    """What backward will know; y, mean, var (float64, biased) and info (count, fingerprint); and
    the tensors that backward takes.

    updates: what normalize_and_update takes besides, if it is to update the running statistics.
    """
    try:
        return _forward(given, updates)
    except BaseException as error:
        leave(error, given)
        raise


def _forward(given: Inputs, updates: tuple) -> tuple[Step, tuple, tuple]:
    x, weight, bias, residual, mask, options, *_ = given
    step, exchanged = shared_sums(given)
    if updates:
        normalize = ops.normalize_and_update
    elif options.statistics == "welford":
        normalize = ops.normalize_gathered
    else:
        normalize = ops.normalize
    y, mean, var, rstd, info, activation_mask = normalize(
        x,
        *exchanged,
        weight,
        bias,
        None if residual is None else like(residual, x),
        options.eps,
        step.ranks,
        options.activation_kind,
        options.negative_slope,
        mask,
        *updates,
    )
    # Without an activation mask, the activation's sign is computed again, which takes the bias.
    again = options.activation != "none" and residual is None
    saved = (x, weight, bias if again else None, mean, rstd, info, activation_mask, mask)
    return step, (y, mean, var, info), saved


@recorded(lambda step, *_: step.state.name, " backward")
def backward(step: Step, dy, x, *saved) -> tuple:
    """Gradients of x, weight, bias and residual. saved: what forward() gave for it, behind x."""
    try:
        return _backward(step, dy, x, *saved)
    except BaseException as error:
        peers = _waiting(step.peers, x) if step.exchanges else None
        transports.leave(error, peers, step.call)
        raise


def _backward(step: Step, dy, x, weight, bias, mean, rstd, info, activation_mask, mask) -> tuple:
    options, peers = step.options, step.peers
    needs_x, needs_weight, needs_bias, needs_residual = step.needs
    check_not_batched(step, step.call, dy, x)
    agreement.check_present(step.backward, peers, step.call)
    dtypes = (
        weight.dtype if needs_weight else None,
        step.bias_dtype if needs_bias else None,
    )
    dy = like(dy, x)
    through = (weight, bias, activation_mask, options.activation_kind, options.negative_slope)
    keep = needs_residual and (options.activation != "none" or mask is not None)
    arguments = (dy, x, mean, rstd, info, *through, keep)
    if step.exchanges:
        message, u, merged, rest = merging.gradients(arguments, mask, peers, step.call)
    else:
        message, u = ops.local_gradients(*arguments, 0, mask)
    if keep:  # what comes back is there already
        dy, through = u, (weight, None, None, 0, 0.0)
    dx = dweight = dbias = None
    # One rank's share is the whole, and comes with dx.
    shares = options.affine_grad == "share" and not (peers is None and needs_x)
    shares = shares and (needs_weight or needs_bias)
    if step.exchanges:
        own = message if shares else None
        dx, dweight, dbias = ops.input_gradient(
            dy, x, merged, rest, mean, rstd, info, *through, *dtypes, step.ranks, mask, own
        )
    elif shares:
        dweight, dbias = ops.affine_gradient_shares(message, x, mean, rstd, *dtypes)
    return (
        dx if needs_x else None,
        dweight if needs_weight else None,
        dbias if needs_bias else None,
        dy if needs_residual else None,
    )


def takes_part(
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
    residuals: Sequence[Tensor | None],
    options: Options,
    segment: Segment | None = None,
) -> int:
    """This rank's word of the header about backward."""
    if not torch.is_grad_enabled():
        # The first run of a reentrant checkpoint: the second will tell.
        return 0 if segment is None else WANTS_X + COMES

    def wanted(tensors: Sequence[Tensor | None]) -> bool:
        return any(t is not None and t.requires_grad for t in tensors)

    x, affine = wanted(inputs), wanted(parameters)
    sums = affine and options.affine_grad == "global"
    return x * WANTS_X + sums * WANTS_SUMS + (x or affine or wanted(residuals)) * COMES
