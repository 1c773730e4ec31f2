# SPDX-License-Identifier: Apache-2.0
"""A layer with the inputs of several devices of one process: its list form, and K calls in K
threads, of which one runs at a time, that meet at it.

Device k runs until it reaches a synchronized layer or ends; then device k + 1 runs. When all K
wait at the same layer, the caller's thread computes the layer for all of them, and the round goes
on. The order is that of one thread, so nothing can deadlock. Each device has a CPU generator of its
own.
"""

import contextlib
import itertools
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .operators import without_modes
from .step import recomputation
from .step.autograd import apply_step, tell
from .step.masks import check_mask
from .step.options import RUNNING, check_arguments, check_counter, check_options, check_plain
from .step.surroundings import check_transforms, like_operators, plain, recorded, refuse_tracing
from .step.training import has_samples

#: The digits of a message have room for this many (docs/numerics.md).
MAX_DEVICES = 2048
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


def inside() -> bool:
    """Tells whether this thread runs one device of several."""
    return getattr(_local, "device", None) is not None


@torch.compiler.disable
def wait(layer: Any, x: Tensor, residual: Tensor | None, mask: Tensor | None) -> Tensor:
    """Gives the layer's output for this device, once all devices have reached the layer."""
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
        generators.leave()
        with _running_lock:
            running -= 1


def _check_list(name: str, tensors, xs: Sequence[Tensor]) -> None:
    if not isinstance(tensors, (list, tuple)) or len(tensors) != len(xs):
        given = len(tensors) if isinstance(tensors, (list, tuple)) else type(tensors).__name__
        raise ValueError(f"{name}: got {given}, expected a list of {len(xs)}, one per input")


def _plain(tensors):
    return [plain(t) for t in tensors] if isinstance(tensors, (list, tuple)) else tensors


def _check_some(xs: Sequence[Tensor]) -> None:
    if not xs:
        raise ValueError("inputs: got an empty list, expected one tensor per device")


def _check_inputs(layer, xs: Sequence[Tensor], residuals, masks, ranks: int) -> None:
    _check_some(xs)
    if len(xs) * ranks > MAX_DEVICES:
        raise ValueError(
            f"inputs: got {len(xs)} devices in each of {ranks} processes, expected at most "
            f"{MAX_DEVICES} devices in all"
        )
    _check_list("residual", residuals, xs)
    _check_list("mask", masks, xs)
    for k, x in enumerate(xs):
        if not isinstance(x, Tensor):
            raise ValueError(f"inputs[{k}]: got {type(x).__name__}, expected a tensor")
        if x.device.type != xs[0].device.type:
            raise ValueError(
                f"inputs[{k}]: got a tensor on {x.device}, expected {xs[0].device.type}, as "
                "inputs[0]"
            )
        # The parameters lie on the first device and are copied to the others.
        tensors = (layer.running_mean, layer.running_var, layer.weight, layer.bias)
        try:
            mean, var, weight, bias = (None if t is None else t.to(x.device) for t in tensors)
            check_arguments(x, mean, var, weight, bias, residuals[k])
            if masks[k] is not None:
                check_mask(masks[k], x)
            check_plain(ranks == 1, input=x, residual=residuals[k], mask=masks[k])
        except ValueError as error:
            raise ValueError(f"inputs[{k}], of device {k}: {error}") from None
        if x.shape[1] != xs[0].shape[1]:
            raise ValueError(
                f"inputs[{k}]: got {x.shape[1]} channels, expected {xs[0].shape[1]}, those of "
                "inputs[0]"
            )
    filled = [k for k, x in enumerate(xs) if has_samples(x, masks[k])]
    for k in filled:
        if xs[k].dtype != xs[filled[0]].dtype:
            raise ValueError(
                f"inputs[{k}]: got {xs[k].dtype}, expected {xs[filled[0]].dtype}, the dtype of "
                f"inputs[{filled[0]}]"
            )


@recorded(lambda module, *_: module.state.name)
def train_step(
    module,
    xs: Sequence[Tensor],
    residuals: Sequence[Tensor | None] | None = None,
    masks: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """Makes a training forward of a SyncBatchNorm for all devices, and one change of statistics."""
    options, state = module.options(), module.state
    refuse_tracing(state, None, devices=2)
    zs = residuals if isinstance(residuals, (list, tuple)) else ()  # else refused below
    check_transforms(
        state,
        [
            *(("weight", module.weight), ("bias", module.bias)),
            *((f"inputs[{k}]", x) for k, x in enumerate(xs)),
            *((f"residual[{k}]", z) for k, z in enumerate(zs)),
        ],
    )
    peers = state.peers(options)
    none = [None] * len(xs)
    masks = none if masks is None else masks
    given = xs, residuals, masks
    xs, residuals, masks = map(_plain, given)
    inputs = [t for t in (xs, masks) if isinstance(t, (list, tuple))]  # else refused below
    segment = recomputation.segment(
        state, options, residuals is not None, *itertools.chain(*inputs)
    )
    residuals = none if residuals is None else residuals
    again = segment is not None and segment.kept is not None
    try:
        check_options(options)
        statistics = tuple(map(plain, module._tracked()))
        shared = dict(zip((*RUNNING, "weight", "bias"), (*statistics, *module._affine())))
        check_plain(peers is None, **shared)
        check_counter(options.momentum, *statistics)
        if options.statistics != "reproducible":
            raise ValueError(
                f"statistics: got {options.statistics!r} for a list of inputs, expected "
                "'reproducible', which does not depend on the number of devices"
            )
        if options.writes_over_input:
            raise ValueError("inplace: got True for a list of inputs, expected False")
        ranks = 1 if peers is None else peers.ranks
        _check_inputs(module, xs, residuals, masks, ranks)
        state.move(xs[0].device)
    except Exception as error:
        if not again:
            _tell(module, error, xs[0] if xs else None)
        raise
    masks = [None if mask is None else mask.contiguous() for mask in masks]
    weight, bias = map(plain, module._affine())
    step = (statistics, options, state, peers, segment)
    ys = apply_step(xs, weight, bias, residuals, masks, *step)
    ys = [ys] if len(xs) == 1 else ys
    if not again:
        state.had_list = True
    own = *module._tracked()[:2], *module._affine()
    return [like_operators(*each, *own) for each in zip(ys, *(t or none for t in given))]


def forward(
    module,
    xs: Sequence[Tensor],
    residuals: Sequence[Tensor | None] | None = None,
    masks: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """Calls a SyncBatchNorm with a list of inputs."""
    if not module.training:
        _check_some(xs)
        none = [None] * len(xs)
        residuals, masks = (none if t is None else t for t in (residuals, masks))
        _check_list("residual", residuals, xs)
        _check_list("mask", masks, xs)
        return [module(*each) for each in zip(xs, residuals, masks)]
    if inside():
        raise RuntimeError(
            f"{module.state.name}: got a list of inputs inside SelfDataParallel, expected the one "
            "tensor of this device"
        )
    return train_step(module, xs, residuals, masks)


def check_alone(module) -> None:
    """Refuses a training call for one device's samples where the statistics are meant for all."""
    if vars(module).get("_is_replica"):
        raise RuntimeError(
            f"{module.state.name}: got a call of one replica alone, as torch.nn.DataParallel "
            "makes, whose replicas cannot exchange statistics; expected "
            "syncbn.parallel.SelfDataParallel"
        )
    if module.state.had_list:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{module.state.name}: got one device's samples during a backward pass, expected "
                "those of all devices; activation checkpointing around a synchronized layer does "
                "not work inside syncbn.parallel.SelfDataParallel"
            )
        module.state.had_list = False


def _tell(module, error: BaseException, x: object) -> None:
    parameter = module.weight if module.running_mean is None else module.running_mean
    tell(error, module.state, x, parameter, module.options())


def give_up(calls: Iterable[tuple], error: BaseException) -> None:
    """Tells the other processes, once per group, that this one does not come to the exchange.

    calls: layers at which devices of this process wait, each with such a device's input.
    """
    # The error of the device is the one to raise, whatever becomes of this.
    with contextlib.suppress(Exception):
        groups = {module.state.peers(module.options()): (module, x) for module, x in calls}
        for module, x in groups.values():
            _tell(module, error, x)
