# SPDX-License-Identifier: Apache-2.0
"""Two processes on one GPU: over NCCL, which allows that to processes with different NCCL_HOSTID,
and over Gloo with CUDA tensors. torch.nn.SyncBatchNorm gives other bits for two ranks than for one,
and cannot run over Gloo."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rank_pairs import END, START, check, join_group, run_cases, run_here
from support import assert_same_layers, new_layer

BOUNDS = (0, 3, 8)
SHAPE = (8, 6, 5, 5)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def batch(seed: int) -> torch.Tensor:
    """Exponents over 60 binades: plain sums of them depend on their order."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-30, 31, SHAPE, generator=generator)
    return torch.ldexp(torch.randn(SHAPE, generator=generator), exponents)


class Pair:
    """A layer on two ranks, and the same without other ranks on the whole batch."""

    def __init__(self, rank: int, device: str):
        self.mine = slice(BOUNDS[rank], BOUNDS[rank + 1])
        options = {"affine_grad": "global"}
        self.layer = new_layer(6, **options).to(device)
        self.alone = new_layer(6, sync=False, **options).to(device)
        self.x = batch(0)[self.mine].to(device).requires_grad_()
        self.whole = batch(0).to(device).requires_grad_()

    def load(self, seed: int) -> None:
        with torch.no_grad():
            self.x.copy_(batch(seed)[self.mine])
            self.whole.copy_(batch(seed))

    @staticmethod
    def step(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        y.backward(x.detach().sign())
        return y.detach()

    def clear(self, of_ranks: bool = True) -> None:
        for leaf in (self.whole, self.alone.weight, self.alone.bias):
            leaf.grad = None
        for leaf in (self.x, self.layer.weight, self.layer.bias) if of_ranks else ():
            leaf.grad = None

    def compare(self, y: torch.Tensor) -> None:
        """y and the gradients at hand against a step of the whole batch."""
        self.clear(of_ranks=False)
        expected = self.step(self.alone, self.whole)
        assert torch.equal(y, expected[self.mine])
        assert torch.equal(self.x.grad, self.whole.grad[self.mine])
        assert_same_layers(self.layer, self.alone)


def steps_have_the_bits_of_one_rank(rank: int, device: str) -> None:
    pair = Pair(rank, device)
    for seed in (1, 2):
        pair.load(seed)
        pair.clear()
        pair.compare(pair.step(pair.layer, pair.x))


def step_never_waits_for_the_device(rank: int, device: str) -> None:
    pair = Pair(rank, device)
    pair.compare(pair.step(pair.layer, pair.x))  # connections are made, kernels loaded
    pair.clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = pair.step(pair.layer, pair.x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pair.compare(y)


def captured_step_replays(rank: int, device: str) -> None:
    pair = Pair(rank, device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        pair.compare(pair.step(pair.layer, pair.x))
        pair.clear()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = pair.step(pair.layer, pair.x)
    for seed in (3, 4):
        pair.load(seed)
        graph.replay()
        pair.compare(y)


BACKENDS = {
    "gloo": (steps_have_the_bits_of_one_rank,),
    "cpu:gloo,cuda:nccl": (
        steps_have_the_bits_of_one_rank,
        step_never_waits_for_the_device,
        captured_step_replays,
    ),
}


def _rank_main(rank: int, names: list[str], folder: Path, backend: str, device: str) -> None:
    cases = {c.__name__: functools.partial(c, rank, device) for c in BACKENDS[backend]}
    cases[START] = functools.partial(join_group, rank, backend, folder)
    run_here(cases | {END: dist.destroy_process_group}, names, rank, folder)


@pytest.fixture(scope="module", params=BACKENDS)
def results(request, tmp_path_factory):
    """{case: [one outcome per rank]}."""
    names = [case.__name__ for case in BACKENDS[request.param]]
    folder = tmp_path_factory.mktemp("processes")
    return run_cases(_rank_main, names, folder, (request.param, "cuda"))


@needs_gpu
def test_two_processes_on_one_gpu_exact(results):
    for outcomes in results.values():
        check(outcomes)
