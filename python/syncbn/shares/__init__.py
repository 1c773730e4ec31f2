# SPDX-License-Identifier: Apache-2.0
"""Training that has the same bits on any number of processes: each batch is cut into V shares, and
the processes play them. Whatever their number, a share computes alone between synchronized layers,
with its own shapes and its own random numbers, and the gradients of all shares are added in one
binary tree."""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..baton import run_in_turns
from ..devices import give_up
from ..errors import DivergenceError, ExchangeTimeout, PeerLost
from ..exchange import callers
from ..exchange.tree import Tree
from ..nn import SyncBatchNorm
from ..parallel import _copy_of, _Meeting
from . import checks
from .data import Batches, Samples
from .gradients import gather, reduce
from .step import Generators, Step

__all__ = ["Shares"]


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

    Raises:
        ValueError: an argument is refused, or processes differ in what bits depend on. Every rank
            raises it.
    """

    def __init__(self, module: nn.Module, shares: int, seed: int = 0) -> None:
        super().__init__()
        processes = dist.get_world_size() if callers.initialized() else 1
        try:
            checks.check(module, shares, seed, processes)
        except ValueError as error:
            checks.agree(str(error), {}, processes)
            raise
        self.module, self.shares, self.seed, self.steps = module, shares, seed, 0
        self._tree = Tree(shares)
        tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        shapes = [
            (name, tuple(t.shape), t.dtype, t.requires_grad)
            for name, t in (*module.named_parameters(), *module.named_buffers())
        ]
        said = {"parameters and buffers": hex(checks.number_of(shapes)), **self._alike()}
        checks.agree("", said, processes)
        self._layers = [m for m in module.modules() if isinstance(m, SyncBatchNorm)]
        for layer in self._layers:
            layer.affine_grad = "global"
        for tensor in tensors:
            self._broadcast(tensor)
        self._trained: list[nn.Parameter] = []
        self._steps: list[Step] = []
        self._kept = self._nothing()
        self._syncs = True
        self._at: SyncBatchNorm | None = None

    @property
    def mine(self) -> range:
        """The numbers of this process's shares."""
        return self._tree.mine

    @torch.compiler.disable
    def forward(self, *inputs: Any, **named: Any) -> list[Any]:
        """Runs the model on this process's shares.

        Args:
            inputs, named: the model's arguments. A tensor is cut along its first axis into one
                equal part per share of this process; a list has one entry per share; anything else
                is given to every share.

        Returns:
            The list of the shares' outputs.

        Raises:
            ValueError: an argument is refused. Processes at a layer get a DivergenceError, as they
                do where the model raises an error.
        """
        training = self.training or any(layer.training for layer in self._layers)
        try:
            if not inputs and not named:
                raise ValueError("inputs: got none, expected the model's arguments")
            parts = [self._parts(f"inputs[{i}]", x) for i, x in enumerate(inputs)]
            of_names = {name: self._parts(name, x) for name, x in named.items()}
            arguments = [
                ([part[k] for part in parts], {name: part[k] for name, part in of_names.items()})
                for k in range(len(self.mine))
            ]
            for layer in self._layers if training else ():
                if layer.training and not layer.sync:
                    raise ValueError(
                        f"module: got {layer.state.name} with sync=False, expected sync=True"
                    )
            self._look_for_trained()
        except ValueError as error:
            if training:
                self._give_up([], error)
            raise
        if not training:
            return [self.module(*given, **options) for given, options in arguments]
        step = Step(self._trained, len(self.mine))
        modules = self._copies(step)
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def run(module: nn.Module, given: list, options: dict) -> Any:
            with torch.cuda.stream(stream):
                return module(*given, **options)

        calls: list[Callable[[], Any]] = [
            functools.partial(run, module, *each) for module, each in zip(modules, arguments)
        ]
        seeds = [checks.number_of(self.seed, self.steps, share) for share in self.mine]
        generators = Generators(seeds, self._device)
        if len(calls) == 1:
            generators.switch(0)
            self._at = None
            try:
                outputs = [calls[0]()]
            except Exception as error:
                if self._at is None:  # else the layer has told them
                    self._give_up([], error)
                raise
            finally:
                generators.leave()
        else:
            meet = _Meeting(self.module, modules).meet
            outputs = run_in_turns(calls, meet, self._give_up, generators)
        self.steps += 1
        for buffer in self._buffers_of_shares():
            self._broadcast(buffer)
        outputs = [step.cut(output) for output in outputs]
        if torch.is_grad_enabled():
            self._steps.append(step)
        return outputs

    def split(self, x: Tensor) -> list[Tensor]:
        """Cuts a tensor along its first axis, one equal part per share of this process."""
        return self._parts("x", x)

    def loader(
        self, dataset: Any, batch_size: int, *, shuffle: bool = True, **options: Any
    ) -> torch.utils.data.DataLoader:
        """Makes a DataLoader of this process's shares of each batch.

        A step's batch has the same samples for any number of processes, in an order that seed and
        epoch decide, and share v has the v-th part. A sample's random numbers come from seed, epoch
        and index, so augmentations do not depend on workers. Samples that make no whole batch are
        left out. Call loader.batch_sampler.set_epoch(epoch) before each epoch.

        Args:
            dataset: with indices and a length.
            batch_size: samples in a batch of all processes, a multiple of the number of shares.
            shuffle: False takes the samples in the dataset's order.
            options: of torch.utils.data.DataLoader, such as num_workers and collate_fn.

        Raises:
            ValueError: an argument is refused.
        """
        batches = Batches(dataset, batch_size, shuffle, self.seed, self.shares, self.mine)
        options = {"generator": torch.Generator()} | options  # the program's own is left alone
        samples = Samples(dataset, self.seed)
        return torch.utils.data.DataLoader(samples, batch_sampler=batches, **options)

    def backward(self, losses: Sequence[Tensor] | Tensor) -> None:
        """Adds the mean of all shares' gradients to the parameters' .grad.

        Args:
            losses: one number per share of this process, each from the output of that share; a
                tensor, where there is one share. Every process calls it.

        Raises:
            ValueError: the losses are not of that form, or not of outputs alone. The other
                processes get a DivergenceError.
            DivergenceError: processes brought gradients of other parameters, or of another step.
            ExchangeTimeout, PeerLost: a process did not come, or has ended.
        """
        steps, self._steps = self._steps, []
        try:
            self._gather_gradients(steps, [losses] if isinstance(losses, Tensor) else list(losses))
        except Exception as error:
            for step in steps:
                step.end()
            self._kept = self._nothing()  # they are not whole
            if not isinstance(error, (DivergenceError, ExchangeTimeout, PeerLost)):
                self._tree.refuse("backward", error)  # else the others got one, too
            raise
        del steps  # and the gradients that they hold
        if self._syncs:
            whole, self._kept = self._kept, self._nothing()
            named = self.module.named_parameters()
            frozen = ", ".join(name for name, p in named if not p.requires_grad)
            said = {"step": self.steps, "frozen parameters": frozen or "none"}
            self._tree.meet("backward", said)
            reduce(whole, self._trained, self._tree, self.shares)

    def _gather_gradients(self, steps: list[Step], losses: list[Tensor]) -> None:
        """Adds those of the losses to what is kept."""
        self._check("losses", losses, "numbers")
        for k, (kept, loss) in enumerate(zip(self._kept, losses)):
            gather(kept, self._apart(loss.backward))  # penalties on parameters, and the leaves'
            if any(step.reached(k) for step in steps):
                raise ValueError(
                    "losses: got one that reaches parameters past the outputs, expected outputs "
                    "that are tensors, or tuples, lists and dictionaries of them"
                )
        for step in steps:
            gather(self._kept[-1], self._apart(step.backward))
            for kept, aliases in zip(self._kept, step.aliases):
                gather(kept, [alias.grad for alias in aliases])

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Makes backward() keep the gradients of shares apart, without an exchange; the next one
        outside exchanges their sums."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def mean(self, values: Sequence[Tensor] | Tensor) -> Tensor:
        """The mean over all shares of tensors of one shape and a floating dtype, one per share of
        this process, with the same bits for any number of processes. Every process calls it."""
        values = [values] if isinstance(values, Tensor) else list(values)
        try:
            self._check("values", values, "tensors of one shape and dtype")
        except ValueError as error:
            self._tree.refuse("mean", error)
            raise
        flat = [value.detach().flatten() for value in values]
        said = {"shape": tuple(values[0].shape), "dtype": values[0].dtype}
        self._tree.meet("mean", said)
        return self._tree.total(flat).div_(self.shares).view(values[0].shape)

    def _check(self, name: str, values: list, kinds: str) -> None:
        tensors = [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]
        right = len(tensors) == len(values) == len(self.mine)
        if kinds == "numbers":
            right = right and all(x.numel() == 1 for x in tensors)
        else:
            right = right and len({(x.shape, x.dtype) for x in tensors}) == 1
        if not right:
            got = [tuple(x.shape) if isinstance(x, Tensor) else x for x in values]
            raise ValueError(
                f"{name}: got {got}, expected floating-point {kinds}, one for each of the "
                f"{len(self.mine)} shares of this process"
            )

    def _give_up(self, waiting: list, error: BaseException) -> None:
        """Tells the other processes, which are at a layer or come there."""
        if self._layers and self._tree.processes > 1:
            give_up([(self._layers[0], torch.empty(0, device=self._device))], error)

    def _alike(self) -> dict[str, Any]:
        """What all processes, and those that go on with a checkpoint, must have alike."""
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
        self.steps = state["steps"]

    def extra_repr(self) -> str:
        return f"shares={self.shares}, seed={self.seed}, processes={self._tree.processes}"

    def _look_for_trained(self) -> None:
        for name, p in self.module.named_parameters():
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise ValueError(
                    f"module: got a hook of the parameter {name!r}, expected none: gradients are "
                    "whole after backward() alone"
                )
        trained = [p for p in self.module.parameters() if p.requires_grad]
        if len(trained) == len(self._trained) and all(map(operator.is_, trained, self._trained)):
            return
        if self._steps or any(g is not None for kept in self._kept for g in kept):
            raise ValueError(
                "module: got other parameters that are trained, expected those of the forwards "
                "whose gradients have not been exchanged"
            )
        self._trained = trained
        self._kept = self._nothing()

    def _nothing(self) -> list[list[Tensor | None]]:
        """Gradients of each share of this process, and those of synchronized layers, which are
        exact sums over all shares."""
        return [[None] * len(self._trained) for _ in range(len(self.mine) + 1)]

    def _apart(self, run: Callable[[], None]) -> list[Tensor | None]:
        """What run() adds to the parameters' .grad, which stay as they were."""
        before = [p.grad for p in self._trained]
        try:
            for p in self._trained:
                p.grad = None
            run()
            return [p.grad for p in self._trained]
        finally:
            for p, grad in zip(self._trained, before):
                p.grad = grad

    def _parts(self, name: str, x: Any) -> list[Any]:
        count = len(self.mine)
        if isinstance(x, Tensor):
            if x.dim() == 0 or len(x) % count or len(x) == 0:
                raise ValueError(
                    f"{name}: got shape {tuple(x.shape)}, expected equal parts for the {count} "
                    "shares of this process along the first axis"
                )
            return list(x.chunk(count))
        if isinstance(x, (list, tuple)):
            if len(x) != count:
                raise ValueError(
                    f"{name}: got a list of {len(x)}, expected {count}, one entry per share of "
                    "this process"
                )
            return list(x)
        return [x] * count

    def _buffers_of_shares(self) -> list[Tensor]:
        """Buffers that forward may write to, other than those of synchronized layers: share 0's
        stay."""
        synchronized = {id(b) for layer in self._layers for b in layer.buffers(recurse=False)}
        return [b for b in self.module.buffers() if id(b) not in synchronized]

    def _copies(self, step: Step) -> list[nn.Module]:
        """A copy of the model per share."""
        own: list[Tensor] = [p for p in self.module.parameters() if not p.requires_grad]
        own += [b for layer in self._layers for b in layer.buffers(recurse=False)]
        copies = []
        for share, aliases in zip(self.mine, step.aliases):
            tensors = {id(p): alias for p, alias in zip(self._trained, aliases)}
            tensors |= {id(t): t for t in own}
            if share == 0:
                tensors |= {id(b): b for b in self._buffers_of_shares()}
            copies.append(_copy_of(self.module, self._device, tensors))
        if len(copies) == 1:  # else they meet at the model's layers
            for layer, copy in zip(self.module.modules(), copies[0].modules()):
                if isinstance(layer, SyncBatchNorm):
                    copy.forward = functools.partial(self._forward_of, layer)
        return copies

    def _forward_of(self, layer: SyncBatchNorm, *inputs: Any, **named: Any) -> Any:
        self._at = layer
        output = layer.forward(*inputs, **named)
        self._at = None
        return output

    def _broadcast(self, tensor: Tensor) -> None:
        if self._tree.processes > 1 and tensor.numel() > 0:
            with torch.no_grad():
                whole = tensor.detach().contiguous()
                dist.broadcast(whole.view(-1).view(torch.uint8), 0)  # groups know few dtypes
                tensor.copy_(whole)
