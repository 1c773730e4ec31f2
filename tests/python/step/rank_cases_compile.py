# SPDX-License-Identifier: Apache-2.0
"""Cases of test_distributed.py: compiled and exported training steps on several ranks.

torch.nn.SyncBatchNorm refuses CPU tensors, so on these machines it has no answer to any of them."""

import copy
import time
from unittest import mock

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import is_cudagraph_unsafe_fx_node
from torch.nn.parallel import DistributedDataParallel

import syncbn
from rank_cases import CountCollectives, diverges, raises, unchanged
from rank_cases_groups import check_interrupted
from support import assert_same_step
from syncbn.operators import ops
from test_static_graph import LAYERS, Graphs, assert_same_training, new_net


def net(**options) -> nn.Module:
    torch.manual_seed(3)
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)
    )
    return syncbn.convert_sync_batchnorm(plain, **options)


def batch(samples: int, seed: int, size: int = 7) -> torch.Tensor:
    return torch.randn(samples, 3, size, size, generator=torch.Generator().manual_seed(seed))


def case_compiled_dynamic_batches_exact(rank, world):
    """Uneven, changing and empty batches: one graph for all sizes of 2 and more, one for none."""
    if world != 2:
        return
    torch._dynamo.reset()
    counters.clear()
    reference, traced = net(), net()
    step = torch.compile(traced, backend="aot_eager", fullgraph=True, dynamic=True)
    for seed, samples in enumerate((4, 2 + rank, 7 - rank, 5, 3 + 2 * rank)):
        assert_same_step(step, reference, batch(samples, 10 * seed + rank))
    assert counters["stats"]["unique_graphs"] == 1
    for seed in (50, 60):
        assert_same_step(step, reference, batch(4 if rank == 0 else 0, seed + rank))
    assert counters["stats"]["unique_graphs"] == (1 if rank == 0 else 2)
    assert traced[1].state.call == 7


def case_traced_and_compiled_networks_exchange_once_per_layer_and_direction_exact(rank, world):
    """Of uneven shares."""
    if world != 2:
        return
    options = dict(seed=rank, samples=(5, 2)[rank])
    new_net()(torch.randn(2, 3, 6, 6))  # makes the group
    traced = fx.symbolic_trace(new_net())
    assert_same_training(traced, new_net(), **options)
    x = torch.randn(2, 3, 6, 6)
    with CountCollectives() as forward:
        y = traced(x)
    with CountCollectives() as backward:
        y.sum().backward()
    assert forward.names == backward.names == ["all_reduce"] * len(LAYERS)
    graphs, model = Graphs(), new_net()
    model.compile(backend=graphs.backend, fullgraph=True)
    assert_same_training(model, new_net(), **options)
    assert graphs.forward == graphs.backward == [len(LAYERS)]


def case_inductor_exact(rank, world):
    """One layer alone is as in eager mode bit for bit; convolutions of another compiler are not.
    A first compilation costs half a minute: for one of the runs only."""
    if world != 2 or syncbn.report(syncbn.SyncBatchNorm(4))[0].engine != "shared memory":
        return
    layers = [syncbn.SyncBatchNorm(4) for _ in range(2)]
    step = torch.compile(layers[1], fullgraph=True, dynamic=True, mode="reduce-overhead")
    for seed, samples in enumerate((4, 3 + rank, 6)):
        x = batch(samples, seed + 10 * rank)[:, :1].expand(-1, 4, -1, -1).contiguous()
        assert_same_step(step, layers[0], x)


def case_compiled_with_ddp_exact(rank, world):
    """DDP of a compiled model, and a compiled DDP, against DDP alone."""
    if world != 2:
        return
    for wrap in (
        lambda m: DistributedDataParallel(torch.compile(m, backend="aot_eager", fullgraph=True)),
        lambda m: torch.compile(DistributedDataParallel(m), backend="aot_eager"),
    ):
        models = [net(), net()]
        steps = [DistributedDataParallel(models[0]), wrap(models[1])]
        for seed in range(2):
            assert_same_step(*steps, batch(2 + rank, 10 * seed + rank))


def case_compiled_steps_that_differ_are_an_error_on_every_rank(rank, world):
    """The types and texts of eager mode: the layer's path, the ranks, and what each of them did."""
    torch._dynamo.reset()
    model = net()
    before = copy.deepcopy(model.state_dict())
    if rank == world - 1:
        model[4].eps = 1e-3
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    call = "4, call 0, forward, 4 channels, float32"
    expected = f"^{call}, rank {rank} of {world}: .*: eps: 1e-05 on .*, 0.001 on rank {world - 1}$"
    diverges(expected, step, batch(3, rank))
    # Not even the layer before is updated: a graph writes its buffers at the end.
    unchanged(model, before)
    assert model[1].state.call == 1 and model[4].state.call == 0
    syncbn.SyncBatchNorm(3)(batch(3, rank))  # the group stays usable
    dist.barrier()


def case_compiled_single_value_is_an_error_on_every_rank(rank, world):
    layer = syncbn.SyncBatchNorm(4)
    step = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(1 if rank == 0 else 0, 4)
    raises(ValueError, "more than 1 value per channel", step, x)
    assert torch.equal(layer.running_var, torch.ones(4)) and layer.num_batches_tracked == 0


class _Reads:
    """Counts the numbers that Python takes out of tensors; on a GPU each would wait for it."""

    def __enter__(self):
        self.count, plain = 0, torch.Tensor.__int__

        def counting(tensor):
            self.count += 1
            return plain(tensor)

        self.patch = mock.patch.object(torch.Tensor, "__int__", counting)
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()


def case_compiled_step_reads_the_count_with_one_value_alone(rank, world):
    """Forward on a rank with at most one value or a mask, if at all; never backward."""
    torch._dynamo.reset()
    for statistics in ("reproducible", "welford"):
        layer = syncbn.SyncBatchNorm(4, statistics=statistics)
        step = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
        mask = torch.ones(3, dtype=torch.bool)
        few = 1 if rank == 0 else 4
        for samples, given in ((3, None), (5, None), (few, None), (3, mask)):
            x = torch.randn(samples, 4, requires_grad=True)
            with _Reads() as host:
                step(x, mask=given).sum().backward()
            assert host.count <= (samples == 1 or given is not None), (samples, host.count)


def case_compiled_exchange_is_left_out_of_cuda_graphs(rank, world):
    """By its tag, which inductor looks for in the graphs of forward and backward: a layer's step
    is all that it would not capture."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph)

    for statistics in ("reproducible", "welford"):
        layer = syncbn.SyncBatchNorm(4, statistics=statistics)
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
        step = torch.compile(layer, backend=backend, fullgraph=True)
        step(torch.randn(3, 4, requires_grad=True)).sum().backward()
    forward, backward = ops.training_step.default, ops.training_step_backward.default
    found = [
        [node.target for node in graph.graph.nodes if is_cudagraph_unsafe_fx_node(node)]
        for graph in graphs
    ]
    assert found == [[forward], [backward]] * 2, found


def case_compiled_step_times_out_by_name(rank, world):
    """A rank that does not come: the error of eager mode, with the layer and who is missing."""
    model = net(timeout=1.5)
    model(batch(3, rank))  # the first exchange may wait for longer
    if rank == 0:
        step = torch.compile(model, backend="aot_eager", fullgraph=True)
        expected = (
            f"^1, call 1, forward, 8 channels, float32, rank 0 of {world}: .*rank 1: in no exchange"
        )
        raises(syncbn.ExchangeTimeout, expected, step, batch(3, rank))
    dist.barrier()
    time.sleep(0.1)


def case_compiled_step_interrupted_within_a_second(rank, world):
    layer = syncbn.SyncBatchNorm(4, timeout=61)
    check_interrupted(rank, layer, torch.compile(layer, backend="aot_eager", fullgraph=True))


def case_exported_steps_that_differ_are_an_error_on_every_rank(rank, world):
    layer = syncbn.SyncBatchNorm(4, eps=1e-5 if rank else 1e-3)
    step = torch.export.export(layer, (torch.randn(3, 4),)).module()
    expected = f"^SyncBatchNorm, .*rank {rank} of {world}: .*: eps: 0.001 on rank 0, 1e-05 on "
    diverges(expected, step, torch.randn(3, 4))
    assert step.get_buffer("num_batches_tracked") == 0


def case_exported_modes_exact(rank, world):
    """A fused activation, a residual, global gradients, welford, and more channels than a frame:
    forward, gradients and buffers. torch.export keeps the forward of torch.nn.SyncBatchNorm's
    autograd function alone, without its gradient."""

    class Residual(nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.bn = syncbn.SyncBatchNorm(600, **options)

        def forward(self, x):
            return self.bn(x, x.sin())

    for options in (
        {"activation": "relu", "affine_grad": "global"},
        {"activation": "leaky_relu", "statistics": "welford"},
        {},
    ):
        model, x = Residual(**options), torch.randn(3 + rank, 600)
        reference = copy.deepcopy(model)
        assert_same_step(torch.export.export(model, (x,)).module(), reference, x)
