# SPDX-License-Identifier: Apache-2.0
"""K calls, one for each device or share of this process, that take turns and meet at the layers.

Call k runs until it reaches a synchronized layer or ends; then call k + 1 runs. When all K wait at
the same layer, the layer is computed for all of them, and the round goes on. Each call is a
greenlet: all run in the caller's thread, one at a time, so nothing can deadlock, and PyTorch finds
what it keeps for each thread. Of that, what a call may change and a layer's result depends on is
kept for each call.
"""

import contextlib
import contextvars
import functools
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from .exchange import callers, groups
from .exchange.call import Call
from .operators import without_modes
from .step import recomputation

#: How many runs are in progress in this process: an integer, so that torch.compile can guard on it.
running = 0
_running_lock = threading.Lock()
_local = threading.local()


@functools.cache
def _kinds() -> tuple[str, ...]:
    """The kinds of devices that autocast is asked for; PyTorch reads the environment to tell."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


class ThreadState(NamedTuple):
    """The state that PyTorch keeps for each thread, a call may change, and results depend on."""

    inference: bool
    grad: bool
    forward_grad: bool  #: PyTorch ends it inside the forward of a torch.autograd.Function
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    nesting: int  #: of autocast; its cache of weights is emptied where the outermost one ends

    @classmethod
    def current(cls) -> "ThreadState":
        kinds = _kinds()
        nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        return cls(
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            torch._C._is_fwd_grad_enabled(),
            tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds),
            torch.is_autocast_cache_enabled(),
            nesting,
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        before = self.current()
        with contextlib.ExitStack() as stack:
            if self.inference != before.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            self._set(before)
            try:
                yield
            finally:
                before._set(self.current())

    def _set(self, now: "ThreadState") -> None:
        torch._C._set_grad_enabled(self.grad)
        torch._C._set_fwd_grad_enabled(self.forward_grad)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cache)
        for _ in range(self.nesting - now.nesting):
            torch.autocast_increment_nesting()
        for _ in range(now.nesting - self.nesting):
            torch.autocast_decrement_nesting()
        # Whatever the number of calls in this process, a weight is cast once between two layers.
        torch.clear_autocast_cache()


def _surroundings() -> tuple[Any, int, int]:
    """Gives what else a call could have entered: hooks of saved tensors, and modes of two kinds."""
    return (
        torch._C._autograd._top_saved_tensors_default_hooks(False),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
    )


class OperatorCall:
    """A call of batch norm as an operator, in the place of a layer and of its state.

    options: what the devices must have in common besides the name. estimate: a tensor of theirs.
    run: makes the call with the samples of all devices; its first result is the output.
    """

    weight = counters = None

    def __init__(
        self,
        name: str,
        options: tuple,
        sharing: callers.Sharing,
        estimate: Tensor,
        run: Callable[[Tensor], Any],
    ) -> None:
        self.name, self._options, self._sharing = name, options, sharing
        self.running_mean, self._run = estimate, run

    def __eq__(self, other: object) -> bool:
        own = self.name, self._options
        return isinstance(other, OperatorCall) and own == (other.name, other._options)

    def check(self, xs: list[Tensor]) -> None:
        """Raises ValueError where they are not the samples of one batch."""
        for k, x in enumerate(xs):
            if x.dtype != xs[0].dtype or x.shape[1:] != xs[0].shape[1:]:
                raise ValueError(
                    f"x of device {k}: got {x.dtype} and {tuple(x.shape[1:])} after the samples, "
                    f"expected {xs[0].dtype} and {tuple(xs[0].shape[1:])}, as of device 0"
                )

    def together(self, xs: list[Tensor]) -> list[Any]:
        """Gives each device its results, in memory of their own."""
        outputs = self._run(torch.cat([x.to(xs[0].device) for x in xs]))
        ys = outputs[0].split([len(x) for x in xs])
        every = ((y, *outputs[1:]) for y in ys)
        return [
            type(outputs)(*(t.to(x.device, copy=True) for t in own)) for x, own in zip(xs, every)
        ]

    # What give_up() asks a layer and its state.

    @property
    def state(self) -> "OperatorCall":
        return self

    def options(self) -> None: ...

    def find_path(self) -> str:
        return self.name

    def peers(self, _: None) -> Any:
        return groups.peers_of(*self._sharing)

    def reached(self, peers: Any) -> Any:
        return peers

    def call_of(self, *_: Any) -> Call:
        return Call(self.name)


class Request(NamedTuple):
    """A call that waits at a layer."""

    layer: Any  #: a SyncBatchNorm, or an OperatorCall
    x: Tensor
    residual: Tensor | None
    mask: Tensor | None
    state: ThreadState


class _Turn:
    """Runs one of the calls, in a greenlet."""

    def __init__(self, call: Callable[[], Any], state: ThreadState) -> None:
        self.state = state
        self.request: Request | None = None
        self.ended = self.abandoned = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._around = _surroundings()
        self._greenlet = greenlet(self._main)
        self._greenlet.gr_context = contextvars.copy_context()
        self._call: Callable[[], Any] | None = call

    def _main(self, _: None) -> None:
        call, self._call = self._call, None
        assert call is not None
        try:
            self.result = call()
        except BaseException as error:
            self.error = error
        self.request = None
        self.ended = True

    def resume(self, answer: Tensor | None) -> None:
        """Runs the call until it waits at a layer or ends."""
        self._caller, outer = getcurrent(), getattr(_local, "turn", None)
        _local.turn = self
        try:
            with self.state.entered():
                self._greenlet.switch(answer)
        finally:
            _local.turn = outer

    @property
    def waits(self) -> bool:
        return self._call is None and not self.ended

    def wait(self, layer: Any, x: Tensor, residual: Tensor | None, mask: Tensor | None) -> Tensor:
        """Lets the others run, inside the call, until the layer's output is there."""
        if not self.abandoned:
            self._check(layer)
            self.state = ThreadState.current()
            self.request = Request(layer, x, residual, mask, self.state)
            answer = self._caller.switch()
        # Also a model that swallows the first error gets no further.
        if self.abandoned:
            raise RuntimeError("another device of this step failed; the caller sees its error")
        return answer

    def _check(self, layer: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            refuse_backward(layer.state.find_path)
        if recomputation.around() is not None:
            raise RuntimeError(
                f"{layer.state.find_path()}: got a call in a checkpointed segment, expected one "
                "outside; activation checkpointing around a synchronized layer does not work where "
                "a process has several devices or shares"
            )
        if _surroundings() != self._around:
            raise RuntimeError(
                f"{layer.state.find_path()}: got a call inside hooks of saved tensors, or in a "
                "mode, that the model enters itself, expected them around the whole step: the "
                "other devices or shares of this process would run in them"
            )

    def abandon(self) -> None:
        """Ends a call that waits at a layer, by an error in it."""
        self.abandoned = True
        self.resume(None)
        self.error = None  # its traceback holds this object, and with it tensors


class Generators:
    """The states of the devices' CPU generators, of which PyTorch's default one holds that of the
    device that runs. Device 0's is the default generator's own. Device k's begins as a process's
    does that calls torch.manual_seed(seed + k), and goes on from step to step while nothing else
    draws from the default generator. After that it begins with a seed that stands for the default
    generator's state, so that a program which seeds again repeats itself.
    """

    #: The default generator's state after the last run, its seed, and the other devices' states.
    _left: tuple[Tensor, int, list[Tensor]] | None = None

    def __init__(self, count: int) -> None:
        with without_modes():
            own = torch.get_rng_state()
            if self._left is not None and torch.equal(own, self._left[0]):
                _, self.seed, others = self._left
            else:
                self.seed, others = torch.initial_seed(), []
                if not torch.equal(own, self._begin(0)):
                    self.seed = zlib.crc32(bytes(own.tolist()))
            self.states = [own, *others]
            self.states += [self._begin(k) for k in range(len(self.states), count)]
        self.at = 0

    def _begin(self, k: int) -> Tensor:
        return torch.Generator("cpu").manual_seed((self.seed + k) % 2**64).get_state()

    def enter(self, k: int) -> None:
        """Gives device k, which runs next, its own generator."""
        if k != self.at:
            self.states[self.at] = torch.get_rng_state()
            torch.set_rng_state(self.states[k])
            self.at = k

    def leave(self) -> None:
        self.enter(0)
        Generators._left = torch.get_rng_state(), self.seed, self.states[1:]


def inside() -> bool:
    """Tells whether this thread runs one call of several."""
    return getattr(_local, "turn", None) is not None


class Turns:
    """A run of devices in turns. operators: whether they meet at operators. over: all devices
    have ended."""

    def __init__(self, operators: bool) -> None:
        self.operators, self.over = operators, False


def turns() -> Turns | None:
    """Gives the run whose devices wait for this thread, if one does."""
    return getattr(_local, "turns", None)


def refuse_backward(find_path: Callable[[], str]) -> NoReturn:
    """Raises what is wrong with a backward that begins in a device's turn. find_path: gives the
    layer's."""
    raise RuntimeError(
        f"{find_path()}: got a backward pass inside the forward of one device, expected one "
        "after the forwards of all devices and shares of this process, whose gradients the layer "
        "computes together; a penalty of gradients takes a network without synchronized layers"
    )


@torch.compiler.disable
def wait(layer: Any, x: Tensor, residual: Tensor | None, mask: Tensor | None) -> Tensor:
    """Gives the layer's output for this call, once all calls have reached the layer."""
    return _local.turn.wait(layer, x, residual, mask)


def run_in_turns(
    calls: Sequence[Callable[[], Any]],
    meet: Callable[[list[Request | None]], list[Tensor]],
    give_up: Callable[[list[Request | None], BaseException], None],
    worlds: Sequence[Any],
    operators: bool = False,
) -> list[Any]:
    """Gives the results of calls[k]() for all k.

    meet: gives the layer's outputs for the requests of all calls (None: the call has ended), or
    raises. give_up: is called with the requests before the error of a call is raised. worlds: what
    each call has of its own; enter(k) gives it to call k, leave() ends with all. operators: whether
    calls meet at operators as well. On an error all calls have ended when it is raised.
    """
    global running
    state = ThreadState.current()
    devices = [_Turn(call, state) for call in calls]
    before, _local.turns = turns(), Turns(operators)
    with _running_lock:
        running += 1
    answers: Sequence[Tensor | None] = [None] * len(devices)
    try:
        while True:
            for k, (device, answer) in enumerate(zip(devices, answers)):
                for world in worlds:
                    world.enter(k)
                device.resume(answer)
                if (error := device.error) is not None:
                    device.error = None
                    try:
                        give_up([d.request for d in devices], error)
                        raise error
                    finally:
                        del error  # its traceback holds this frame, and with it tensors
            if all(device.ended for device in devices):
                return [device.result for device in devices]
            answers = meet([device.request for device in devices])
            for device in devices:
                device.request = None
    finally:
        for k, device in enumerate(devices):
            if device.waits:
                for world in worlds:
                    world.enter(k)
                device.abandon()
        for world in worlds:
            world.leave()
        _local.turns.over, _local.turns = True, before
        with _running_lock:
            running -= 1
