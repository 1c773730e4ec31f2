# SPDX-License-Identifier: Apache-2.0
"""K calls in K threads, one for each device, of which one runs at a time, that meet at the layers.

Device k runs until it reaches a synchronized layer or ends; then device k + 1 runs. When all K
wait at the same layer, the caller's thread computes the layer for all of them, and the round goes
on. The order is that of one thread, so nothing can deadlock. Each device has a CPU generator of its
own.
"""

import contextlib
import inspect
import queue
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.utils.checkpoint
from torch import Tensor

from .operators import without_modes

#: How many runs are in progress in this process: an integer, so that torch.compile can guard on it.
running = 0
_running_lock = threading.Lock()
_local = threading.local()


class ThreadState(NamedTuple):
    """What PyTorch keeps per thread and a layer's result depends on."""

    inference: bool
    grad: bool
    cache: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def current(cls) -> "ThreadState":
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return cls(
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            torch.is_autocast_cache_enabled(),
            tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self.cache)
                )
            yield


class Request(NamedTuple):
    """A device that waits at a layer."""

    layer: Any  #: a SyncBatchNorm
    x: Tensor
    residual: Tensor | None
    mask: Tensor | None
    state: ThreadState
    number: int  #: of the next node in the device's autograd graph


def _number_nodes_after(node: Any) -> None:
    """Makes this thread number its next nodes above that of the layer. Backward visits nodes by
    number, the highest first. If they go up along each device's graph, a device's nodes are visited
    in the order that they would have alone, which decides in what order gradients are added."""
    while node is not None and torch.autograd._get_sequence_nr() <= node._sequence_nr():
        _nobody.neg()  # a node, which takes a number


_nobody = torch.zeros((), requires_grad=True)


_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__


class _Device:
    """Runs one call in its thread. Only the thread that holds the baton touches these
    attributes."""

    def __init__(self, call: Callable[[], Any], state: ThreadState) -> None:
        self.call = call
        self.state = state
        self.thread: threading.Thread | None = None
        self.request: Request | None = None
        self.ended = False
        self.abandoned = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._answers: queue.SimpleQueue = queue.SimpleQueue()
        self._stops: queue.SimpleQueue = queue.SimpleQueue()

    def _main(self) -> None:
        _local.device = self
        try:
            with self.state.entered():
                self.result = self.call()
        except BaseException as error:
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if frame.f_code is _CHECKPOINT:  # whose hooks of saved tensors are this thread's
                    frame.clear()
            self.error = error
        self.request = None
        self.ended = True
        self._stops.put(None)

    def resume(self, answer: Tensor | None) -> None:
        """Runs the device until it waits at a layer or ends."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._main, daemon=True)
            self.thread.start()
        else:
            self._answers.put(answer)
        self._stops.get()

    def wait(self, layer: Any, x: Tensor, residual: Tensor | None, mask: Tensor | None) -> Tensor:
        """Gives the baton away, in the device's thread, until the layer's output is there."""
        if not self.abandoned:
            number = torch.autograd._get_sequence_nr()
            self.request = Request(layer, x, residual, mask, ThreadState.current(), number)
            self._stops.put(None)
            answer = self._answers.get()
        # Also a model that swallows the first error gets no further.
        if self.abandoned:
            raise RuntimeError("another device of this step failed; the caller sees its error")
        _number_nodes_after(answer.grad_fn)
        return answer

    def abandon(self) -> None:
        """Ends the thread: by an error in it, if it waits at a layer."""
        if self.thread is not None:
            self.abandoned = True
            self._answers.put(None)
            self.thread.join()
            self.error = None  # its traceback holds this object, and with it tensors


class _Generators:
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

    def switch(self, k: int) -> None:
        """Gives device k, which runs next, its own generator."""
        if k != self.at:
            self.states[self.at] = torch.get_rng_state()
            torch.set_rng_state(self.states[k])
            self.at = k

    def leave(self) -> None:
        self.switch(0)
        _Generators._left = torch.get_rng_state(), self.seed, self.states[1:]


class Turns:
    """One run of devices in turns. over: all devices have ended."""

    over = False


def turns() -> Turns | None:
    """Gives the run whose devices wait for this thread, if one does."""
    return getattr(_local, "turns", None)


def inside() -> bool:
    """Tells whether this thread runs one device of several."""
    return getattr(_local, "device", None) is not None


def refuse_backward(state: Any) -> NoReturn:
    """Raises what is wrong with a backward that begins in a device's turn. state: a layer's."""
    raise RuntimeError(
        f"{state.find_path()}: got a backward pass inside the forward of one device, expected one "
        "after the forwards of all devices and shares of this process, whose gradients the layer "
        "computes together"
    )


@torch.compiler.disable
def wait(layer: Any, x: Tensor, residual: Tensor | None, mask: Tensor | None) -> Tensor:
    """Gives the layer's output for this device, once all devices have reached the layer."""
    if torch._C._current_graph_task_id() != -1:  # of a checkpointed segment, which runs again
        refuse_backward(layer.state)
    return _local.device.wait(layer, x, residual, mask)


def run_in_turns(
    calls: Sequence[Callable[[], Any]],
    meet: Callable[[list[Request | None]], list[Tensor]],
    give_up: Callable[[list[Request | None], BaseException], None],
    generators: Any = None,
) -> list[Any]:
    """Gives the results of calls[k]() for all devices k.

    meet: gives the layer's outputs for the requests of all devices (None: the device has ended), or
    raises. give_up: is called with the requests before the error of a device is raised. generators:
    an object like the _Generators that are the default. On an error all threads have ended when it
    is raised.
    """
    global running
    state = ThreadState.current()
    devices = [_Device(call, state) for call in calls]
    generators = generators or _Generators(len(devices))
    before, _local.turns = turns(), Turns()
    with _running_lock:
        running += 1
    answers: Sequence[Tensor | None] = [None] * len(devices)
    try:
        while True:
            for k, (device, answer) in enumerate(zip(devices, answers)):
                generators.switch(k)
                device.resume(answer)
                if device.error is not None:
                    give_up([d.request for d in devices], device.error)
                    raise device.error
            if all(device.ended for device in devices):
                return [device.result for device in devices]
            answers = meet([device.request for device in devices])
            for device in devices:
                device.request = None
    finally:
        for device in devices:
            device.abandon()
        _local.turns.over, _local.turns = True, before
        generators.leave()
        with _running_lock:
            running -= 1
