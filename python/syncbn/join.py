"""Uneven numbers of batches: ranks that have none left go out of the exchanges."""

import contextlib
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from . import _collective, _exchange, _groups
from ._where import Call
from .errors import DivergenceError
from .nn import SyncBatchNorm
from .sharing import prepare, sharings_of

_NAME = "syncbn.join"
_entered = False


class _Inputs:
    """Which ranks still have inputs: agreed once per iteration, by all ranks."""

    def __init__(self, models: nn.ModuleList, group: dist.ProcessGroup, throw: bool) -> None:
        self.models, self.throw = models, throw
        self.ranks = sorted(_groups.global_ranks(group))
        self.layers = [m for m in models.modules() if isinstance(m, SyncBatchNorm)]
        for layer in (layer for layer in self.layers if layer.sync):
            members = _groups.global_ranks(_groups.resolve(layer.sharing.name))
            outside = set(members).difference(self.ranks)
            if outside:
                raise ValueError(
                    f"models: got layer {layer.layer_name}, which shares statistics with ranks "
                    f"{sorted(outside)}, expected only ranks {self.ranks}, which join"
                )
        # The slowest layer's limit: an iteration may take as long.
        slowest = max((m.sharing for m in self.layers), key=lambda s: s.timeout, default=None)
        sharing = _groups.sharing(group, None) if slowest is None else slowest
        self.peers = _groups.peers(sharing._replace(name=group.group_name))
        # What ranks must have in common for the exchange that ends the context.
        same = [(m.layer_name, m.num_features, m.track_running_stats) for m in self.layers]
        self.tag = zlib.crc32(repr(same).encode()) & 0xFFFFF
        self.call = Call(_NAME, 0, channels=sum(m.num_features for m in self.layers))
        #: iterations of each rank so far
        self.iterations = dict.fromkeys(self.ranks, 0)
        self.left = len(self.ranks)
        self.stance: Any = None
        #: whether the error that ends the context was raised on all ranks
        self.known_error = False

    def meet(self, has_input: bool) -> int:
        """How many ranks have an input for the next iteration. A collective call of all ranks."""
        what = "next input" if has_input else "no more inputs"
        self.call = self.call._replace(number=self.call.number + 1, direction=what)
        try:
            numbers = _exchange.numbers_of_ranks(int(has_input), self.tag, self.peers, self.call)
            present = [rank for rank, number in zip(self.ranks, numbers, strict=True) if number]
            absent = [rank for rank in self.ranks if rank not in present]
            if self.throw and present and absent:
                raise RuntimeError(
                    f"{self.call}: ranks {absent} have exhausted their inputs, ranks {present} "
                    "have not (throw_on_early_termination)"
                )
        except Exception:
            self.known_error = True
            raise
        for rank in present:
            self.iterations[rank] += 1
        if has_input and len(present) < self.left:
            self._go_on_without(absent)
        self.left = len(present)
        return self.left

    def refuse_compiled_around(self) -> None:
        """A compiled caller of the first model goes on with the group of all ranks."""
        if self.call.number or "torch._dynamo" not in sys.modules:
            return
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == "compile_wrapper":
                raise RuntimeError(
                    "syncbn.join: got a call of the first model from compiled code, expected "
                    "torch.compile inside of it: DistributedDataParallel(torch.compile(module))"
                )
            frame = frame.f_back

    def _go_on_without(self, absent: list[int]) -> None:
        _groups.leave_out(absent)
        # Compiled steps hold the groups of all ranks.
        if self.stance is None and "torch._dynamo" in sys.modules:
            self.stance = torch.compiler.set_stance("force_eager")
        prepare(self.models)

    def restore(self) -> None:
        _groups.leave_out(())
        if self.stance is not None:
            self.stance.__exit__(None, None, None)

    def tell(self, error: Exception) -> None:
        """Raises on the other ranks, which may wait for this one in meet(). Not for long: where
        they wait is not known."""
        if self.peers is None or self.known_error:
            return
        if not isinstance(error, DivergenceError) or error.group_name != self.peers.group_name:
            soon = self.peers._replace(timeout=min(self.peers.timeout, 5.0))
            _exchange.reject(soon, self.call, error)

    def share_statistics(self) -> None:
        """Brings what the layers of a group have recorded to its ranks that went out."""
        if len(set(self.iterations.values())) == 1:
            return
        for sharing in sharings_of(self.models):
            peers = _groups.peers(sharing)
            if peers is None:
                continue
            ranks = sorted(_groups.global_ranks(_groups.resolve(sharing.name)))
            source = max(ranks, key=lambda rank: (self.iterations[rank], rank))
            tensors = [
                tensor
                for layer in self.layers
                if layer.sync and layer.sharing == sharing
                for tensor in (
                    layer.running_mean,
                    layer.running_var,
                    layer.num_batches_tracked,
                    layer._call,
                )
                if tensor is not None
            ]
            words = torch.cat([_words(tensor) for tensor in tensors])
            if ranks[peers.rank] != source:
                words.zero_()
            words = _collective.all_reduce(words, peers, self.call._replace(direction="end"))
            sizes = [tensor.numel() for tensor in tensors]
            for tensor, part in zip(tensors, words.split(sizes), strict=True):
                values = part.view(torch.float64) if tensor.is_floating_point() else part
                tensor.copy_(values.view_as(tensor))


def _words(tensor: Tensor) -> Tensor:
    """int64, one per element: the sum with zeros is exact for them."""
    values = tensor.detach().flatten().cpu()
    return values.double().view(torch.int64) if values.is_floating_point() else values


class _NoJoinable(Joinable):
    """Stands where torch's Join wants at least one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def join_hook(self, **_options) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self._group


class _Loop(Join):
    """torch's Join, each of whose rounds begins with the ranks' agreement."""

    def __init__(self, joinables: list[Joinable], inputs: _Inputs, options: dict) -> None:
        super().__init__(joinables, **options)
        self.inputs = inputs

    def _get_num_nonjoined_procs(self) -> int:
        left = self.inputs.meet(has_input=False)
        if not isinstance(self._joinables[0], _NoJoinable):
            super()._get_num_nonjoined_procs()  # the first joinable's own notification
        return left

    def disable(self) -> None:
        """Join leaves its joinables notifying ranks that do not listen any more, and DDP, once it
        does not, dividing by the number of ranks that the last notification counted."""
        for joinable in self._joinables:
            config = joinable._join_config
            joinable._join_config = config.construct_disabled_join_config()
            if isinstance(joinable, DistributedDataParallel):
                joinable.reducer._set_forward_pass_work_handle(None, True)


def _check(models: tuple[Any, ...]) -> None:
    if not models or not isinstance(models[0], nn.Module):
        got = type(models[0]).__name__ if models else "nothing"
        raise ValueError(f"models: got {got} first, expected the model that each iteration calls")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = () if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    for model in models:
        if not isinstance(model, (nn.Module, Joinable)):
            raise ValueError(f"models: got {type(model).__name__}, expected modules and Joinables")
        for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
            name = type(module).__name__
            if isinstance(module, sharded):
                raise ValueError(
                    f"models: got {name}, which has no join hook, expected DistributedDataParallel "
                    "or a plain module"
                )
            if isinstance(module, Joinable) and module is not model:
                raise ValueError(
                    f"models: got {type(model).__name__} with a {name} inside (at {path}), "
                    f"expected the {name} itself"
                )
            if isinstance(module, nn.SyncBatchNorm):
                raise ValueError(
                    f"models: got torch.nn.SyncBatchNorm (at {path}), which would wait for ranks "
                    "without inputs, expected syncbn.SyncBatchNorm; see convert_sync_batchnorm"
                )


def _refuse_without_backward(model: DistributedDataParallel, _args: Any) -> None:
    if not torch.is_grad_enabled() and model.require_backward_grad_sync:
        raise RuntimeError(
            "syncbn.join: got a forward pass of DistributedDataParallel without gradients, "
            "expected one of model.module, or model.no_sync(): ranks without inputs would wait "
            "for its backward pass"
        )


@contextlib.contextmanager
def join(
    *models: nn.Module | Joinable,
    enable: bool = True,
    throw_on_early_termination: bool = False,
    **options: Any,
) -> Iterator[None]:
    """Context manager for a training loop in which ranks have different numbers of batches.

    Takes the place of torch's Join and of DistributedDataParallel.join for models with
    synchronized layers. Ranks whose loop has ended go out of the layers' exchanges; the others
    exchange among themselves, with the bits of a job that has only them. An iteration is one
    forward call of the first model. A collective call of the ranks of the process group, at the
    beginning, at the end, and once per iteration.

    Args:
        models: the model that each iteration calls; then other models, and other Joinables, such
            as ZeroRedundancyOptimizer. DistributedDataParallel's own collectives are shadowed as
            in torch's Join.
        enable: False does nothing; so does the absence of a process group.
        throw_on_early_termination: instead of going on, RuntimeError on every rank at the first
            iteration for which some ranks have an input and some have not.
        options: for the join hooks of all Joinables, such as divide_by_initial_world_size.

    At the end running statistics are those of the ranks that were the last of each group to have
    inputs, on all its ranks.

    Raises:
        ValueError: a model that cannot be joined: FullyShardedDataParallel, one with a
            torch.nn.SyncBatchNorm, one that holds a DistributedDataParallel (give that itself), or
            a layer that shares statistics with ranks outside the process group.
        RuntimeError: a context inside another one; a forward pass of DistributedDataParallel under
            torch.no_grad, whose backward pass ranks without inputs would wait for.
        DivergenceError, ExchangeTimeout, PeerLost: the models differ between ranks, a rank has
            raised an error (which is quoted), does not come, or has ended.
    """
    _check(models)
    if not (enable and dist.is_available() and dist.is_initialized()):
        yield
        return
    joinables = [model for model in models if isinstance(model, Joinable)]
    group = joinables[0].join_process_group if joinables else dist.group.WORLD
    modules = nn.ModuleList(model for model in models if isinstance(model, nn.Module))
    global _entered
    if _entered:
        raise RuntimeError("syncbn.join: got a context inside another one, expected one for all")
    inputs = _Inputs(modules, group, throw_on_early_termination)
    loop = _Loop(joinables or [_NoJoinable(group)], inputs, options)

    def begin(model: nn.Module, _args: Any) -> None:
        inputs.refuse_compiled_around()
        # A model that evaluates exchanges nothing, unless it is one that notifies nevertheless.
        if isinstance(model, Joinable) or any(layer.training for layer in inputs.layers):
            inputs.meet(has_input=True)

    if "torch._dynamo" in sys.modules:
        begin = torch.compiler.disable(begin)
    hooks = [models[0].register_forward_pre_hook(begin, prepend=True)]
    hooks += [
        model.register_forward_pre_hook(_refuse_without_backward, prepend=True)
        for model in joinables
        if isinstance(model, DistributedDataParallel)
    ]
    _entered = True
    failed = None
    try:
        with loop:
            yield
    except Exception as error:
        failed = error
        raise
    finally:
        _entered = False
        for hook in hooks:
            hook.remove()
        loop.disable()
        inputs.restore()
        if failed is not None:
            inputs.tell(failed)
    inputs.share_statistics()
