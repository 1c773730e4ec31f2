# SPDX-License-Identifier: Apache-2.0
"""What a layer's exchange brought, kept for the recomputation of a checkpointed segment.

torch.utils.checkpoint runs a segment again during backward. The second run must not exchange (the
other ranks may be elsewhere) and must not update running statistics, so the first run leaves what
it got with the segment, and the second takes it from there, call by call in the same order.

PyTorch does not say publicly whether code runs in a segment and for the first time. This file alone
knows how to tell:

- use_reentrant=True runs the segment in CheckpointFunction.forward and again in its backward, with
  one `ctx`;
- use_reentrant=False runs it under hooks of saved tensors that share a `frame`, and again inside
  that frame's unpack hook.

`ctx` and `frame` die with the graph, and with them what is kept here.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.utils import checkpoint

from .options import Options

_autograd = torch._C._autograd
_top_hooks, _task = _autograd._top_saved_tensors_default_hooks, torch._C._current_graph_task_id


class Kept(NamedTuple):
    """The results of the exchange of one call. key: what the call of the second run must have in
    common. step: what backward will know of it. saved: the statistics."""

    key: tuple
    step: Any
    saved: torch.Tensor


class _Record:
    """The calls of a segment's first run, and how far the current run has got."""

    def __init__(self) -> None:
        self.calls: list[Kept] = []
        self.run: object = None
        self.next = 0

    def take(self, key: tuple, run: object) -> Kept:
        if run != self.run:  # each backward over a retained graph is a run of its own
            self.run, self.next = run, 0
        made = self.calls[self.next] if self.next < len(self.calls) else None
        if made is None or made.key != key:
            expected = "no further call" if made is None else _text(made.key)
            raise RuntimeError(
                f"{key[0].name}: the recomputation of a checkpointed segment got to {_text(key)}, "
                f"expected {expected}, as in the first run of the segment; a segment must make the "
                "same calls in the same order"
            )
        self.next += 1
        return made


def _text(key: tuple) -> str:
    state, _, residual, *inputs = key
    text = ", ".join(f"{dtype} of shape {shape}" for dtype, shape in inputs)
    return f"a call of {state.name} with {text}" + (" and a residual" if residual else "")


class Segment:
    """The checkpointed segments around a call. kept: what the exchange brought in the first run,
    None in the first run."""

    def __init__(
        self, key: tuple, owners: list[Any], given: list[Any], again: tuple[Any, object] | None
    ) -> None:
        self._key, self._given = key, given
        self._records = [owner.__dict__.setdefault("_syncbn", _Record()) for owner in owners]
        self.kept: Kept | None = None
        if again is not None:
            owner, run = again
            self.kept = owner.__dict__.setdefault("_syncbn", _Record()).take(key, run)
            # Segments inside the one that runs again are new, and will run again in their turn.
            self._keep(self.kept)

    def keep(self, step: Any, saved: torch.Tensor) -> None:
        """Keeps what an exchange of the first run brought."""
        self._keep(Kept(self._key, step, saved))

    def check_in_place(self, *xs: torch.Tensor) -> None:
        """Refuses to write over what PyTorch keeps for the second run; in the reentrant form it may
        not notice."""
        memory = {x.untyped_storage().data_ptr() for x in xs}
        for tensor in self._given:
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() in memory:
                raise ValueError(
                    "input: got an input of a checkpointed segment with inplace=True, expected an "
                    "intermediate result; the recomputation begins with the segment's inputs"
                )

    def _keep(self, kept: Kept) -> None:
        for record in self._records:
            record.calls.append(kept)


class _Names(NamedTuple):
    """The code of PyTorch that is recognized on the stack and among the hooks."""

    forward: CodeType
    backward: CodeType
    unpack: CodeType
    first_pack: CodeType
    second_pack: CodeType


def _inner(outer: CodeType, name: str, *variables: str) -> CodeType:
    """Gives the code of a function that is defined inside another and sees its variables."""
    (found,) = (c for c in outer.co_consts if isinstance(c, CodeType) and c.co_name == name)
    if not set(variables) <= set(found.co_freevars):
        raise LookupError(f"{name} has {found.co_freevars}, expected {variables}")
    return found


def find_names() -> _Names:
    """Raises if this PyTorch is organized in another way."""
    function = checkpoint.CheckpointFunction
    first = checkpoint._checkpoint_hook.__init__.__code__
    second = checkpoint._recomputation_hook.__init__.__code__
    unpack = _inner(first, "unpack_hook", "frame")
    for code, variables in (
        (function.forward.__code__, {"ctx", "args"}),
        (function.backward.__code__, {"ctx"}),
        (unpack, {"gid"}),
    ):
        if not variables <= {*code.co_varnames, *code.co_cellvars}:
            raise LookupError(f"{code.co_name} has {code.co_varnames}, expected {variables}")
    for name in ("top", "pop", "push"):
        getattr(_autograd, f"_{name}_saved_tensors_default_hooks")
    _autograd._saved_tensors_hooks_get_disabled_error_message()
    torch._C._current_graph_task_id()
    return _Names(
        function.forward.__code__,
        function.backward.__code__,
        unpack,
        _inner(first, "pack_hook", "frame"),
        _inner(second, "pack_hook", "target_frame_ref"),
    )


@functools.cache
def _names() -> _Names | None:
    try:
        return find_names()
    except (AttributeError, LookupError, ValueError) as error:
        warnings.warn(
            f"PyTorch {torch.__version__} has another activation checkpointing than syncbn knows "
            f"({error}); a synchronized layer in a checkpointed segment exchanges and updates its "
            "running statistics twice",
            stacklevel=2,
        )
        return None


def _hooks() -> list[Any]:
    """Gives the pack hooks of saved tensors that are in force, innermost first."""
    top = _autograd._top_saved_tensors_default_hooks(False)
    if top is None:
        return []
    if _autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return [top[0]]  # none can be put back
    found = []
    try:  # PyTorch shows the innermost alone
        while top is not None:
            _autograd._pop_saved_tensors_default_hooks()
            found.append(top)
            top = _autograd._top_saved_tensors_default_hooks(False)
    finally:
        for pack, unpack in reversed(found):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)
    return [pack for pack, _ in found]


def around() -> tuple[list[Any], list[Any], tuple[Any, object] | None] | None:
    """Tells of the segments around this call whom they belong to, what they were given, and (owner,
    run) of the one that runs again. None outside of any."""
    # Looking through the stack costs microseconds, so not in a plain step. Code that switches
    # gradients on in the first run of a reentrant segment is missed; its second run is an error.
    if torch.is_grad_enabled() and _task() == -1 and _top_hooks(False) is None:
        return None
    names = _names()
    if names is None:
        return None
    hooks = _hooks()
    owners, given, again = [], [], None
    frame: FrameType | None = sys._getframe()
    while frame is not None and again is None:
        code = frame.f_code
        if code is names.forward:
            owners.append(frame.f_locals["ctx"])
            given.extend(frame.f_locals["args"])
        elif code is names.backward:
            again = frame.f_locals["ctx"], torch._C._current_graph_task_id()
        elif code is names.unpack:
            again = frame.f_locals["frame"], frame.f_locals["gid"]
        frame = frame.f_back
    for pack in hooks:
        packing = getattr(pack, "__code__", None)
        if packing is names.second_pack:
            break
        if packing is names.first_pack:
            owners.append(pack.__closure__[packing.co_freevars.index("frame")].cell_contents)
    return (owners, given, again) if owners or again is not None else None


def segment(
    state: Any, options: Options, residual: bool, *inputs: torch.Tensor | None
) -> Segment | None:
    """Gives the segments around a training call; None outside of any. Raises RuntimeError if a
    recomputation makes another call than the first run."""
    found = around()
    if found is None:
        return None
    owners, given, again = found
    # momentum touches this rank's buffers alone, and is not used again.
    shapes = [(x.dtype, tuple(x.shape)) for x in inputs if torch.is_tensor(x)]
    key = (state, options._replace(momentum=None), residual, *shapes)
    return Segment(key, owners, given, again)


@contextlib.contextmanager
def wrapped(wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Wraps, in a with block, the functions of segments that begin in it. PyTorch calls what it is
    given in both runs."""
    frame, reentrant = checkpoint._CheckpointFrame, checkpoint.CheckpointFunction
    _names()  # as they are outside

    class Reentrant:
        @staticmethod
        def apply(function: Any, *arguments: Any) -> Any:
            return reentrant.apply(wrap(function), *arguments)

    def make(function: Any, *arguments: Any, **named: Any) -> Any:
        return frame(wrap(function), *arguments, **named)

    checkpoint._CheckpointFrame = make  # type: ignore[misc,assignment]
    checkpoint.CheckpointFunction = Reentrant  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        checkpoint._CheckpointFrame = frame  # type: ignore[misc]
        checkpoint.CheckpointFunction = reentrant  # type: ignore[misc]
