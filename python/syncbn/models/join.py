# SPDX-License-Identifier: Apache-2.0
"""Uneven numbers of batches: ranks that have none left go out of the exchanges."""

import functools
import sys
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.algorithms.join import Joinable, _JoinConfig
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.optim import Optimizer

from ..exchange import agreement, callers, failing, groups
from ..exchange.call import Call, tag_of
from ..exchange.host import engine_of
from ..nn import SyncBatchNorm
from .classes import wrapper
from .sharing import bring, prepare, sharings_of, statistics_of

_NAME = "syncbn.join"
#: The method of DistributedDataParallel that takes part in the others' backward pass.
_SHADOW = "_match_all_reduce_for_bwd_pass"
_OFF = _JoinConfig.construct_disabled_join_config()
_ON = _JoinConfig(enable=True, throw_on_early_termination=False, is_first_joinable=False)
_active: "_Inputs | None" = None


class _Inputs:
    """Knows which ranks still have inputs, as all ranks agree once per iteration."""

    def __init__(self, models: tuple[Any, ...], throw: bool, options: dict[str, Any]) -> None:
        self.models = nn.ModuleList(model for model in models if isinstance(model, nn.Module))
        self.joinables = [model for model in models if isinstance(model, Joinable)]
        self.ddp_models = [m for m in self.models if isinstance(m, DistributedDataParallel)]
        self.throw = throw
        given = [joinable.join_process_group for joinable in self.joinables]
        if any(group != given[0] for group in given):
            raise ValueError("models: got Joinables of several process groups, expected one")
        group = given[0] if given else dist.distributed_c10d._get_default_group()
        self.ranks = sorted(callers.global_ranks(group))
        self.layers = [m for m in self.models.modules() if isinstance(m, SyncBatchNorm)]
        for layer in (layer for layer in self.layers if layer.sync):
            members = callers.global_ranks(callers.resolve(layer.state.sharing.name))
            outside = set(members).difference(self.ranks)
            if outside:
                raise ValueError(
                    f"models: got layer {layer.state.name}, which shares statistics with ranks "
                    f"{sorted(outside)}, expected only ranks {self.ranks}, which join"
                )
        # The slowest layer's limit: an iteration may take as long.
        sharings = [layer.state.sharing for layer in self.layers if layer.sync]
        slowest = max(sharings, key=lambda s: s.timeout, default=callers.Sharing())
        limit = slowest.timeout if sharings else None
        peers = groups.peers(slowest._replace(name=group.group_name, limit=limit), _NAME)
        self.engine = None if peers is None else engine_of(peers)
        # What ranks must have in common for the exchange that ends the context.
        self.same = [
            (m.state.identity.name, m.num_features, m.track_running_stats) for m in self.layers
        ]
        self.call = Call(_NAME, 0, channels=sum(m.num_features for m in self.layers))
        #: iterations of each rank so far
        self.iterations = dict.fromkeys(self.ranks, 0)
        self.left = len(self.ranks)
        #: whether the error that ends the context was raised on all ranks
        self.known_error = False
        self.hooks: list[Any] = []
        #: by model: the hooks that notice its next backward pass
        self.awaited: dict[nn.Module, list[Any]] = {}
        self.join_hooks = [joinable.join_hook(**options) for joinable in self.joinables]

    def meet(self, has_input: bool) -> int:
        """Tells how many ranks have an input for the next iteration; all ranks call it together."""
        what = "next input" if has_input else "no more inputs"
        self.call = self.call._replace(number=(self.call.number or 0) + 1, direction=what)
        numbers = self._agree(int(has_input), "", self.call)
        present = [rank for rank, number in zip(self.ranks, numbers, strict=True) if number]
        absent = [rank for rank in self.ranks if rank not in present]
        if self.throw and present and absent:
            self.known_error = True
            raise RuntimeError(
                f"{self.call}: ranks {absent} have exhausted their inputs, ranks {present} "
                "have not (throw_on_early_termination)"
            )
        for rank in present:
            self.iterations[rank] += 1
        if has_input and len(present) < self.left:
            groups.leave_out(absent)
            prepare(self.models)
        self.left = len(present)
        return self.left

    def _agree(self, number: int, what: str, call: Call) -> list[int]:
        self.known_error = True
        numbers = agreement.numbers_of_ranks(number, tag_of(self.same, what), self.engine, call)
        self.known_error = False
        return numbers

    def confirm(self, what: str) -> None:
        """Begins what ranks cannot leave once they wait in it: collectives of a joinable. A rank
        that does not come, because of an error, tells that instead."""
        self._agree(0, what, self.call._replace(direction=what))

    def refuse_compiled_around(self) -> None:
        """A compiled caller of the first model goes on with the group of all ranks."""
        if self.call.number or "torch._dynamo" not in sys.modules:
            return
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == "compile_wrapper":
                raise RuntimeError(
                    "syncbn.join: got a call of the first model from compiled code, expected "
                    "torch.compile inside of it: DistributedDataParallel(torch.compile(module))"
                )
            frame = frame.f_back

    def enter(self) -> None:
        """Has each iteration begin with the ranks' agreement from now on."""

        def begin(model: nn.Module, _args: Any) -> None:
            self.refuse_compiled_around()
            # A model that evaluates exchanges nothing, unless it is one that notifies nevertheless.
            if isinstance(model, Joinable) or any(layer.training for layer in self.layers):
                self.meet(has_input=True)
                self._divide_by_number_of_ranks()

        def come(model: nn.Module, _args: Any) -> None:
            self.confirm("forward of another model")

        disable = torch.compiler.disable if "torch._dynamo" in sys.modules else lambda f: f
        for model in {self.models[0]: None} | dict.fromkeys(self.ddp_models):
            # After the hooks of the caller's, which may raise; the layers in a plain model's come
            # after the agreement.
            hook = disable(begin if model is self.models[0] else come)
            first = not isinstance(model, DistributedDataParallel)
            self.hooks.append(model.register_forward_pre_hook(hook, prepend=first))
        for model in self.ddp_models:
            refuse = model.register_forward_pre_hook(_refuse_without_backward, prepend=True)
            self.hooks += [refuse, model.register_forward_hook(disable(self._await_backward))]
        for joinable in self.joinables:
            optimizer = getattr(joinable, "optim", None)  # ZeroRedundancyOptimizer's own
            if isinstance(optimizer, Optimizer):
                self.hooks.append(optimizer.register_step_post_hook(self._after_local_step))
        for joinable in self.joinables:
            joinable._join_config = _ON

    def _await_backward(self, model: nn.Module, _args: Any, output: Any) -> None:
        """Has the model's next backward pass begin and end together on all ranks: at its end they
        wait for gradients."""
        if not (torch.is_grad_enabled() and model.require_backward_grad_sync):
            return
        self._forget_backward(model)

        def begin(_gradient: torch.Tensor) -> None:
            if self._forget_backward(model):
                self.confirm("backward")
                Variable._execution_engine.queue_callback(lambda: self.confirm("gradients"))

        tensors = [t for t in distributed._find_tensors(output) if t.requires_grad]
        # An output may be in an object of which nothing is known.
        tensors = tensors or [p for p in model.parameters() if p.requires_grad]
        self.awaited[model] = [tensor.register_hook(begin) for tensor in tensors]

    def _forget_backward(self, model: nn.Module) -> bool:
        """Tells whether a backward pass was awaited."""
        hooks = self.awaited.pop(model, [])
        for hook in hooks:
            hook.remove()
        return bool(hooks)

    def _after_local_step(self, *_given: Any) -> None:
        self.confirm("parameters")

    def end(self) -> None:
        """Plays the collectives of the joinables until no rank has inputs; then all are equal."""
        for model in self.ddp_models:
            vars(model)[_SHADOW] = functools.partial(self._shadow_backward, model)
        last = True
        while self.meet(has_input=False):
            last = False
            for joinable, hook in zip(self.joinables, self.join_hooks, strict=True):
                if isinstance(joinable, DistributedDataParallel) and joinable is not self.models[0]:
                    self.confirm("forward of another model")
                hook.main_hook()
        for hook in self.join_hooks:
            hook.post_hook(last)
        self.leave()
        self.share_statistics()

    def _shadow_backward(self, model: DistributedDataParallel) -> None:
        self.confirm("backward")
        self.confirm("gradients")
        getattr(type(model), _SHADOW)(model)

    def _divide_by_number_of_ranks(self) -> None:
        """Says the number of ranks, which DistributedDataParallel takes for a notification."""
        for model in self.ddp_models:
            if not model._divide_by_initial_world_size:
                future: torch.futures.Future = torch.futures.Future()
                future.set_result([torch.tensor([float(self.left)])])
                c10d: Any = torch._C._distributed_c10d  # whose stubs lack the function
                work = c10d._create_work_from_future(future)
                model.reducer._set_forward_pass_work_handle(work, False)

    def leave(self) -> None:
        """Puts all back as before the context. Join itself leaves its joinables notifying ranks
        that do not listen any more, and DDP dividing by the last iteration's number of ranks."""
        global _active
        if _active is not self:
            return
        _active = None
        for hook in self.hooks:
            hook.remove()
        for model in self.ddp_models:
            self._forget_backward(model)
            vars(model).pop(_SHADOW, None)
        for joinable in self.joinables:
            joinable._join_config = _OFF
        for model in self.ddp_models:
            none: Any = None  # as PyTorch itself passes it, which its stubs do not know
            model.reducer._set_forward_pass_work_handle(none, True)
        groups.leave_out(())

    def tell(self, error: BaseException) -> None:
        """Raises on the other ranks, which may wait for this one in a layer, and come to an
        agreement else. Waits for nobody."""
        if self.engine is None or self.known_error:
            return
        own = self.engine.peers
        know = [getattr(error, name, None) for name in ("group_name", "told_to")]
        call = self.call._replace(layer=f"{_NAME} on {own}")
        made = map(groups.made, sharings_of(self.models))
        apart = [p for p in made if p is not None and p.group_name not in (own.group_name, *know)]
        for peers in dict.fromkeys([*groups.without_absent(), *apart]):
            failing.abandon(peers, call, error)
        if own.group_name not in know:
            self.engine.refuse(self.call, error)

    def share_statistics(self) -> None:
        """Brings what the layers of a group have recorded to its ranks that went out."""
        if len(set(self.iterations.values())) == 1:
            return
        for sharing in sharings_of(self.models):
            peers = groups.peers(sharing, _NAME)
            if peers is None:
                continue
            ranks = sorted(callers.global_ranks(callers.resolve(sharing.name)))
            source = max(ranks, key=lambda rank: (self.iterations[rank], rank))
            tensors = [
                tensor
                for layer in self.layers
                if layer.sync and layer.state.sharing == sharing
                for tensor in (*statistics_of(layer), layer.state.call, layer.state.count)
            ]
            end = self.call._replace(direction="end")
            bring(tensors, ranks[peers.rank] == source, engine_of(peers), end)


def _check(models: tuple[Any, ...]) -> None:
    if not models or not isinstance(models[0], nn.Module):
        got = type(models[0]).__name__ if models else "nothing"
        raise ValueError(f"models: got {got} first, expected the model that each iteration calls")
    for model in models:
        if not isinstance(model, (nn.Module, Joinable)):
            raise ValueError(f"models: got {type(model).__name__}, expected modules and Joinables")
        for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
            name = type(module).__name__
            if (wrapper(module) or "").startswith("sharded"):
                raise ValueError(
                    f"models: got {name}, which has no join hook, expected DistributedDataParallel "
                    "or a plain module"
                )
            if isinstance(module, Joinable) and module is not model:
                raise ValueError(
                    f"models: got {type(model).__name__} with a {name} inside (at {path}), "
                    f"expected the {name} itself"
                )
            if isinstance(module, nn.SyncBatchNorm) and not isinstance(module, SyncBatchNorm):
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


class join:
    """A context manager for a training loop in which ranks have different numbers of batches.

    It takes the place of torch's Join and of DistributedDataParallel.join for models with
    synchronized layers. Ranks whose loop has ended leave the layers' exchanges. The others exchange
    among themselves, with the bits of a job that has only them. An iteration is one forward call of
    the first model. The ranks of the process group communicate at the beginning, at the end, once
    per iteration, and before collectives of DistributedDataParallel and ZeroRedundancyOptimizer, so
    that an error of one rank comes to those who would wait there. At the end all ranks of a group
    have the running statistics of those that were the last to have inputs.

    Args:
        models: first the model that each iteration calls, then other models and Joinables, such as
            ZeroRedundancyOptimizer, whose own collectives are shadowed as in torch's Join.
        enable: False switches the context off. So does the absence of a process group.
        throw_on_early_termination: True raises RuntimeError on every rank at the first iteration
            in which some ranks have an input and others do not.
        options: for the join hooks of all Joinables, such as divide_by_initial_world_size.

    Raises:
        ValueError: a model is FullyShardedDataParallel, contains a torch.nn.SyncBatchNorm, contains
            a DistributedDataParallel (give that itself), or has a layer that shares statistics with
            ranks outside the process group; or Joinables have different process groups.
        RuntimeError: a context is inside another one; or a DistributedDataParallel ran forward
            under torch.no_grad, so that ranks without inputs would wait for its backward.
        DivergenceError, ExchangeTimeout, PeerLost: the models differ between ranks; or a rank has
            raised an error (the text quotes it), does not come, or has ended.
    """

    def __init__(
        self,
        *models: nn.Module | Joinable,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **options: Any,
    ) -> None:
        _check(models)
        self._models, self._options = models, options
        self._enable, self._throw = enable, throw_on_early_termination
        self._inputs: _Inputs | None = None

    def __enter__(self) -> None:
        global _active
        if not (self._enable and callers.initialized()):
            return
        if _active is not None:
            raise RuntimeError(
                f"{_NAME}: got a context inside another one, expected one context for all models"
            )
        self._inputs = _active = _Inputs(self._models, self._throw, self._options)
        self._inputs.enter()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            return
        try:
            if error is None:
                inputs.end()
        except BaseException as at_the_end:
            error = at_the_end
            raise
        finally:
            try:
                if error is not None:
                    inputs.tell(error)
            finally:
                inputs.leave()
