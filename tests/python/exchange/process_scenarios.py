# SPDX-License-Identifier: Apache-2.0
"""Processes of their own for test_processes_and_threads.py; those about the interpreter's end are
`python process_scenarios.py NAME`. What a scenario asserts is in it."""

import atexit
import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import syncbn
from forking import equal, in_threads, passes_in_child, train
from support import raises


def new_layer() -> syncbn.SyncBatchNorm:
    return syncbn.SyncBatchNorm(8)


def scenario_forked_children_train():
    """Children of os.fork and of multiprocessing, whose forkserver's are those of most tests."""
    expected = train(new_layer())
    layer = new_layer()
    train(layer, steps=1, seed=7)

    def child():
        assert equal(train(new_layer()), expected)
        passes_in_child(lambda: check(equal(train(new_layer()), expected)))

    passes_in_child(child)
    for method in ("fork", "spawn"):
        context = mp.get_context(method)
        process = context.Process(target=_check_training, args=(expected,))
        process.start()
        process.join(100)
        assert process.exitcode == 0, method
    assert equal(train(new_layer()), expected)


def check(condition: bool) -> None:
    assert condition


def _check_training(expected):
    assert equal(train(new_layer()), expected)


def scenario_forked_children_do_not_wait_for_threads():
    """A layer that ran on several threads, in a child that has none of them. The child calls the
    layer alone: PyTorch's own operators wait there."""
    torch.set_num_threads(4)
    layer = syncbn.SyncBatchNorm(64)
    x = torch.randn(16, 64, 32, 32, requires_grad=True)
    dy = torch.randn(16, 64, 32, 32)

    def step():
        y = layer(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        return y.detach().numpy().tobytes(), dx.numpy().tobytes()

    expected = step()
    assert len(os.listdir("/proc/self/task")) > 1
    passes_in_child(lambda: check(step() == expected))
    assert step() == expected


def scenario_threads_call_different_layers():
    """Eight threads at once, forward and backward; then the same one after the other."""
    layers = [new_layer() for _ in range(8)]
    results = [None] * 8

    def run(i):
        results[i] = train(layers[i], 50, seed=i, samples=1 + i)

    in_threads(run, 8)
    for i in range(8):
        assert equal(results[i], train(new_layer(), 50, seed=i, samples=1 + i))


def scenario_threads_call_one_layer():
    """Outputs and gradients do not depend on each other; running statistics are not promised."""
    layer = syncbn.SyncBatchNorm(8, track_running_stats=False)
    xs = [torch.randn(6, 8, 5, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    expected = [_step(layer, x) for x in xs]
    wrong = []

    def run(i):
        wrong.extend(i for _ in range(50) if not equal(_step(layer, xs[i]), expected[i]))

    in_threads(run, 8)
    assert not wrong


def _step(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, layer.weight, layer.bias))]


def scenario_backward_in_another_thread():
    layer = new_layer()
    x = torch.randn(6, 8, 5)
    expected = _step(layer, x)
    x = x.requires_grad_()
    y = layer(x)
    found = []
    wanted = (x, layer.weight, layer.bias)
    in_threads(lambda i: found.extend(torch.autograd.grad(y.square().sum(), wanted)), 1)
    assert equal(found, expected[1:])


def _two_ranks(body) -> None:
    """Runs body(layer) on two ranks, each an interpreter of its own, which exchange through shared
    memory; it ends them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = []
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for rank in "01":
        arguments = [sys.executable, __file__, body.__name__, rank, str(store.port)]
        children.append(os.spawnve(os.P_NOWAIT, sys.executable, arguments, paths))
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert statuses == [0, 0], statuses


def _join_ranks(rank: int, port: int) -> syncbn.SyncBatchNorm:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    layer = syncbn.SyncBatchNorm(8, timeout=20)
    train(layer, 5)
    assert syncbn.report(layer)[0].engine == "shared memory"
    return layer


def exit_after_training(layer, rank):
    """Groups are open, nothing is destroyed, a graph is alive."""
    global kept
    kept = layer(torch.randn(4, 8, requires_grad=True))
    dist.barrier()
    sys.exit(0)


def interrupted(layer, rank):
    """Ctrl-C while a rank waits, and no further word."""
    if rank == 0:
        threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT)).start()
        raises(KeyboardInterrupt, "", layer, torch.randn(4, 8))
    dist.barrier()
    sys.exit(0)


def scenario_ranks_exit_after_training():
    _two_ranks(exit_after_training)


def scenario_ranks_exit_after_an_interrupt():
    _two_ranks(interrupted)


def scenario_exit_with_layers_in_atexit():
    """Layers that train while the interpreter ends, before and after this package's own step."""
    layer = new_layer()
    atexit.register(train, layer)
    train(layer)
    nn.Module.kept = layer
    sys.exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 4:
        rank = int(sys.argv[2])
        globals()[sys.argv[1]](_join_ranks(rank, int(sys.argv[3])), rank)
    else:
        globals()[f"scenario_{sys.argv[1]}"]()
