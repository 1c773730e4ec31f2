# SPDX-License-Identifier: Apache-2.0
"""One process, many devices: data parallelism whose synchronized layers see all devices at once."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .baton import Request, ThreadState, inside, run_in_turns
from .devices import give_up, train_on_devices
from .errors import DivergenceError
from .exchange import callers, groups, host
from .exchange.call import Call, Peers, Said, tag_of
from .exchange.transport import SUMMED
from .exchange.tree import Tree
from .exchange.turn import refuse_on_host
from .nn import SyncBatchNorm
from .step.options import check_module
from .step.surroundings import Streams, is_fake, refuse_tracing

__all__ = ["AllReduce", "SelfDataParallel", "all_reduce", "fixed_order_hook"]


class AllReduce(torch.autograd.Function):
    """The sum over devices and processes. Its gradient is the sum of the gradients.

    AllReduce.apply(None, *xs) sums over the devices of this process and returns a tuple of as many
    tensors. It can be differentiated any number of times. all_reduce checks its arguments and finds
    the group of ranks.
    """

    @staticmethod
    def forward(ctx: Any, group: Peers | None, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.streams = group, Streams(xs)
        total = xs[0].clone()
        for x in xs[1:]:  # in device order
            total += x.to(total.device)
        if group is not None:
            # Over the host: what differs in length would wait for ever in stream order.
            said = {"shape": tuple(total.shape)}
            call = Call("all_reduce", dtype=total.dtype, options=Said(said))
            host.agree(group, tag_of("all_reduce", total.dtype, said), call)
            total = host.transport_of(group, total.device).sum(total, None, call)
        return total, *(total.to(x.device, copy=True) for x in xs[1:])

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

    Each element is added in one binary tree over the ranks. The bits depend neither on buckets nor
    on the algorithm that NCCL or Gloo would choose.

    Args:
        process_group: that of the model; None is the default group.
        bucket: some gradients.

    Returns:
        Their averages.
    """
    tree = Tree(None, process_group)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(tree.total([bucket.buffer()]).div_(tree.processes))
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


def _copy_of(module: nn.Module, device: torch.device, tensors: dict[int, Tensor]) -> nn.Module:
    """Makes a copy of the module tree. tensors: copies by id; others are made here and added."""

    def copied(t: Tensor | None) -> Tensor | None:
        if t is not None and id(t) not in tensors:
            tensors[id(t)] = t.detach().to(device, copy=True)
        return None if t is None else tensors[id(t)]

    copies: dict[int, Any] = {id(m): m._replicate_for_data_parallel() for m in module.modules()}
    for m in module.modules():
        copy = copies[id(m)]
        copy._compiled_call_impl = None  # it calls the original
        for name, child in m._modules.items():
            copy._modules[name] = None if child is None else copies[id(child)]
        for name, parameter in m._parameters.items():
            # nn.LSTM watches the assignment; parameters() reads the dictionary.
            setattr(copy, name, copied(parameter))
            copy.__dict__.pop(name, None)
            copy._parameters[name] = copied(parameter)
        for name, buffer in m._buffers.items():
            copy._buffers[name] = copied(buffer)
    return copies[id(module)]


def _replicas(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """Makes a copy of the module per device, through which gradients flow to its parameters. The
    first device's copy has the module's own buffers, so that what it writes to them stays."""
    own = [*module.buffers(), *(p for p in module.parameters() if not p.requires_grad)]
    parameters = [p for p in module.parameters() if p.requires_grad]
    n = len(parameters)
    copies = _Replicate.apply(devices, *parameters) if n else ()
    replicas = []
    for k, device in enumerate(devices):
        tensors = {id(p): c for p, c in zip(parameters, copies[k * n : (k + 1) * n])}
        if k == 0:
            tensors.update((id(t), t) for t in own)
        replicas.append(_copy_of(module, device, tensors))
    return replicas


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

    The devices run one after the other up to a SyncBatchNorm in training mode. There the layer is
    computed for all of them at once, with the statistics of all their samples, and of all ranks if
    torch.distributed is initialized. All other modules are applied to each device alone. The model
    needs no change other than syncbn.convert_sync_batchnorm.

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

    def forward(self, inputs: Tensor | Sequence[Any]) -> list[Any]:
        """Runs one step.

        Args:
            inputs: a tensor, which is split along its first axis into one share per device. If it
                does not divide evenly, the first shares have one sample more. Or a list with one
                entry per device: a tensor, or the tuple of the module's arguments. Shares may be
                empty.

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
        arguments = self._scatter(inputs)
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if tensor.device != self.devices[0]:
                raise ValueError(
                    f"module: got {name} on {tensor.device}, expected {self.devices[0]}, the first "
                    "of the devices"
                )
        streams = [torch.cuda.current_stream(d) if d.type == "cuda" else None for d in self.devices]
        if len(self.devices) == 1:
            return [self._run(self.module, arguments[0], streams[0])]
        refuse_tracing("SelfDataParallel", None, len(self.devices))
        modules = [self.module] * len(self.devices)
        if self.replicate:
            modules = _replicas(self.module, self.devices)
        meeting = _Meeting(self.module, modules)
        calls = [functools.partial(self._run, *each) for each in zip(modules, arguments, streams)]
        return run_in_turns(calls, meeting.meet, meeting.give_up)

    @staticmethod
    def _run(
        module: nn.Module, arguments: tuple[Any, ...], stream: "torch.cuda.Stream | None"
    ) -> Any:
        with torch.cuda.stream(stream):  # and on its device; None on the CPU
            return module(*arguments)

    def _scatter(self, inputs: Tensor | Sequence[Any]) -> list[tuple]:
        """Gives the positional arguments of each device, on it."""
        count = len(self.devices)
        if isinstance(inputs, Tensor):
            if inputs.dim() == 0:
                raise ValueError("inputs: got a tensor without axes, expected (N, ...)")
            inputs = inputs.tensor_split(count)
        if not isinstance(inputs, (list, tuple)) or len(inputs) != count:
            got = len(inputs) if isinstance(inputs, (list, tuple)) else type(inputs).__name__
            raise ValueError(
                f"inputs: got {got}, expected a tensor or a list of {count}, one entry per device"
            )
        entries = (entry if isinstance(entry, tuple) else (entry,) for entry in inputs)
        return [
            tuple(value.to(device) if isinstance(value, Tensor) else value for value in entry)
            for entry, device in zip(entries, self.devices)
        ]

    def extra_repr(self) -> str:
        return f"devices={[str(d) for d in self.devices]}, replicate={self.replicate}"


class _Meeting:
    """What devices do at a layer: the list form of the layer that their copies were made from."""

    def __init__(self, module: nn.Module, modules: Sequence[nn.Module]) -> None:
        self._originals: dict[int, SyncBatchNorm] = {}
        self._names: dict[int, str] = {}
        for name, layer in module.named_modules():
            if isinstance(layer, SyncBatchNorm):
                self._names[id(layer)] = name or layer.state.name
        for other in modules:
            for layer, copy in zip(module.modules(), other.modules()):
                if isinstance(layer, SyncBatchNorm):
                    self._originals[id(copy)] = layer

    def _original(self, layer: SyncBatchNorm) -> SyncBatchNorm:
        return self._originals.get(id(layer), layer)

    def meet(self, requests: list[Request | None]) -> list[Tensor]:
        waiting = [r for r in requests if r is not None]
        ended = len(waiting) < len(requests)
        if ended or any(self._place(r) != self._place(waiting[0]) for r in waiting):
            error = DivergenceError(self._difference(requests))
            self.give_up(requests, error)
            raise error
        first = waiting[0]
        with first.state.entered():
            residuals = [r.residual for r in waiting if r.residual is not None]
            ys = train_on_devices(
                self._original(first.layer),
                [r.x for r in waiting],
                residuals or None,
                [r.mask for r in waiting],
            )
        node: Any = ys[0].grad_fn
        if node is not None:
            node._set_sequence_nr(max(r.number for r in waiting))
        return ys

    def give_up(self, requests: list[Request | None], error: BaseException) -> None:
        """Tells the other processes, at the layers where devices wait; where none does, at any
        that trains."""
        calls = [(self._original(r.layer), r.x) for r in requests if r is not None]
        trained = (layer for layer in self._originals.values() if layer.training and layer.sync)
        give_up(calls or [(layer, None) for layer in trained][:1], error)

    def _place(self, request: Request) -> tuple[int, ThreadState, bool]:
        residual = request.residual is not None
        return id(self._original(request.layer)), request.state, residual

    def _difference(self, requests: list[Request | None]) -> str:
        places: dict[str, list[str]] = {}
        for k, request in enumerate(requests):
            text = "finished"
            if request is not None:
                layer = self._original(request.layer)
                state = request.state
                autocast = [f"{kind} {dtype}" for kind, on, dtype in state.autocast if on]
                text = (
                    f"at layer {self._names.get(id(layer), layer.state.name)!r} (grad mode "
                    f"{state.grad}, inference mode {state.inference}, autocast "
                    f"{', '.join(autocast) or 'off'}, "
                    f"{'no' if request.residual is None else 'a'} residual)"
                )
            places.setdefault(text, []).append(str(k))
        return "the devices of this process did not make the same call: " + "; ".join(
            f"{'device' if len(ks) == 1 else 'devices'} {', '.join(ks)} {text}"
            for text, ks in places.items()
        )
