# SPDX-License-Identifier: Apache-2.0
"""What test_cuda_graphs.py runs in processes of their own: CUDA graphs that end in errors of CUDA,
after which the process may be of no use."""

import os

import torch

from support import new_layer
from syncbn.operators import ops


def say_and_leave() -> None:
    print("as it should be", flush=True)
    os._exit(0)  # nothing that waits for the device


def text_of(function) -> str:
    try:
        function()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


def read_in_a_capture() -> None:
    """The host asks for a value: CUDA ends the capture. Calls in it say so, and later ones work."""
    layer, x = new_layer(6).cuda(), torch.randn(8, 6, 5, device="cuda")
    expected = layer(x)
    count = layer.num_batches_tracked.item()

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            layer(x)
            text_of(lambda: x.sum().item())
            assert "captur" in text_of(lambda: layer(x))

    assert "captur" in text_of(capture)
    assert layer.num_batches_tracked == count
    assert torch.equal(layer(x), expected) and layer.num_batches_tracked == count + 1
    say_and_leave()


def replay_that_fails() -> None:
    """The device gives up in a replay, behind the step. CUDA reports it at any later call; one of
    this library says of whose work it speaks."""
    layer, x = new_layer(6).cuda(), torch.randn(8, 6, 5, device="cuda")
    fine = torch.ones(1, dtype=torch.bool, device="cuda")
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
        torch._assert_async(fine)
    graph.replay()
    assert y.isfinite().all()
    saved = torch.zeros(3 * 6 + 2, dtype=torch.float64, device="cuda")
    arguments = (layer.running_mean, layer.running_var, None, saved, 0.1)
    fine.zero_()
    graph.replay()

    def later() -> None:
        for _ in range(10_000):  # until the replay has come to its end
            ops.update_running_statistics(*arguments)

    told = text_of(later)
    assert "CUDA: work that was enqueued earlier failed: " in told and "assert" in told, told
    assert text_of(lambda: layer(x)) and text_of(graph.replay)
    say_and_leave()
