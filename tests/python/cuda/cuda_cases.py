# SPDX-License-Identifier: Apache-2.0
"""What each of two processes runs with CUDA tensors; test_cuda_ranks.py starts them."""

import copy
import os
import subprocess
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import syncbn
from rank_cases import diverges, raises, shards, unchanged
from support import TORCH_DTYPES, assert_same_layers, new_layer, rough_samples, to_tensor


def run(layer, x, dy):
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return y.detach().cpu(), x.grad.cpu()


def nccl() -> bool:
    return dist.get_backend() == "nccl"


def case_bits_of_one_process_on_cpu_exact(rank, world):
    """Over NCCL or Gloo, uneven and empty ranks, layers of any width."""
    for dtype in TORCH_DTYPES:
        for shape in ((7, 5, 6, 6), (9, 600)):
            rng = np.random.default_rng(4)
            x, dy = (to_tensor(rough_samples(rng, shape, dtype), dtype) for _ in range(2))
            layer = new_layer(shape[1], affine_grad="global")
            for kind in ("uneven", "empty first"):
                own, part = copy.deepcopy(layer).cuda(), shards(shape[0], world, kind)[rank]
                got = run(own, x[part].cuda(), dy[part].cuda())
                alone = copy.deepcopy(layer)
                alone.sync = False
                expected = run(alone, x, dy)
                for a, b in zip(got, expected, strict=True):
                    assert torch.equal(a, b[part]), (dtype, shape, kind)
                own.cpu()
                assert_same_layers(own, alone)
                assert own.state.count == shape[0] * x[0, 0].numel()


def case_engine(rank, world):
    (row,) = syncbn.report(syncbn.SyncBatchNorm(3, device="cuda"))
    assert row.kernels == "cuda"
    assert row.engine == "nccl" if nccl() else row.engine.endswith("through the host"), row.engine


def case_step_never_waits_for_the_device(rank, world):
    """Over NCCL; what goes over Gloo passes through the host and waits."""
    layer, x = new_layer(6).cuda(), torch.randn(8, 6, 5, device="cuda")
    run(layer, x, torch.ones_like(x))
    if not nccl():
        return
    leaf = x.clone().requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(leaf).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def case_captured_step_replays_exact(rank, world):
    """Over NCCL; each replay has the bits of one process that has the whole batch."""
    if not nccl():
        return
    layer, alone = (new_layer(6, affine_grad="global", sync=sync).cuda() for sync in (True, False))
    part = shards(8, world, "uneven")[rank]

    def batch(seed):
        return torch.randn(8, 6, 5, 5, generator=torch.Generator().manual_seed(seed)).cuda()

    x = batch(0)[part].clone().requires_grad_()

    def step():
        y = layer(x)
        y.backward(x.detach().sign())
        return y.detach()

    def compare(y, seed):
        expected = run(alone, batch(seed), batch(seed).sign())
        for a, b in zip((y, x.grad), expected, strict=True):
            assert torch.equal(a.cpu(), b[part])
        assert_same_layers(layer, alone)
        alone.zero_grad()

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # connections are made, kernels loaded
        compare(step(), 0)
        layer.zero_grad()
        x.grad = None
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = step()
    for seed in (3, 4):
        with torch.no_grad():
            x.copy_(batch(seed)[part])
        graph.replay()
        compare(y, seed)


def case_calls_that_differ(rank, world):
    """Over NCCL NaN, and check() raises on every rank; over Gloo the error of the CPU. The group
    stays usable. torch.nn.SyncBatchNorm mixes the sums of the two layers without a word."""
    layer = syncbn.SyncBatchNorm(4, eps=0.1 * (rank + 1), device="cuda")
    x = torch.randn(3, 4, 5, device="cuda", requires_grad=True)
    before = copy.deepcopy(layer.state_dict())
    if nccl():
        y = layer(x)
        y.sum().backward()
        assert y.isnan().all() and x.grad.isnan().all()
        diverges(r"\(call 0, 4 channels, eps=0.[12]", syncbn.check, layer)
    else:
        diverges("did not make the same call", layer, x)
    unchanged(layer, before)
    good = new_layer(4).cuda()
    assert good(x).isfinite().all()
    syncbn.check(good)


def case_refused_input(rank, world):
    layer = new_layer(4).cuda()
    x = torch.randn(3, 4 + (rank == 0), 5, device="cuda")
    error = ValueError if rank == 0 else syncbn.DivergenceError
    raises(error, "running_mean: got shape", layer, x)


def case_input_refused_later(rank, world):
    """NCCL's ranks read each other's errors in a layer's first call, and then in check()."""
    layer = new_layer(4).cuda()
    layer(torch.randn(3, 4, 5, device="cuda"))
    x = torch.randn(3, 4 + (rank == 0), 5, device="cuda")
    if rank == 0:
        raises(ValueError, "running_mean: got shape", layer, x)
    elif nccl():
        assert layer(x).isnan().all()
        diverges("one refused its input", syncbn.check, layer)
    else:
        diverges("running_mean: got shape", layer, x)


def case_one_value_over_all_ranks_is_refused(rank, world):
    layer = new_layer(4).cuda()
    x = torch.randn(1 if rank == 0 else 0, 4, device="cuda")
    raises(ValueError, "more than 1 value per channel", layer, x)


def case_welford_is_the_same_on_all_ranks(rank, world):
    """And with the elements of the whole batch; the mean is within three roundings a value."""
    whole = torch.randn(9, 4, 30, generator=torch.Generator().manual_seed(7))
    layer = new_layer(4, statistics="welford", momentum=1.0).cuda()
    run(layer, whole[shards(9, world, "uneven")[rank]].cuda(), None)
    means = [torch.zeros_like(layer.running_mean) for _ in range(world)]
    dist.all_gather(means, layer.running_mean)
    assert torch.equal(means[0], means[1]) and layer.state.count == 270
    error = (means[0].cpu() - whole.mean((0, 2))).abs().max()
    assert error <= 2 * 3 * 270 * 2**-24 * whole.abs().max()


def case_second_derivatives(rank, world):
    """Near those of one process on CPU: float64 sums of 40 terms."""
    whole = torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(6)).double()
    layer = new_layer(3, dtype=torch.float64)
    alone = copy.deepcopy(layer)
    alone.sync = False
    part = shards(8, world, "uneven")[rank]

    def second(m, x):
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(m(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0].cpu()

    got, expected = second(layer.cuda(), whole[part].cuda()), second(alone, whole)
    assert (got - expected[part]).abs().max() <= 1000 * 40 * 2**-53 * expected.abs().max()


def case_ddp_and_reset(rank, world):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    net = syncbn.convert_sync_batchnorm(net).cuda()
    model = DistributedDataParallel(net)
    for _ in range(2):
        model(torch.randn(2 + rank, 3, 8, 8, device="cuda")).square().sum().backward()
    syncbn.reset_groups(net)
    model(torch.randn(2, 3, 8, 8, device="cuda")).sum().backward()
    syncbn.check(model)
    assert net[1].num_batches_tracked == 3


def case_compiled_step_exact(rank, world):
    layer = new_layer(5).cuda()
    compiled = copy.deepcopy(layer)
    step = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(seed)).cuda()
        expected, got = run(layer, x, x), run(step, x, x)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def case_group_size_exact(rank, world):
    """Groups of one: PyTorch's own over NCCL, and nobody to exchange with."""
    net = syncbn.convert_sync_batchnorm(torch.nn.BatchNorm1d(3), group_size=1).cuda()
    x = torch.randn(4 + rank, 3).cuda()
    assert torch.equal(net(x).cpu(), syncbn.SyncBatchNorm(3, sync=False)(x.cpu()))


def hash_by_shares():
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()]
    layers += [torch.nn.Dropout(0.3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 5)]
    network = syncbn.convert_sync_batchnorm(torch.nn.Sequential(*layers)).cuda()
    training = syncbn.Shares(network, shares=3)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for seed in range(3):
        x = torch.randn(3, 2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        batches = [x[share].cuda() for share in training.mine]
        training.step(lambda model, batch: model(batch).square().mean(), batches)
        optimizer.step()
        optimizer.zero_grad()
    return syncbn.fingerprint(network, optimizer)


def case_shares_exact(rank, world):
    """A whole network, against one process that trains it alone."""
    code = "import cuda_cases; print(cuda_cases.hash_by_shares())"
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    alone = subprocess.run(command, env=paths, capture_output=True, text=True, check=True).stdout
    assert hash_by_shares() == alone.split()[-1]
