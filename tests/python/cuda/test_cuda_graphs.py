# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs, streams and waits of the host. A step of torch.nn.SyncBatchNorm waits for the device
each time, to leave out empty ranks by a mask, except while a graph is captured."""

import copy
import os
import subprocess
import sys

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
    """Counts the values that the host takes out of tensors; on a GPU each would wait for it. The
    mode itself does nothing, and has a step go the way of those on CUDA. It does not see what the
    package does around an exchange."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        for name in ("item", "tolist", "__int__", "__float__", "__bool__", "__index__"):
            self.patch.setattr(torch.Tensor, name, self.counting(getattr(torch.Tensor, name)))
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.undo()
        return super().__exit__(*error)

    def counting(self, read):
        def counted(tensor):
            self.count += 1
            return read(tensor)

        return counted


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
        assert host.count <= reads, shape
    with HostReads() as host, pytest.raises(ValueError, match="more than 1 value per channel"):
        step((1, 6))
    assert host.count <= 1


def train(step, x):
    """One forward and backward; y and dx."""
    x = x.detach().requires_grad_()
    y = step(x)
    y.square().sum().backward()
    return y.detach(), x.grad


class Captured:
    """A step of a layer on the input x, to be captured, beside a layer whose steps are eager."""

    def __init__(self):
        self.layer, self.reference = new_layer(6).cuda(), new_layer(6).cuda()
        self.x = batch(0).cuda().requires_grad_()
        self.graph = torch.cuda.CUDAGraph()
        # Before a capture some steps run on a side stream, as torch.cuda.graph asks for.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step()
                train(self.reference, self.x)
                self.forget()
        torch.cuda.current_stream().wait_stream(side)

    def step(self) -> torch.Tensor:
        y = self.layer(self.x)
        y.square().sum().backward()
        return y

    def forget(self) -> None:
        self.layer.zero_grad(set_to_none=True)
        self.reference.zero_grad(set_to_none=True)
        self.x.grad = None

    def check(self, y: torch.Tensor, seeds: tuple[int, ...]) -> None:
        """Replays have the bits, statistics and counters of eager steps. y: the captured output."""
        for seed in seeds:
            with torch.no_grad():
                self.x.copy_(batch(seed))
            self.graph.replay()
            self.reference.zero_grad(set_to_none=True)
            expected = train(self.reference, self.x)
            assert torch.equal(y, expected[0]) and torch.equal(self.x.grad, expected[1])
            assert_same_layers(self.layer, self.reference)
        assert self.layer.state.call == self.reference.state.call == 2 + len(seeds)


@needs_gpu
def test_captured_step_replays_exact():
    captured = Captured()
    with torch.cuda.graph(captured.graph):
        y = captured.step()
    captured.check(y, (1, 2, 3))


@needs_gpu
@pytest.mark.parametrize("after", ("forward", "backward"))
def test_capture_left_by_an_exception_changes_nothing_exact(after):
    """Nothing of it has run: the layer is as before, and the next capture is a whole step."""
    captured = Captured()
    with pytest.raises(RuntimeError, match="in the middle"):
        with torch.cuda.graph(captured.graph):
            captured.step() if after == "backward" else captured.layer(captured.x)
            raise RuntimeError("in the middle")
    captured.forget()
    assert_same_layers(captured.layer, captured.reference)
    captured.graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured.graph):
        y = captured.step()
    captured.check(y, (1, 2))


@needs_gpu
def test_call_refused_within_a_capture_is_not_in_the_graph_exact():
    captured = Captured()
    with torch.cuda.graph(captured.graph):
        with pytest.raises(ValueError, match="running_mean: got shape"):
            captured.layer(torch.empty(4, 7, 5, device="cuda"))
        y = captured.step()
    captured.check(y, (1, 2))


@needs_gpu
@pytest.mark.parametrize("name", ("read_in_a_capture", "replay_that_fails"))
def test_device_errors_carry_a_text(name):
    """In a process of its own: what follows such an error is not for other tests."""
    command = [sys.executable, "-c", f"import broken_graphs; broken_graphs.{name}()"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options = {"capture_output": True, "text": True, "timeout": 60, "env": environment}
    ended = subprocess.run(command, **options)
    assert ended.returncode == 0 and ended.stdout.endswith("as it should be\n"), ended


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
