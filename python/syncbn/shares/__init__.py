# SPDX-License-Identifier: Apache-2.0
"""Training that has the same bits on any number of processes: each batch is made of V shares, and
the processes play them. Whatever their number, a share computes alone between synchronized layers,
with its own shapes, namespace and random numbers, and the sums of gradients are exact."""

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import devices
from ..errors import DivergenceError, ExchangeTimeout, PeerLost
from ..exchange import callers
from ..exchange.sums import NONE, Parties, exponent_of, pack, unpack
from ..fingerprints import fingerprint
from ..meeting_point import Meeting
from ..nn import SyncBatchNorm
from ..step import training as steps
from ..step.options import check_integer
from . import checks
from .data import Loader
from .gradients import add_means
from .streams import Streams, number_of
from .tensors import Tensors, bits
from .turns import LOOKS, Turns

__all__ = ["Shares"]

_log = logging.getLogger("syncbn")
_PLACE = (
    "expected training.step(loss, batches), and the network itself everywhere else: Shares takes "
    "the place of DistributedDataParallel, and is not wrapped, prepared, moved or called"
)


class Shares(nn.Module):
    """Trains a model on V shares of each batch, with the same bits on any number of processes.

    P processes of the default group, 1 to V of them, play the shares: each takes neighbouring ones,
    as evenly as can be. Without torch.distributed one process plays all. The parameters, buffers
    and optimizer states after each step are then the same, bit for bit, for every P, on one kind of
    processor, one version of PyTorch and one number of threads (docs/shares.md).

    Between synchronized layers a share computes alone. There its random numbers come from seed, the
    number of the step and the share. Gradients are means over the shares.

    Args:
        module: the model, on the device where it trains, with all batch norms synchronized. At the
            start all processes get the parameters and buffers of rank 0.
        shares: V, their number, at least that of processes.
        seed: of random numbers and of the order of samples.
        threads: of PyTorch in this process, which bits depend on. The constructor sets the number.
        compare_every: after how many steps the processes compare a hash of parameters and of the
            optimizers' states. 0: never.

    Raises:
        ValueError: an argument is refused, or processes differ in what bits depend on. Every rank
            raises it.
    """

    def __init__(
        self,
        module: nn.Module,
        shares: int,
        seed: int = 0,
        *,
        threads: int = 1,
        compare_every: int = 100,
    ) -> None:
        super().__init__()
        processes = dist.get_world_size() if callers.initialized() else 1
        options = {"shares": (shares, 1), "seed": (seed, 0), "threads": (threads, 1)}
        options["compare_every"] = compare_every, 0
        try:
            checks.check_module(module)
            self._layers = [m for m in module.modules() if isinstance(m, SyncBatchNorm)]
            own = callers.sharing(None, None)
            self._sharing = self._layers[0].state.sharing if self._layers else own
            checks.check(module, options, self._sharing, processes)
        except ValueError as error:
            checks.agree(str(error), {}, processes)
            raise
        if threads != torch.get_num_threads():
            _log.warning("Shares: %d threads now, %d before", threads, torch.get_num_threads())
            torch.set_num_threads(threads)
        self.module, self.shares, self.seed, self.steps = module, shares, seed, 0
        self._compare_every = compare_every
        tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        shapes = [
            (name, tuple(t.shape), t.dtype, t.requires_grad)
            for name, t in (*module.named_parameters(), *module.named_buffers())
        ]
        said = {"parameters and buffers": hex(number_of(shapes)), **self._alike()}
        checks.agree("", said, processes)
        self._parties = Parties(shares, self._sharing, "syncbn.Shares")
        for layer in self._layers:
            layer.affine_grad = "global"
        self._begin_with_rank_0(tensors)
        self._syncs = True
        self.observer: Any = None  # of syncbn.record
        self._loader: Loader | None = None
        self._begin()

    def _begin(self) -> None:
        """Makes what is not pickled."""
        self._tensors: Tensors | None = None
        self._exact: list[Tensor | None] = []
        self._looked: dict[Any, int] = {}
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._rates: list[float] = []
        own = weakref.ref(self)

        def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if (training := own()) is not None:
                training._note_optimizer(optimizer)

        weakref.finalize(self, register_optimizer_step_pre_hook(note).remove)

    def __getstate__(self) -> dict[str, Any]:
        private = ("_tensors", "_exact", "_looked", "_optimizers", "_rates", "_loader", "observer")
        return {n: v for n, v in vars(self).items() if n not in private}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._loader = self.observer = None
        self._begin()

    @property
    def mine(self) -> range:
        """The numbers of this process's shares."""
        return self._parties.mine

    def running(self) -> int | None:
        """The share that runs now, if any does."""
        at = None if self._tensors is None else self._tensors.spaces.at
        return None if at is None else self.mine[at]

    def forward(self, *inputs: Any, **named: Any) -> None:
        raise ValueError(f"Shares: got a call, {_PLACE}")

    def _apply(self, *arguments: Any, **named: Any) -> Any:
        raise ValueError(f"Shares: got a call of to() or the like, {_PLACE}")

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> None:
        """Refuses DistributedDataParallel, which asks for this first."""
        raise ValueError(f"Shares: got DistributedDataParallel around it, {_PLACE}")

    def loader(
        self, dataset: Any, batch_size: int, *, shuffle: bool = True, **options: Any
    ) -> Loader:
        """Makes the batches of this process's shares.

        An iteration is an epoch, or what is left of it: behind a break the next iteration goes on
        with the next batch. For each batch it gives a list of parts, one for each share of
        this process, which collate_fn made of the share's samples: share v has the v-th part of the
        batch. The order of samples comes from seed and epoch, a sample's random numbers from seed,
        epoch and index, and those of collate_fn from seed, epoch, batch and share; PyTorch's,
        NumPy's and Python's. Samples that make no whole batch are left out.

        Args:
            dataset: with indices and a length.
            batch_size: samples in a batch of all processes, a multiple of the number of shares.
            shuffle: False takes the samples in the dataset's order.
            options: of torch.utils.data.DataLoader, such as num_workers and collate_fn.

        Raises:
            ValueError: an argument is refused.
        """
        self._loader = Loader(dataset, batch_size, shuffle, self.seed, self._parties, options)
        return self._loader

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Makes step() keep the gradients of shares apart; the next one outside exchanges their
        sums."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @torch.compiler.disable
    def step(self, loss: Callable[[nn.Module, Any], Any], batches: Sequence[Any]) -> Any:
        """Makes forward and backward, and adds the mean of all shares' gradients to the parameters'
        .grad. Every process calls it.

        Args:
            loss: loss(model, batch) is called for each share of this process, in its turn, and
                returns the share's loss: a tensor of one number, or a dictionary of numbers in
                which "loss" is that one.
            batches: a list with one entry for each share of this process, as the loader gives it.

        Returns:
            The mean of the losses of all shares, with the same bits for any number of processes; of
            a dictionary the means of all its numbers.

        Raises:
            ValueError: an argument is refused, or the model does what would have other bits on
                other processes. The other processes get a DivergenceError, as they do where the
                model raises an error of its own.
            DivergenceError: the processes did not make the same step.
            ExchangeTimeout, PeerLost: a process did not come, or has ended.
        """
        try:
            tensors, looks = self._prepared(loss, batches)
            said = self._said() | {"step": self.steps}
            seeds = [number_of(self.seed, self.steps, share) for share in self.mine]
            streams, meet = Streams(seeds, self._device), Meeting(self.module, tensors.spaces).meet
            mine = Turns(tensors, self.mine, streams, self.module, meet)
            numbers, likes = mine.run(loss, batches, looks, self._exact, self.observer)
            said["numbers"] = list(likes)
            written = [free.name for free in tensors.written(looks)]
            exponents = [NONE] * len(tensors.trained)
            if self._syncs:
                own = [*zip(*[[a.grad for a in aliases] for aliases in tensors.aliases])]
                exponents = [exponent_of(grads) for grads in own] if own else []
        except BaseException as error:
            self._forget()
            self._tell(error)
            raise
        try:
            return self._exchange(tensors, said, exponents, written, numbers, likes, looks)
        except BaseException:
            self._forget()
            raise

    def _prepared(self, loss: Any, batches: Any) -> tuple[Tensors, int]:
        """Checks what the step begins with, and brings it to the namespaces. Gives the shares'
        tensors, and how many of the first steps of such a loss are left."""
        count = len(self.mine)
        if not callable(loss):
            raise ValueError(f"loss: got {loss!r}, expected a function of the model and a batch")
        if not isinstance(batches, (list, tuple)) or len(batches) != count:
            got = len(batches) if isinstance(batches, (list, tuple)) else type(batches).__name__
            raise ValueError(
                f"batches: got {got}, expected a list of {count}, one entry for each share of this "
                "process"
            )
        processes = dist.get_world_size() if callers.initialized() else 1
        if processes != self._parties.processes:
            raise ValueError(
                f"Shares: got {processes} processes, expected {self._parties.processes} as where "
                "it was made; make it after init_process_group, and load its state_dict"
            )
        for layer in self._layers:
            if not layer.sync or layer.state.sharing != self._sharing:
                raise ValueError(
                    f"module: got {layer.state.name} with sync={layer.sync} or another group than "
                    "in the constructor of Shares, expected sync=True and the default group still"
                )
        tensors = self._tensors
        if tensors is None or tensors.made_of != Tensors.key(self.module):
            if any(g is not None for g in self._grads(tensors)):
                raise ValueError(
                    "module: got other parameters that are trained, expected those of the steps "
                    "whose gradients have not been exchanged"
                )
            self._layers = [m for m in self.module.modules() if isinstance(m, SyncBatchNorm)]
            tensors = self._tensors = Tensors(self.module, self._layers, count)
            self._exact = [None] * len(tensors.trained)
            self._looked = {}
        for name, p in tensors.trained.items():
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise ValueError(
                    f"module: got a hook of the parameter {name!r}, expected none: gradients are "
                    "whole after step() alone"
                )
        key = getattr(loss, "func", loss)
        key = getattr(key, "__code__", type(key))
        self._looked[key] = self._looked.get(key, 0) + 1
        looks = max(LOOKS + 1 - self._looked[key], 0)
        tensors.refresh(looks)
        return tensors, looks

    def _said(self) -> dict[str, object]:
        """Gives what processes must have alike in a step, besides its number."""
        named = self.module.named_parameters()
        said: dict[str, object] = {"no_sync": not self._syncs, **checks.options_of(self._device)}
        said |= {} if self._loader is None else self._loader.said()
        said["frozen parameters"] = ", ".join(n for n, p in named if not p.requires_grad) or "none"
        said["learning rates"], self._rates = self._rates, []
        if self._compare_every and self.steps % self._compare_every == 0:
            said["parameters"] = _hash(self.module)
            said["optimizers"] = sorted(map(_hash, self._optimizers))
        return said

    def _note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        groups, tensors = optimizer.param_groups, self._tensors
        own = set() if tensors is None else {id(p) for p in tensors.trained.values()}
        if any(id(p) in own for group in groups for p in group["params"]):
            self._optimizers.add(optimizer)
            self._rates += [float(group["lr"]) for group in groups if "lr" in group]

    def _exchange(
        self,
        tensors: Tensors,
        said: dict[str, object],
        exponents: list[int],
        written: list[str],
        numbers: list[list[float]],
        likes: dict[str, Tensor],
        looks: int,
    ) -> Any:
        """Compares what processes must have alike, and adds up what their shares have."""
        parties, names = self._parties, {free.name: free for free in tensors.free}
        flags = [int(name in written and 0 in self.mine) for name in names]
        head = pack([*exponents, *flags])
        own = torch.zeros(self.shares, len(likes), dtype=torch.float64)
        own[self.mine.start : self.mine.stop] = torch.tensor(numbers, dtype=torch.float64)
        words = parties.gather("step", said, torch.cat([head, own.view(torch.int64).flatten()]))
        largest = unpack(words[:, : len(head)].contiguous(), len(exponents) + len(flags))
        trained = list(tensors.trained.values())
        if self._syncs:
            kept = [[a.grad for a in aliases] for aliases in tensors.aliases]
            for aliases in tensors.aliases:
                for alias in aliases:
                    alias.grad = None
            add_means(trained, kept, self._exact, largest, parties)
            self._exact = [None] * len(trained)
        changed = [n for n, flag in zip(names, largest[len(exponents) :]) if flag == 1]
        self._keep([names[n] for n in changed], tensors)
        if looks == 1:
            tensors.settle(changed)
        self.steps += 1
        values = words[:, len(head) :].sum(0).view(torch.float64).view(own.shape)
        means = {
            name: torch.tensor(_mean(column), dtype=like.dtype, device=like.device)
            for (name, like), column in zip(likes.items(), values.t().tolist())
        }
        return means["loss"] if "" in means else means

    def _keep(self, changed: list, tensors: Tensors) -> None:
        """Gives all processes what share 0 wrote."""
        if self._parties.processes == 1 or not changed:
            for free in changed:
                tensors.keep(free, None)
            return
        own = [bits(value) for value in tensors.first(changed)]
        whole = self._parties.of_first("buffers", torch.cat(own))
        for free, value in zip(changed, whole.split([len(each) for each in own])):
            tensors.keep(free, value)

    def _grads(self, tensors: Tensors | None) -> list[Tensor | None]:
        aliases = [] if tensors is None else tensors.aliases
        return [*self._exact, *(alias.grad for own in aliases for alias in own)]

    def _forget(self) -> None:
        """Drops gradients that are not whole."""
        self._exact = [None] * len(self._exact)
        for aliases in [] if self._tensors is None else self._tensors.aliases:
            for alias in aliases:
                alias.grad = None

    def _tell(self, error: BaseException) -> None:
        """Tells the other processes, which are at a layer or come to the end of the step."""
        if isinstance(error, (DivergenceError, ExchangeTimeout, PeerLost)):
            return
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in _OF_LAYERS:
                return  # which told them
            trace = trace.tb_next
        self._parties.refuse("step", error)

    def _begin_with_rank_0(self, tensors: list[Tensor]) -> None:
        for tensor in tensors if self._parties.processes > 1 else ():
            own = bits(tensor)
            whole = self._parties.of_first("begin", own)
            if not torch.equal(whole, own):
                with torch.no_grad():
                    tensor.copy_(whole.view(tensor.dtype).view(tensor.shape))

    def _alike(self) -> dict[str, Any]:
        """Gives what all processes, and those that continue a checkpoint, must have alike."""
        environment = checks.environment_of(self._device)
        return {"shares": self.shares, "seed": self.seed, **environment}

    def get_extra_state(self) -> dict[str, Any]:
        return {"steps": self.steps, **self._alike()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        for name, own in self._alike().items():
            if state.get(name) != own:
                raise ValueError(
                    f"state_dict: got one of a training with {name} {state.get(name)}, expected "
                    f"{own}: it would go on with other bits"
                )
        check_integer("state_dict: steps", state.get("steps"), 0)
        self.steps = state["steps"]

    def extra_repr(self) -> str:
        return f"shares={self.shares}, seed={self.seed}, processes={self._parties.processes}"


_backwards: list[Any] = [steps.backward, devices.gradients_of]
#: Where an error of a synchronized layer comes by.
_OF_LAYERS = {Meeting.meet.__code__, *(function.__wrapped__.__code__ for function in _backwards)}


def _hash(value: Any) -> str:
    try:
        return fingerprint(value)[:16]
    except ValueError:  # the state of an optimizer may hold anything
        return "of no kind that has a hash"


def _mean(values: list[float]) -> float:
    finite = all(map(math.isfinite, values))
    return (math.fsum(values) if finite else sum(values)) / len(values)
