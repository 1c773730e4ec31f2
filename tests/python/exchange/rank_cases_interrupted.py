# SPDX-License-Identifier: Apache-2.0
"""A rank that leaves an exchange, or a step around it, by an exception of its own: the others hear
of it at once and do not wait their limit; run by test_distributed.py as rank_cases.py is."""

import contextlib
import functools
import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import syncbn
from rank_cases import diverges, raises, unchanged
from syncbn.exchange import agreement, connections, failing, host, transport
from syncbn.step import node, training

LIMIT = 100.0
#: Seconds in which the others have the error. Over Gloo they look at the store meanwhile, and ask
#: where the ranks are; the machine may be busy.
SOON = 30.0
_MODULES = agreement, failing, connections, host, transport
_FILES = {module.__file__ for module in _MODULES}
_STEPS = node._BatchNormTraining.forward, training.forward, training.backward.__wrapped__
_CODES = {function.__code__ for function in _STEPS}


@contextlib.contextmanager
def _quick_looks():
    before, failing.INTERVAL = failing.INTERVAL, 0.1
    try:
        yield
    finally:
        failing.INTERVAL = before


def _layer(**options):
    return syncbn.SyncBatchNorm(4, timeout=LIMIT, **options)


def _step(layer, backward=True):
    y = layer(torch.linspace(0, 1, 12).view(3, 4).requires_grad_())
    if backward:
        y.square().sum().backward()


@contextlib.contextmanager
def _interrupt_at(line):
    """Ctrl-C at the line-th line that runs in the modules of an exchange, or in a step around."""
    left = [line]

    def trace(frame, event, _):
        if frame.f_code.co_filename not in _FILES and frame.f_code not in _CODES:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def _one_leaves(rank, layer, run, kind=KeyboardInterrupt) -> str:
    """Rank 0 runs that; the others make steps until they have an error, which is returned. Then the
    group is made anew. Returns rank 0's error; on the others whether their first exchange was
    "whole" or "lost"; "" if rank 0 had no error."""
    began, text = time.monotonic(), ""
    if rank == 0:
        try:
            run(layer)
        except kind as error:
            text = f"{type(error).__name__}: {error}"
    else:
        with contextlib.suppress(syncbn.PeerLost):
            _step(layer)
            text = "whole"
    raised = torch.tensor([bool(text)])
    dist.broadcast(raised, 0)
    if not raised:
        assert text in ("", "whole")
        return ""
    if rank != 0:
        if text == "whole":  # the exchange was over already; the next one fails
            raises(syncbn.PeerLost, "rank 0 left the group", _step, layer)
        raises(syncbn.PeerLost, "broken since", _step, layer)
    assert time.monotonic() - began < SOON
    if rank == 0:
        raises(syncbn.PeerLost, "broken since", _step, layer)
    syncbn.reset_groups(layer)
    return text or "lost"


def _is_shared(layer):
    return syncbn.report(layer)[0].engine == "shared memory"


def case_interrupts_at_lines(rank, world):
    """Of forward's exchange and of backward's; at every one in the weekly run, on 2 ranks that
    share memory: each takes a group of its own, elsewhere longer."""
    layer = _layer()
    _step(layer)
    weekly = "SYNCBN_WORLDS" in os.environ
    stride = (1 if weekly and world == 2 else 11) if _is_shared(layer) else 29
    with _quick_looks():
        for line in range(0, 400, stride):

            def run(layer, line=line):
                with _interrupt_at(line):
                    _step(layer)

            if not _one_leaves(rank, layer, run):
                break
        else:
            assert not _is_shared(layer)
    _step(layer)


def _pages():
    return int(Path("/proc/self/statm").read_text().split()[0])


def _settled_pages():
    """When threads of earlier groups have ended, which gives memory back."""
    seen = [_pages()]
    while len(seen) < 50 and (len(seen) < 4 or len(set(seen[-4:])) > 1):
        time.sleep(0.2)
        seen.append(_pages())
    return seen[-1]


def _memory_left(limit):
    """At most so many bytes more for this process."""
    pages = _settled_pages()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + limit, hard))
    return soft, hard


def _without_memory(layer, run):
    layer.state.find_path()  # a pass over all objects, which takes memory of its own
    before = _memory_left(4 << 20)
    kept = []  # what earlier cases left in the heap
    try:
        with contextlib.suppress(RuntimeError):
            while True:
                kept.append(torch.empty(8 << 20, dtype=torch.uint8))
        run()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class _Raises(TorchDispatchMode):
    """In the place of the operator of that number, and of those after it if it goes on."""

    def __init__(self, at, goes_on):
        super().__init__()
        self.left, self.goes_on = at, goes_on

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == -1 or (self.goes_on and self.left < 0):
            raise ArithmeticError("a mode of the caller's")
        return func(*args, **(kwargs or {}))


def _updates(layer):
    """Running statistics and counters of each rank."""
    own = torch.cat([t.double().flatten() for t in (*layer.buffers(), layer.state.call)])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return every


def _mode_that_raises(options, call, first, stride, rank, world):
    """At the operators of a step from `first` on, once or from there on: the others hear of it at
    once, and updates are made on all ranks or on none."""
    x = torch.randn(3 + rank, 4, 2, 2, generator=torch.Generator().manual_seed(rank))
    layer = _layer(**options)
    call(layer, x)
    if not _is_shared(layer) and "momentum" not in options and "inplace" not in options:
        return  # each round takes seconds
    for at in range(first, 100, stride):
        mode = _Raises(at, goes_on=at % 2 == 1)
        begin, raised, over = time.monotonic(), False, torch.tensor(False)
        with _quick_looks():
            try:
                with mode if rank == 0 else contextlib.nullcontext():
                    call(layer, x)
                over.fill_(rank == 0 and mode.left >= 0)
            except ArithmeticError:
                raised = True
            except (syncbn.DivergenceError, syncbn.PeerLost):
                assert rank != 0
            assert time.monotonic() - begin < SOON, at
        assert rank != 0 or raised or over
        syncbn.reset_groups(layer)
        every = _updates(layer)
        assert all(torch.equal(every[0], other) for other in every), at
        dist.broadcast(over, 0)
        if over:
            break
    assert at > 5


def _refused_for_memory(rank, layer, run, direction):
    """Of rank 0; nothing was exchanged."""
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    calls = int(layer.state.call)
    if rank == 0:
        text = (
            f"SyncBatchNorm, call .*, {direction}, .* rank 0 of .*: memory: got none for a tensor"
        )
        raises(MemoryError, text, _without_memory, layer, run)
    else:
        text = "a rank raised an error: rank 0: .*MemoryError: memory: got none for a tensor of"
        diverges(text, run)
    unchanged(layer, before)
    assert int(layer.state.call) == calls


#: Options, and how the layer is called.
_FORMS = (
    ({}, lambda layer, x: layer(x)),
    ({"momentum": None}, lambda layer, x: layer(x)),
    ({"activation": "relu"}, lambda layer, x: layer(x, x.detach())),
    ({"statistics": "welford"}, lambda layer, x: layer(x)),
    # PyTorch's other form leaves its hooks behind after an exception.
    ({}, lambda layer, x: checkpoint(layer, x, use_reentrant=True)),
    ({}, lambda layer, x: layer([x, x])[0]),
)
_IN_PLACE = {"inplace": True, "activation": "leaky_relu"}
for _number, (_options, _call) in enumerate((*_FORMS, (_IN_PLACE, lambda layer, x: layer(x * 1)))):
    globals()[f"case_a_mode_that_raises_leaves_equal_statistics_{_number}"] = functools.partial(
        # The first operators are the caller's, or compare paths, alike in all forms.
        *(_mode_that_raises, _options, _call, *((14, 3) if _number else (0, 1)))
    )


def case_no_memory_for_the_output(rank, world):
    """What a direction writes is there before the exchange: no rank updates anything."""
    x = torch.randn(*((4, 4, 1024, 1024) if rank == 0 else (3, 4, 2, 2)))
    for number, (options, call) in enumerate(_FORMS):
        layer = _layer(**options)
        call(layer, torch.randn(3, 4, 2, 2))
        leaf = x.clone().requires_grad_()
        _refused_for_memory(rank, layer, functools.partial(call, layer, leaf), "forward")
        if number < 4:  # a checkpointed segment would run again, and needs more
            y = call(layer, leaf)
            dy = torch.ones(()).expand(y.shape)
            _refused_for_memory(rank, layer, functools.partial(y.backward, dy), "backward")
        call(layer, torch.randn(3, 4, 2, 2))
