# SPDX-License-Identifier: Apache-2.0
"""Notes of a training that two runs can be compared by, on any two numbers of processes."""

import contextlib
import glob
import json
import os
import warnings
from collections.abc import Iterator
from io import RawIOBase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from ..exchange import callers
from ..fingerprints import fingerprint, inner, unwrapped
from ..nn import SyncBatchNorm, layers_of
from ..shares import Shares
from ..shares.checks import options_of
from ..step.node import is_layer

#: What is noted, in the order in which it depends on what came before.
_KINDS = ("environment", "parameter", "batch", "forward", "loss", "gradient")
#: Modules that are being recorded in this process.
_recorded: set[int] = set()


def _hash(value: Any) -> str:
    return fingerprint(value)[:16]


class _Notes:
    """Writes notes, a line of JSON each: step, kind, share (-1: all shares have it in common),
    number among its kind, name, value."""

    def __init__(self, module: nn.Module, training: Shares | None, file: RawIOBase) -> None:
        self._module, self._training, self._file = module, training, file
        self._paths = {id(m): unwrapped(path) for path, m in module.named_modules()}
        self._names = {id(p): unwrapped(name) for name, p in module.named_parameters()}
        self._steps = self._depth = self._at = 0
        self._numbers: dict[tuple[str, int], int] = {}
        self._writes = True
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        for name, option in options_of(device).items():
            self._note("environment", -1, name, option)

    def _note(self, kind: str, share: int, name: str, value: str, step: int = 0) -> None:
        if not self._writes:
            return
        if step != self._at:
            self._at = step
            self._numbers.clear()
        number = self._numbers[kind, share] = self._numbers.get((kind, share), -1) + 1
        try:
            line = [step, kind, share, number, name, value]
            self._file.write(f"{json.dumps(line)}\n".encode())
        except OSError as error:
            self._writes = False
            warnings.warn(f"syncbn.record: {error}; the notes end here", stacklevel=2)

    def share(self, share: int, batch: Any, loss: Tensor) -> None:
        """Notes what Shares tells of each share, after the forward."""
        step = self._training.steps  # type: ignore[union-attr]
        self._note("batch", share, "batch", _hash(_tensors(batch)), step)
        self._note("loss", share, "loss", _hash(loss), step)

    def forward(self, module: nn.Module, _: Any, output: Any) -> None:
        path = self._paths.get(id(module))
        if path is None or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        if self._training is not None:
            if (share := self._training.running()) is not None:
                self._note("forward", share, path, _hash(_tensors(output)), self._training.steps)
        elif isinstance(module, SyncBatchNorm):
            first = next(iter(_tensors(output)), None)
            if first is not None and is_layer(first.grad_fn):
                saved = first.grad_fn.saved_tensors[3]  # type: ignore[union-attr]
                statistics = saved[: 2 * first.shape[1]]
                self._note("forward", -1, path, _hash(statistics), self._steps)

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._depth += 1
        if self._depth > 1:  # an optimizer that steps another
            return
        if self._training is not None:
            self._steps = max(0, self._training.steps - 1)
        given = [p for group in optimizer.param_groups for p in group["params"]]
        named = [(self._names[id(p)], p) for p in given if id(p) in self._names]
        for name, p in reversed(named):  # as backward comes to them
            if p.grad is not None:
                self._note("gradient", -1, name, _hash(p.grad), self._steps)
        for name, p in named:
            self._note("parameter", -1, name, _hash(p), self._steps)

    def after(self, *_: object) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._steps += 1

    def end(self) -> None:
        """Notes what the last step of an optimizer made."""
        for p in self._module.parameters():
            self._note("parameter", -1, self._names[id(p)], _hash(p), self._steps)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _files(path: str | os.PathLike[str]) -> list[str]:
    """Gives those of all ranks."""
    others = [p for p in glob.glob(f"{glob.escape(str(path))}.*") if p.rpartition(".")[2].isdigit()]
    return [str(path), *sorted(others)]


@contextlib.contextmanager
def record(module: nn.Module, path: str | os.PathLike[str]) -> Iterator[None]:
    """Notes in a file, while a with block runs, what two trainings can be compared by.

        with syncbn.record(training, "run_a"):
            train_some_steps()

    For each step it notes hashes: of a syncbn.Shares the batch, the outputs of all modules and the
    loss of each share; of another model the mean and variance of each synchronized layer; and at
    each step of a torch.optim optimizer each gradient and parameter; and first of all the
    environment. `python -m syncbn diff run_a run_b` names the first thing in which two runs, or the
    ranks of one, differ. Training has the same bits inside the block as outside. All ranks enter
    the block; rank 0 writes the file, and rank r one with .r after its name. Layers in compiled
    graphs and with statistics="welford" are not noted.

    Args:
        module: a syncbn.Shares, a model, or what it is wrapped in.
        path: of the file, which is written over. Where it cannot be written, a warning says so, and
            nothing is noted.

    Raises:
        RuntimeError: the model is in another such block.
        ValueError: `module` is not a module.
    """
    layers_of(module)
    training, model = (module if isinstance(module, Shares) else None), inner(module)
    if id(model) in _recorded:
        raise RuntimeError(
            "record: got a model that is being recorded already, expected one block at a time"
        )
    there = callers.initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if there else (0, 1)
    with contextlib.ExitStack() as stack:
        try:
            if rank == 0:  # of an earlier run on more processes
                for old in _files(path)[1:]:
                    if int(old.rpartition(".")[2]) >= ranks:
                        os.remove(old)
            name = f"{os.fspath(path)}.{rank}" if rank else path
            file = stack.enter_context(open(name, "wb", buffering=0))
        except OSError as error:
            warnings.warn(f"syncbn.record: {error}; nothing is noted", stacklevel=3)
            yield
            return
        notes = _Notes(model, training, file)
        for handle in (
            register_module_forward_hook(notes.forward),
            register_optimizer_step_pre_hook(notes.before),
            register_optimizer_step_post_hook(notes.after),
        ):
            stack.callback(handle.remove)
        stack.callback(_recorded.discard, id(model))
        _recorded.add(id(model))
        if training is not None:
            stack.callback(setattr, training, "observer", None)
            training.observer = notes
        yield
        notes.end()


def _lines(path: str | os.PathLike[str]) -> dict[tuple, tuple[str, str]]:
    """The lines of all ranks: by step, kind, number and share the name and the value."""
    found: dict[tuple, tuple[str, str]] = {}
    for file in _files(path):
        with open(file, encoding="utf-8") as lines:
            for line in lines:
                try:
                    step, kind, share, number, name, value = json.loads(line)
                    place = int(step), _KINDS.index(kind), int(number), int(share)
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{file}: got {line!r:.80}, expected a note") from error
                if kind == "environment":
                    place = -1, 0, number, share
                if found.setdefault(place, (name, value)) != (name, value):
                    first = f"{path}, whose ranks differ"
                    raise _RanksDiffer(f"{first}: {_place(place, name)}")
    return found


class _RanksDiffer(Exception):
    pass


def first_difference(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> str | None:
    """A sentence about where two files of record() begin to differ; None if they do not."""
    try:
        own, other = _lines(a), _lines(b)
    except _RanksDiffer as error:
        return str(error)
    return _first(own, other, str(a), str(b))


def hash_of(path: str | os.PathLike[str]) -> str:
    """A hash of all that record() noted in a file, whatever the number of ranks."""
    try:
        return fingerprint(sorted(_lines(path).items()))[:32]
    except _RanksDiffer:
        return "none: its ranks differ"


def _first(own: dict, other: dict, a: str, b: str) -> str | None:
    for place in sorted(own.keys() | other.keys()):
        mine, theirs = own.get(place), other.get(place)
        if mine == theirs:
            continue
        for has, ended in ((theirs, a), (mine, b)):
            if has is not None and (mine is None or theirs is None):
                return f"{ended} has no {_place(place, has[0])}"
        assert mine is not None and theirs is not None
        if mine[0] == theirs[0]:
            return f"{_place(place, mine[0])}: {mine[1]} in {a}, {theirs[1]} in {b}"
        return f"{a} goes on with {_place(place, mine[0])}, {b} with {_place(place, theirs[0])}"
    return None


def _place(place: tuple, name: str) -> str:
    step, kind, _, share = place
    if step < 0:
        return f"environment, {name}"
    of = "" if share < 0 else f"share {share}, "
    what = name if name == _KINDS[kind] else f"{name or 'the model'}, {_KINDS[kind]}"
    return f"step {step}, {of}{what}"
