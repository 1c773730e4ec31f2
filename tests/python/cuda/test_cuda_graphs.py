"""CUDA graphs, streams and waits of the host. A step of torch.nn.SyncBatchNorm waits for the device
each time, to leave out empty ranks by a mask, except while a graph is captured."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import syncbn
from support import assert_same_layers, new_layer

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = (8, 6, 5, 5)


def batch(seed: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class HostReads(TorchDispatchMode):
    """Counts the values that the host takes out of tensors; on a GPU each would wait for it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("statistics", ("reproducible", "welford"))
def test_only_a_rank_with_at_most_one_value_reads_the_count(statistics):
    def step(shape):
        x = batch(0, shape).requires_grad_()
        mean, var = torch.zeros(6), torch.ones(6)
        y = syncbn.functional.sync_batch_norm(x, mean, var, training=True, statistics=statistics)
        y.sum().backward()

    for shape, reads in (((2, 6), 0), (SHAPE, 0), ((0, 6, 5), 1)):
        with HostReads() as host:
            step(shape)
        assert host.count == reads, shape
    with HostReads() as host, pytest.raises(ValueError, match="more than 1 value per channel"):
        step((1, 6))
    assert host.count == 1


def train(step, x):
    """One forward and backward; y and dx."""
    x = x.detach().requires_grad_()
    y = step(x)
    y.square().sum().backward()
    return y.detach(), x.grad


@needs_gpu
def test_captured_step_replays_exact():
    """Capture and replay of forward and backward: bits, statistics and counters of eager steps."""
    layer, reference = new_layer(6).cuda(), new_layer(6).cuda()
    x = batch(0).cuda().requires_grad_()

    def step():
        y = layer(x)
        y.square().sum().backward()
        return y

    # Before a capture some steps run on a side stream, as torch.cuda.graph asks for.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
            train(reference, x)
            layer.zero_grad(set_to_none=True)
            x.grad = None
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for seed in (1, 2, 3):
        with torch.no_grad():
            x.copy_(batch(seed))
        graph.replay()
        reference.zero_grad(set_to_none=True)
        expected = train(reference, x)
        assert torch.equal(y, expected[0]) and torch.equal(x.grad, expected[1])
        assert_same_layers(layer, reference)
    assert layer.state.call == reference.state.call == 5


@needs_gpu
def test_graphed_callable_exact():
    layer = new_layer(6).cuda()
    reference = copy.deepcopy(layer)
    graphed = torch.cuda.make_graphed_callables(layer, (batch(0).cuda().requires_grad_(),))
    for seed in (1, 2):
        got, expected = (train(step, batch(seed).cuda()) for step in (graphed, reference))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@needs_gpu
def test_side_stream_exact():
    """All work lies on the caller's stream, behind what made the input."""
    layer, reference = new_layer(6).cuda(), new_layer(6).cuda()
    expected = train(reference, batch(1).cuda())
    torch.cuda.synchronize()
    x, side = torch.zeros(SHAPE, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        x.copy_(batch(1).pin_memory(), non_blocking=True)
        got = train(layer, x)
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert_same_layers(layer, reference)


@needs_gpu
@pytest.mark.parametrize("options", ({}, {"momentum": None}, {"statistics": "welford"}))
def test_step_never_waits_for_the_device(options):
    layer, x = new_layer(6, **options).cuda(), batch(0).cuda().requires_grad_()
    train(layer, x)  # the first step may load kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(layer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_single_value_is_refused_outside_a_capture():
    layer = new_layer(6).cuda()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(batch(0, (1, 6)).cuda())
    assert layer.num_batches_tracked == 0
