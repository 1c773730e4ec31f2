# SPDX-License-Identifier: Apache-2.0
"""Tensors so large that ranks exchange the sums of some channels while they compute those of
others; run by test_distributed.py as rank_cases.py is."""

import copy
import os
import signal
import threading
import time

import torch
import torch.distributed as dist

import syncbn
from rank_cases import diverges, unchanged

CHANNELS, PLANE = 40, 56
#: Samples of each rank: blocks in both directions, blocks in forward alone, none at all, one pass
#: after the other.
SAMPLES = (20, 7, 0, 1)


def _share(rank, number=0):
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(SAMPLES[rank % 4], CHANNELS, PLANE, PLANE, generator=generator)
    return x * torch.logspace(-4, 4, CHANNELS).view(1, -1, 1, 1)


def _step(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(x.detach() - 0.25)
    return y.detach(), x.grad


def _layers(**options):
    made = syncbn.SyncBatchNorm(CHANNELS, affine_grad="global", **options)
    alone = syncbn.SyncBatchNorm(CHANNELS, sync=False, **options)
    for layer in (made, alone):
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(-2, 3, CHANNELS))
            layer.bias.copy_(torch.linspace(1, -1, CHANNELS))
    return made, alone


def _assert_equal(layer, alone, given, expected, rank):
    own = slice(sum(SAMPLES[r % 4] for r in range(rank)), None)
    for mine, whole in zip(given, expected, strict=True):
        assert torch.equal(mine, whole[own][: len(mine)])
    for name, value in alone.named_buffers():
        assert torch.equal(layer.get_buffer(name), value), name
    assert torch.equal(layer.weight.grad, alone.weight.grad)
    assert torch.equal(layer.bias.grad, alone.bias.grad)


def case_large_tensors_exact(rank, world):
    for options in ({}, {"activation": "relu"}):
        layer, alone = _layers(**options)
        for number in range(2):
            expected = _step(alone, torch.cat([_share(r, number) for r in range(world)]))
            _assert_equal(layer, alone, _step(layer, _share(rank, number)), expected, rank)


def case_large_tensors_and_a_rank_that_is_stopped_now_and_then_exact(rank, world):
    """For longer than an operator waits, at any time, so that what has begun goes on in parts."""
    layer, alone = _layers()
    processes = [None] * world
    dist.all_gather_object(processes, os.getpid())
    over = threading.Event()

    def stop_now_and_then():
        number = 0
        while not over.wait(0.002 + 0.0007 * (number % 9)):
            number += 1
            os.kill(processes[number % (world - 1) + 1], signal.SIGSTOP)
            time.sleep(0.12)
            os.kill(processes[number % (world - 1) + 1], signal.SIGCONT)

    thread = threading.Thread(target=stop_now_and_then)
    if rank == 0:
        thread.start()
    try:
        for number in range(4):
            given = _step(layer, _share(rank, number))
            expected = _step(alone, torch.cat([_share(r, number) for r in range(world)]))
            _assert_equal(layer, alone, given, expected, rank)
    finally:
        over.set()
        if rank == 0:
            thread.join()
    dist.barrier()


def case_large_tensors_of_other_calls(rank, world):
    """One error on all ranks, and nothing is changed."""
    layer, _ = _layers()
    _step(layer, _share(rank))
    before = copy.deepcopy(layer.state_dict())
    layer.eps = 1e-5 if rank == 0 else 1e-3
    diverges("eps", _step, layer, _share(rank))
    unchanged(layer, before)
    layer.eps = 1e-5
    _step(layer, _share(rank))
    dist.barrier()
