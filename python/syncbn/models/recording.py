# SPDX-License-Identifier: Apache-2.0
"""Notes of a training that two runs can be compared by, on any two numbers of processes."""

import contextlib
import functools
import hashlib
import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..exchange import callers
from ..fingerprints import bytes_of, unwrapped
from ..nn import layers_of
from ..operators import DTYPES, HEADER_WORDS, MESSAGE_WORDS, ops

#: Digits of the first sum, of radix 2^52 (docs/numerics.md, section 2), and the largest one.
_FIRST = {torch.float16: 2, torch.bfloat16: 6, torch.float32: 6, torch.float64: 41}
_LARGEST = 2**52 - 1
#: Messages that are kept until the optimizer's step.
_MOST_KEPT = 1024


class _Notes:
    """Writes notes. file: None on all ranks but one, which write none."""

    def __init__(self, module: nn.Module, file: TextIO | None) -> None:
        self._names = {id(p): unwrapped(name) for name, p in module.named_parameters()}
        self._steps: Counter[tuple[str, str]] = Counter()
        self._kept: list[tuple] = []
        self._file = file

    def _note(self, name: str, what: str, value: str) -> None:
        """One line of the file: step, layer or parameter, what is noted of it, and the value."""
        self._steps[name, what] += 1
        print(json.dumps([self._steps[name, what] - 1, name, what, value]), file=self._file)

    def keep_sums(
        self, name: str, direction: str, ranks: int, channels: int, merged: Tensor, more: Any
    ) -> None:
        if self._file is not None:
            self._kept.append((name, direction, ranks, channels, merged, more))
            if len(self._kept) == _MOST_KEPT:
                self.note_kept()

    def note_kept(self) -> None:
        for (name, direction, *_), value in zip(self._kept, _hashes_of_sums(self._kept)):
            self._note(name, direction, value)
        self._kept = []

    @torch.no_grad()
    def note_gradients(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._file is None:
            return
        self.note_kept()
        given = [p for group in optimizer.param_groups for p in group["params"]]
        named = [p for p in given if id(p) in self._names and p.grad is not None]
        sums = [_sum_of_bits(p.grad) for p in named]
        values = torch.stack(sums).tolist() if sums else []
        for p, value in zip(named, values):
            self._note(self._names[id(p)], "gradient", f"{value % 2**64:016x}")


@contextlib.contextmanager
def record(module: nn.Module, path: str | os.PathLike[str]) -> Iterator[None]:
    """Notes in a file, while a with block runs, what two trainings can be compared by.

        with syncbn.record(model, "run_a"):
            train_some_steps()

    For each step and synchronized layer it notes a hash of the exact sums of forward and backward,
    which neither the number of processes nor the order of samples changes, and at each step of a
    torch.optim optimizer the sum of the bits of each parameter's gradient. `python -m syncbn diff
    run_a run_b` names the first step and layer where two runs differ. Training has the same bits
    inside the block as outside. All ranks enter the block, and rank 0 writes the file. Layers in
    compiled graphs and with statistics="welford" are not noted.

    Args:
        module: the model, or what it is wrapped in.
        path: of the file, which is written over.

    Raises:
        OSError: the file cannot be written.
        RuntimeError: a layer is in another such block.
        ValueError: `module` is not a module.
    """
    layers = layers_of(module)
    for name, layer in layers:
        if layer.state.record is not None:
            raise RuntimeError(
                f"record: got {name or 'a layer'}, which is being recorded already, expected one "
                "block at a time"
            )
    writes = not callers.initialized() or dist.get_rank() == 0
    with open(path, "w", encoding="utf-8") if writes else contextlib.nullcontext() as file:
        notes = _Notes(module, file)
        for name, layer in layers:
            layer.state.record = functools.partial(notes.keep_sums, unwrapped(name))
        hook = register_optimizer_step_pre_hook(notes.note_gradients)
        try:
            yield
        finally:
            hook.remove()
            for _, layer in layers:
                layer.state.record = None
            notes.note_kept()


def _hashes_of_sums(kept: list[tuple]) -> list[str]:
    """Of what keep_sums() was told, all in one go: one by one they would take longer."""
    hashes = ["no samples"] * len(kept)
    rows: dict[torch.dtype, dict[int, Tensor]] = defaultdict(dict)
    for i, (_, _, ranks, channels, merged, more) in enumerate(kept):
        words = (merged if more is None else torch.cat([merged, more])).cpu()
        kind = int(ops.header(words[:HEADER_WORDS], ranks)[3])
        if kind >= 0:
            size = MESSAGE_WORDS[DTYPES[kind]]
            of_channels = words[HEADER_WORDS:][: channels * size]
            rows[DTYPES[kind]][i] = of_channels.view(channels, size)
    for dtype, own in rows.items():
        values = _values_of_sums(torch.cat([*own.values()]), dtype)
        for i, part in zip(own, values.split([len(each) for each in own.values()])):
            hashes[i] = hashlib.blake2b(bytes_of(part), digest_size=8).hexdigest()
    return hashes


def _values_of_sums(words: Tensor, dtype: torch.dtype) -> Tensor:
    """What the sums of channels are, whatever the number of ranks. The same sum has other digits on
    another number, as carries are left to the end. The digits' sum is the same modulo 2^52 - 1. Of
    counts of threads and ranks only whether they are 0."""
    *digits, flags = words.split_with_sizes(
        [_FIRST[dtype], MESSAGE_WORDS[dtype] - _FIRST[dtype] - 1, 1], 1
    )
    first, second = (((d & _LARGEST).sum(1) + (d >> 52).sum(1)) % _LARGEST for d in digits)
    counts = flags.squeeze(1).contiguous()
    for i in range(4):
        first |= (counts >> 15 * i & 0x7FFF).sign() << 52 + i
    return torch.stack([first, second], 1)


def _sum_of_bits(gradient: Any) -> Tensor:
    """Returns the sum of a gradient's bytes, taken as int64; zeros complete the last one."""
    flat = gradient.contiguous().view(-1)
    bytes_left = -flat.nbytes % 8
    if bytes_left or flat.storage_offset() * flat.itemsize % 8:  # it may lie anywhere in a bucket
        flat = nn.functional.pad(flat.view(torch.uint8), (0, bytes_left)).clone()
    return flat.view(torch.int64).sum()


def _lines(path: str | os.PathLike[str]) -> Iterator[list]:
    with open(path, encoding="utf-8") as file:
        yield from map(json.loads, file)


def first_difference(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> str | None:
    """A sentence about where two files of record() begin to differ; None if they do not."""
    for own, other in itertools.zip_longest(_lines(a), _lines(b)):
        if own == other:
            continue
        for path, ended, goes_on in ((a, own, other), (b, other, own)):
            if ended is None:
                return f"{path} ends before {_place(goes_on)}"
        if own[:3] == other[:3]:
            return f"{_place(own)}: {own[3]} in {a}, {other[3]} in {b}"
        return f"{a} goes on with {_place(own)}, {b} with {_place(other)}"
    return None


def _place(line: list) -> str:
    step, name, what, _ = line
    return f"step {step}, {name or 'the layer'}, {what}"
