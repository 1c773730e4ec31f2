# SPDX-License-Identifier: Apache-2.0
"""What a training step keeps for backward, and that steps leave nothing behind."""

import gc

import pytest
import torch
from torch import nn

import syncbn
from checkpoint_support import Net, plain, recomputing, reentrant

#: Four numbers of 8 bytes per channel, and two more.
FEW = 4 * 8, 2 * 8


def saved_by(function):
    """{address: bytes} of the memory that a forward saves for its backward, and its output."""
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = function()
    return {address: size for address, size in saved.items() if size > 0}, y


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("statistics", ("reproducible", "welford"))
@pytest.mark.parametrize(
    "activation, residual", (("none", False), ("none", True), ("relu", False), ("relu", True))
)
def test_saved_for_backward(dtype, statistics, activation, residual):
    """x, parameters and a few numbers per channel; a bit per element if both an activation and a
    residual are there. torch.nn.SyncBatchNorm keeps the same, and with an activation and a residual
    after it their two tensors."""
    layer = syncbn.SyncBatchNorm(8, statistics=statistics, activation=activation)
    x = torch.randn(4, 8, 6, 6).to(dtype).requires_grad_()
    z = torch.randn(4, 8, 6, 6).to(dtype).requires_grad_() if residual else None
    saved, y = saved_by(lambda: layer(x, z))
    assert saved.pop(x.untyped_storage().data_ptr()) == x.numel() * x.element_size()
    for parameter in layer.parameters():
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    buffers = {b.untyped_storage().data_ptr() for b in layer.buffers()}
    assert not buffers & set(saved)
    mask = (
        4 * 8 * -(-6 * 6 // 8) if residual and activation == "relu" else 0
    )  # a plane's bits fill whole bytes
    assert sum(saved.values()) <= 8 * FEW[0] + FEW[1] + mask
    # Nothing beside what hooks see.
    assert not any(isinstance(value, torch.Tensor) for value in vars(y.grad_fn).values())


@pytest.mark.parametrize("form", (recomputing, reentrant))
def test_a_segment_saves_its_input_alone(form):
    """PyTorch's two forms; what the layers keep beside it is in test_checkpoint.py."""
    layer = syncbn.SyncBatchNorm(8)
    x = torch.randn(4, 8, 6, 6, requires_grad=True)
    saved, _ = saved_by(lambda: form(lambda x: layer(x.sin()).exp(), x))
    assert saved == {x.untyped_storage().data_ptr(): x.numel() * 4}


@pytest.fixture
def only_new_objects():
    """What other tests left, and may still be released, is not counted."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("form", (plain, recomputing, reentrant))
def test_steps_leave_nothing_behind(form, only_new_objects):
    """As many live tensors after 60 steps as after 10, and not an object more per step.
    benchmarks/bench_leak.py takes 10,000 steps."""
    net = Net(form)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def counts(steps):
        for step in range(steps):
            x = torch.randn(4 + step % 2, 5, requires_grad=True)
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
        del x
        gc.collect()
        objects = gc.get_objects()
        return sum(issubclass(type(o), torch.Tensor) for o in objects), len(objects)

    tensors, objects = counts(10)
    later, more = counts(50)
    assert later == tensors
    # A step that left one object would add 50; pytest and the interpreter keep a few of their own.
    assert more - objects < 50


def test_steps_without_gradients_leave_nothing_behind(only_new_objects):
    """Training mode under no_grad, as for statistics that are calibrated after training."""
    net = nn.Sequential(nn.Linear(5, 5), syncbn.SyncBatchNorm(5))

    def tensors(steps):
        with torch.no_grad():
            for _ in range(steps):
                net(torch.randn(4, 5))
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    first = tensors(10)
    assert tensors(50) == first
