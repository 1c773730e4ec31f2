# SPDX-License-Identifier: Apache-2.0
"""One process, many devices: data parallelism whose synchronized layers see all devices at once."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .baton import Generators, inside, run_in_turns
from .exchange import callers, groups, host
from .exchange.call import Call, Peers, Said, tag_of
from .exchange.sums import Parties, exponent_of, mean_of, pack, unpack
from .exchange.transport import SUMMED
from .exchange.turn import refuse_on_host
from .meeting_point import Meeting
from .namespaces import Namespaces
from .step import recomputation
from .step.options import check_module
from .step.surroundings import Streams, is_fake, refuse_tracing

__all__ = ["AllReduce", "SelfDataParallel", "all_reduce", "fixed_order_hook"]


class AllReduce(torch.autograd.Function):
    """The sum over devices and processes. Its gradient is the sum of the gradients.

    AllReduce.apply(None, *xs) sums over the devices of this process and returns a tuple of as many
    tensors. AllReduce.apply(n, *xs) is PyTorch-Encoding's call: each device brings n tensors, and
    the k-th ones of all devices are summed. It can be differentiated any number of times.
    all_reduce checks its arguments and finds the group of ranks.
    """

    @staticmethod
    def forward(ctx: Any, group: Peers | int | None, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.streams = group, Streams(xs)
        n = group if isinstance(group, int) else 1
        if n < 1 or len(xs) % n:
            raise ValueError(
                f"num_inputs: got {n} for {len(xs)} tensors, expected how many each device brings"
            )
        totals = [x.clone() for x in xs[:n]]
        for k, x in enumerate(xs[n:]):  # in device order
            totals[k % n] += x.to(totals[k % n].device)
        if group is not None and not isinstance(group, int):
            total = totals[0]
            # Over the host: what differs in length would wait for ever in stream order.
            said = {"shape": tuple(total.shape)}
            call = Call("all_reduce", dtype=total.dtype, options=Said(said))
            host.agree(group, tag_of("all_reduce", total.dtype, said), call)
            way = host.transport_of(group, total.device)
            totals[0] = way.sum(total.contiguous(), None, call)
        copies = (totals[k % n].to(x.device, copy=True) for k, x in enumerate(xs[n:]))
        return *totals, *copies

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        ctx.streams.enter(gradients)
        sums = AllReduce.apply(ctx.group, *gradients)
        ctx.streams.leave(sums)
        return None, *sums


@overload
def all_reduce(x: Tensor, group: "callers.Group" = None) -> Tensor: ...


@overload
def all_reduce(x: Sequence[Tensor], group: "callers.Group" = None) -> list[Tensor]: ...


def all_reduce(
    x: Tensor | Sequence[Tensor], group: "callers.Group" = None
) -> Tensor | list[Tensor]:
    """Sums x over the devices of this process and the ranks of a process group.

    Args:
        x: a tensor, or a list of tensors of equal shape and dtype, one per device. For several
            ranks of a floating or complex dtype, bool, uint8, int8, int32 or int64; bool is or-ed.
        group: a process group or its name. None is the default group, or this process alone
            without torch.distributed.

    Returns:
        The sum, on the device of x; for a list the list of sums, each on the device of its x. The
        gradient of each x is the sum of the gradients of all results on all ranks. So all ranks
        must call backward, and their x must agree in requires_grad.

    Raises:
        ValueError: x is refused.
        DivergenceError: the ranks brought different shapes or dtypes. Every rank raises it.
    """
    xs = [x] if isinstance(x, Tensor) else x
    sharing = callers.sharing(group, None)
    refuse_tracing("syncbn.parallel.all_reduce", sharing)
    fake = isinstance(xs, (list, tuple)) and any(is_fake(x, None) for x in xs)
    peers = None if fake else groups.peers(sharing, "syncbn.parallel.all_reduce")
    try:
        _check_summands(xs, peers)
    except ValueError as error:
        refuse_on_host(peers, Call("all_reduce"), error)
        raise
    sums = AllReduce.apply(peers, *xs)
    return sums[0] if isinstance(x, Tensor) else list(sums)


def fixed_order_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Averages gradients over the ranks in one fixed order, as a communication hook of
    DistributedDataParallel: model.register_comm_hook(None, syncbn.parallel.fixed_order_hook).

    Gradients are rounded so that their sums in float64 are exact. The bits depend neither on
    buckets nor on the algorithm that NCCL or Gloo would choose.

    Args:
        process_group: that of the model; None is the default group.
        bucket: some gradients.

    Returns:
        Their averages.
    """
    parties = Parties(None, callers.sharing(process_group, None), "syncbn.fixed_order_hook")
    gradients = bucket.gradients()
    own = pack([exponent_of([gradient]) for gradient in gradients])
    words = parties.gather("bucket", {"gradients": len(gradients)}, own)
    exponents = unpack(words, len(gradients))
    for g, total in zip(gradients, parties.total("bucket", [[g] for g in gradients], exponents)):
        room = torch.empty_like(g, memory_format=torch.contiguous_format)
        g.copy_(mean_of(total, parties.processes, room))
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _check_summands(xs: Sequence[Tensor], peers: Peers | None) -> None:
    if not isinstance(xs, (list, tuple)) or not xs:
        raise ValueError(f"x: got {xs!r}, expected a tensor or a list of at least one tensor")
    for k, x in enumerate(xs):
        if not isinstance(x, Tensor):
            raise ValueError(f"x[{k}]: got {type(x).__name__}, expected a tensor")
        if x.shape != xs[0].shape or x.dtype != xs[0].dtype:
            raise ValueError(
                f"x[{k}]: got shape {tuple(x.shape)} and {x.dtype}, expected "
                f"{tuple(xs[0].shape)} and {xs[0].dtype} as in x[0]"
            )
    if peers is not None and xs[0].dtype not in SUMMED:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUMMED)
        raise ValueError(
            f"x: got {xs[0].dtype} for {peers.ranks} ranks, expected one of {dtypes}, which their "
            "process group can sum"
        )


class _Replicate(torch.autograd.Function):
    """Copies n tensors to K devices, device by device; gradients are summed in device order."""

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.homes = [t.device for t in tensors]
        copies = tuple(t.to(device, copy=True) for device in devices for t in tensors)
        ctx.streams = Streams(copies)
        return copies

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        ctx.streams.enter(gradients)
        totals: list[Tensor | None] = [None] * len(ctx.homes)
        for position, gradient in enumerate(gradients):
            if gradient is not None:
                i = position % len(ctx.homes)
                gradient = gradient.to(ctx.homes[i])
                totals[i] = gradient if totals[i] is None else totals[i] + gradient
        ctx.streams.leave(totals)
        return None, *totals


def _namespaces(module: nn.Module, devices: Sequence[torch.device]) -> Namespaces:
    """Makes a namespace of the module for each device, through which gradients flow to its
    parameters. The first device has the module's own buffers, so that what it writes to them
    stays."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    others = [*module.buffers(), *(p for p in module.parameters() if not p.requires_grad)]
    n = len(parameters)
    copies = _Replicate.apply(devices, *parameters) if n else ()
    substitutes = []
    for k, device in enumerate(devices):
        own = others if k == 0 else [t.detach().to(device, copy=True) for t in others]
        given = zip([*parameters, *others], [*copies[k * n : (k + 1) * n], *own])
        substitutes.append({id(t): other for t, other in given})
    return Namespaces(module, substitutes)


def _split(value: Any, devices: Sequence[torch.device]) -> list[Any]:
    """Gives each device its part of the tensors in a value, on it, and of all else the whole."""
    if isinstance(value, Tensor):
        if value.dim() == 0:
            raise ValueError("inputs: got a tensor without axes, expected (N, ...)")
        parts = value.tensor_split(len(devices))
        return [part.to(device) for part, device in zip(parts, devices)]
    if not isinstance(value, (list, tuple, dict)) or not value:
        return [value for _ in devices]
    if isinstance(value, dict):
        return [type(value)(own) for own in _split([*value.items()], devices)]
    make: Any = list if isinstance(value, list) else getattr(value, "_make", tuple)
    return [make(own) for own in zip(*(_split(item, devices) for item in value))]


def _device(device: torch.device | str | int) -> torch.device:
    with contextlib.suppress(RuntimeError, TypeError):
        found = torch.device(device)
        if found.type == "cpu":
            return torch.device("cpu")
        if found.type == "cuda" and found.index is not None:
            return found
    raise ValueError(f'devices: got {device}, expected "cpu", or "cuda:0" and so on')


class SelfDataParallel(nn.Module):
    """Runs a model on the shares of several devices of this process, as one step of one batch.

    The devices run one after the other up to a SyncBatchNorm in training mode, or an operator of
    syncbn.ops or syncbn.graph. There it is computed for all of them at once, with the statistics of
    all their samples, and of all ranks if torch.distributed is initialized. All other modules are
    applied to each device alone. The model needs no change other than
    syncbn.convert_sync_batchnorm.

    Running statistics are those of `module` and change once per step. Evaluation exchanges nothing.

    Args:
        module: the model, on devices[0].
        devices: CUDA devices, or any number of CPU devices, such as ["cpu"] * 4. A device may occur
            more than once. None: all CUDA devices.
        replicate: True gives each device its own copy of the parameters for the step, and adds the
            gradients to those of `module` in device order. False lets all devices use the
            parameters and buffers of `module`. None: True if the devices differ.

    Raises:
        ValueError: an argument is refused.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device | str | int] | None = None,
        replicate: bool | None = None,
    ) -> None:
        super().__init__()
        check_module(module)
        if devices is None:
            devices = [torch.device("cuda", k) for k in range(torch.cuda.device_count())]
        if not isinstance(devices, (list, tuple)):
            raise ValueError(f"devices: got {devices!r}, expected a list of devices, or None")
        self.devices = [_device(d) for d in devices]
        if not self.devices:
            raise ValueError(
                "devices: got none, expected at least one; without CUDA name them, for example "
                '["cpu"] * 4'
            )
        differ = len(set(self.devices)) > 1
        if differ and replicate is False:
            raise ValueError("replicate: got False, expected True or None where the devices differ")
        self.replicate = differ if replicate is None else replicate
        self.module = module

    def forward(self, *inputs: Any, **named_inputs: Any) -> list[Any]:
        """Runs one step.

        Args:
            inputs, named_inputs: the arguments of the module. Tensors in them, also those in
                tuples, lists and dictionaries, are split along their first axis into one share per
                device; all else goes to each device as it is. So torch.nn.DataParallel does, but
                where it does not divide evenly, the first shares have one sample more here, as of
                torch.tensor_split and not of torch.chunk. Shares may be empty. Or one list or
                tuple alone, with one entry per device: a tensor, or the tuple of the module's
                arguments.

        Returns:
            The list of the devices' outputs; torch.cat joins those of CPU devices. Add up the
            losses of all devices and call backward once, because a layer is one node of the graph.

        Raises:
            ValueError: an argument is refused.
            DivergenceError: the devices did not reach the same layer. The exchange that failed
                updates nothing. A device's own error passes through.
        """
        if inside():
            raise RuntimeError("SelfDataParallel: got a call inside another one, expected none")
        arguments = self._scatter(inputs, named_inputs)
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if tensor.device != self.devices[0]:
                raise ValueError(
                    f"module: got {name} on {tensor.device}, expected {self.devices[0]}, the first "
                    "of the devices"
                )
        streams = [torch.cuda.current_stream(d) if d.type == "cuda" else None for d in self.devices]
        if len(self.devices) == 1:
            return [self._run(self.module, *arguments[0], streams[0])]
        refuse_tracing("SelfDataParallel", None, len(self.devices))
        spaces = [_namespaces(self.module, self.devices)] if self.replicate else []
        meeting = Meeting(self.module, *spaces)
        calls = [
            functools.partial(self._run, self.module, *own, stream)
            for own, stream in zip(arguments, streams)
        ]
        worlds = [Generators(len(self.devices)), *spaces]
        with contextlib.ExitStack() as stack:
            for space in spaces:
                stack.enter_context(recomputation.wrapped(space.bound))
            outputs = run_in_turns(calls, meeting.meet, meeting.give_up, worlds, True)
        for space in spaces:  # buffers that the first device assigned
            for base, first in zip(space.base, space.spaces[0]):
                base["_buffers"].update(first["_buffers"])
        return outputs

    @staticmethod
    def _run(
        module: nn.Module, inputs: tuple, named: dict, stream: "torch.cuda.Stream | None"
    ) -> Any:
        with torch.cuda.stream(stream):  # and on its device; None on the CPU
            return module(*inputs, **named)

    def _scatter(self, inputs: tuple, named: dict) -> list[tuple[tuple, dict]]:
        """Gives the arguments of each device, on it."""
        entries = inputs[0] if len(inputs) == 1 and not named else None
        if not isinstance(entries, (list, tuple)):
            return _split((inputs, named), self.devices)
        count = len(self.devices)
        if len(entries) != count:
            raise ValueError(
                f"inputs: got {len(entries)}, expected a tensor or a list of {count}, one entry "
                "per device"
            )
        entries = [entry if isinstance(entry, tuple) else (entry,) for entry in entries]
        return [
            (tuple(v.to(device) if isinstance(v, Tensor) else v for v in entry), {})
            for entry, device in zip(entries, self.devices)
        ]

    def extra_repr(self) -> str:
        return f"devices={[str(d) for d in self.devices]}, replicate={self.replicate}"
