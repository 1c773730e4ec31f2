# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel and weight averaging around the layer; run by test_distributed.py as
rank_cases.py is.

torch.nn.SyncBatchNorm cannot run here: it takes no CPU input, and DDP refuses a model that holds
one ("SyncBatchNorm layers only work with GPU modules"). The reference is one process that trains
plain nn.BatchNorm2d with the samples of all ranks. Both compute the same sums in float64 in other
orders: n terms, a relative 2^-53 each, through 3 steps of 2 layers; 1e-10 leaves room for 10^6 such
roundings.
"""

import contextlib
import copy
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils

import syncbn
from rank_cases import diverges
from support import assert_near, run_snippets

STEPS = 3


def network() -> nn.Sequential:
    torch.manual_seed(50)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)
    ).double()


def samples(step: int, world: int) -> torch.Tensor:
    """Of all ranks, two each."""
    generator = torch.Generator().manual_seed(51 + step)
    return torch.randn(2 * world, 3, 8, 8, generator=generator, dtype=torch.float64)


def train(model: nn.Module, share, steps=STEPS, joined=lambda y: y) -> None:
    """SGD steps on the samples that share(step) gives. joined(y): the output as one tensor."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        joined(model(share(step))).square().mean().backward()
        optimizer.step()


def own(rank: int, world: int):
    """share(step) of this rank."""
    return lambda step: samples(step, world)[2 * rank : 2 * rank + 2]


def on_all_ranks(tensor: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.detach().contiguous())
    return gathered


def layers_of(model: nn.Module) -> list[syncbn.SyncBatchNorm]:
    return [m for m in model.modules() if isinstance(m, syncbn.SyncBatchNorm)]


def assert_equal_on_ranks(model: nn.Module, calls: int) -> None:
    """Buffers, counters of calls included."""
    for name, buffer in model.named_buffers():
        first, *others = on_all_ranks(buffer)
        assert all(torch.equal(first, other) for other in others), name
    assert [int(layer.state.call) for layer in layers_of(model)] == [calls] * 2


def case_ddp_options(rank, world):
    plain = network()
    train(plain, lambda step: samples(step, world))
    names = (
        "broadcast_buffers",
        "static_graph",
        "find_unused_parameters",
        "gradient_as_bucket_view",
    )
    for values in itertools.product((True, False), repeat=4):
        options = dict(zip(names, values, strict=True))
        ddp = DistributedDataParallel(syncbn.convert_sync_batchnorm(network()), **options)
        train(ddp, own(rank, world))
        assert_near(ddp.module, plain)
        assert_equal_on_ranks(ddp.module, STEPS)


def case_ddp_gradient_accumulation(rank, world):
    """no_sync: gradients wait, statistics do not. Each micro-batch has those of its own samples on
    all ranks, as in one process that accumulates over the same micro-batches."""
    micro = 3

    def accumulate(model, part, wait):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            for i in range(micro):
                x = samples(micro * step + i, world)[part]
                last = i == micro - 1
                with contextlib.nullcontext() if last else wait():
                    (model(x).square().mean() / micro).backward()
            optimizer.step()

    plain = network()
    accumulate(plain, slice(None), contextlib.nullcontext)
    for broadcast in (True, False):
        model = syncbn.convert_sync_batchnorm(network())
        ddp = DistributedDataParallel(model, broadcast_buffers=broadcast)
        accumulate(ddp, slice(2 * rank, 2 * rank + 2), ddp.no_sync)
        assert_near(ddp.module, plain)
        assert_equal_on_ranks(ddp.module, 2 * micro)


def case_ddp_several_forwards_before_backward(rank, world):
    """Buffers change between the forwards, by the layer and by DDP's broadcast; none is kept for
    backward."""

    def steps(model, part):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            a, b = (model(samples(2 * step + i, world)[part]) for i in range(2))
            (a.square().mean() + b.abs().mean()).backward()
            optimizer.step()

    plain = network()
    steps(plain, slice(None))
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        ddp = DistributedDataParallel(syncbn.convert_sync_batchnorm(network()), **options)
        steps(ddp, slice(2 * rank, 2 * rank + 2))
        assert_near(ddp.module, plain)
        assert_equal_on_ranks(ddp.module, 4)


def case_ddp_broadcasts_the_first_ranks_buffers(rank, world):
    """Only what is a buffer of PyTorch's layer: ranks that are at different calls stay there."""
    for broadcast in (True, False):
        model = syncbn.convert_sync_batchnorm(network())
        ddp = DistributedDataParallel(model, broadcast_buffers=broadcast)
        layer = model[1]
        layer.running_mean.fill_(rank + 7.0)
        layer.momentum = 0.0  # running statistics stay as DDP leaves them
        x = samples(0, world)[2 * rank : 2 * rank + 2]
        ddp(x).square().mean().backward()
        assert layer.running_mean.eq(7.0 if broadcast else rank + 7.0).all()
        layer.state.call.fill_(rank + 5)
        text = f"same call: call: .*{rank + 5} on rank {rank}"
        diverges(text, ddp, x)


def case_ddp_broadcast_and_smaller_groups(rank, world):
    """Groups smaller than DDP's have running statistics of their own; the broadcast puts those of
    rank 0's group in their place before each forward, as it does with plain batch norm."""
    x = samples(0, world)[2 * rank : 2 * rank + 2]
    for broadcast in (True, False):
        model = nn.Sequential(nn.BatchNorm2d(3, momentum=0.5)).double()
        model = syncbn.convert_sync_batchnorm(model, group_size=1)
        ddp = DistributedDataParallel(model, broadcast_buffers=broadcast)
        ddp(x)
        layer = model[0]
        means = [2 * mean for mean in on_all_ranks(layer.running_mean)]  # halving is exact
        assert not torch.equal(means[0], means[1])
        ddp(x)
        before = means[0 if broadcast else rank] / 2
        # The contract's update: one fma; here two roundings.
        expected = 0.5 * means[rank] + 0.5 * before
        torch.testing.assert_close(layer.running_mean, expected, rtol=2**-51, atol=2**-54)


class Branches(nn.Module):
    """A branch that not every rank takes; a layer follows it."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
        self.head = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

    def forward(self, x, taken, skipping):
        if taken:
            return self.head(x + self.branch(x))
        skipped = syncbn.skip(self.branch) if skipping else 0  # where the others call it
        return self.head(x) + skipped


def case_ddp_layer_that_one_rank_leaves_out(rank, world):
    """find_unused_parameters alone is not enough: the branch's statistics would be those of the
    ranks that come, and which do is not known. All get an error at once, or the rank skips it."""
    x = samples(0, world)[2 * rank : 2 * rank + 2]
    torch.manual_seed(53)
    plain = Branches().double()
    for skipping in (False, True):
        model = syncbn.convert_sync_batchnorm(copy.deepcopy(plain))
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        for _ in range(2 if skipping else 0):
            ddp(x, rank != 0, True).square().mean().backward()
        if not skipping:
            here = "head.1" if rank == 0 else "branch.1"
            pattern = f"^{here}, call 0.*different layers: rank 0: head.1; rank 1: branch.1"
            diverges(pattern, ddp, x, rank != 0, False)
            continue
        assert_equal_on_ranks(model, 2)
        # The branch's statistics are those of the ranks that took it.
        taken = samples(0, world)[2:]
        branch = plain.branch.train()
        branch[1].momentum = 1.0
        branch(taken)
        mean = 0.19 * branch[1].running_mean  # two updates of 0 by a tenth
        # Sums of at most 256 numbers of order 1.
        assert (model.branch[1].running_mean - mean).abs().max() <= 256 * 2**-53 * 4
        for p in model.parameters():
            first, *others = on_all_ranks(p.grad)
            assert all(torch.equal(first, other) for other in others)


def case_ddp_autocast_with_an_empty_rank(rank, world):
    """All outputs have autocast's type, as with nn.BatchNorm2d, on the rank without samples too;
    parameters keep float32 gradients, and there its own share is zero."""
    for dtype in (torch.bfloat16, torch.float16):
        for wrapped in (True, False):
            model = syncbn.convert_sync_batchnorm(network().float())
            net = DistributedDataParallel(model) if wrapped else model
            x = torch.randn(0 if rank == 1 else 3, 3, 8, 8)
            seen = []
            for module in model:
                module.register_forward_hook(lambda m, a, y, seen=seen: seen.append(y.dtype))
            with torch.autocast("cpu", dtype=dtype):
                y = net(x)
            y.float().square().sum().backward()  # a mean over nothing would be NaN
            assert seen == [dtype] * 5 and y.shape == (len(x), 4, 4, 4)
            for p in model.parameters():
                assert p.grad.dtype == torch.float32 and p.grad.isfinite().all()
                assert wrapped or rank != 1 or not p.grad.any()
            assert_equal_on_ranks(model, 1)
            assert model[1].num_batches_tracked == 1


def case_ddp_communication_hooks(rank, world):
    """Hooks compress gradients on their way; statistics are not gradients and stay as they are.

    The compressed gradient: each share, divided by the number of ranks in the small type, and a sum
    of `world` of them: at most world + 2 roundings u of the mean size of the shares.
    """
    x = samples(0, world)[2 * rank : 2 * rank + 2]
    alone = syncbn.convert_sync_batchnorm(network())
    alone(x).square().mean().backward()
    shares = {name: on_all_ranks(p.grad) for name, p in alone.named_parameters()}
    for hook, dtype in (
        (default_hooks.allreduce_hook, torch.float64),
        (default_hooks.fp16_compress_hook, torch.float16),
        (default_hooks.bf16_compress_hook, torch.bfloat16),
    ):
        ddp = DistributedDataParallel(syncbn.convert_sync_batchnorm(network()))
        ddp.register_comm_hook(None, hook)
        ddp(x).square().mean().backward()
        info = torch.finfo(dtype)
        for name, p in ddp.module.named_parameters():
            size = sum(share.abs() for share in shares[name]) / world
            # Below the smallest normal number roundings are absolute.
            bound = (world + 2) * (info.eps / 2 * size + info.smallest_normal * info.eps)
            assert ((p.grad - sum(shares[name]) / world).abs() <= bound).all(), name
        for name, buffer in ddp.module.named_buffers():
            assert torch.equal(buffer, alone.get_buffer(name)), name


def case_update_bn_exact(rank, world):
    """swa_utils.update_bn over the loaders of all ranks gives the statistics of one process over
    the whole batches, the averages of nn.BatchNorm with momentum None."""
    model = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())).double()
    average = swa_utils.AveragedModel(model)
    model(own(rank, world)(9)).square().mean().backward()
    average.update_parameters(model)
    assert average.module[0] is not model[0]
    swa_utils.update_bn([own(rank, world)(step) for step in range(4)], average)
    whole = syncbn.SyncBatchNorm(3, dtype=torch.float64, sync=False)
    swa_utils.update_bn([samples(step, world) for step in range(4)], whole)
    for name, buffer in whole.named_buffers():
        assert torch.equal(buffer, average.module[0].get_buffer(name)), name
    assert average.module[0].num_batches_tracked == 4 and average.module[0].momentum == 0.1
    assert model[0].num_batches_tracked == 1
    # Training goes on with the model and with its average.
    for net in (model, average):
        net.train()(own(rank, world)(10))


def case_page_of_the_docs(rank, world):
    """On every rank with samples of its own."""
    torch.manual_seed(52 + rank)
    names = run_snippets("docs/training.md")
    assert names["prediction"].dtype == torch.bfloat16
    # One step, the longest loop, and five batches for precise statistics.
    assert int(names["ddp"].module[1].state.call) == 6 + world
    conv, layer = names["model"][:2]
    # Precise statistics are averages with equal weights: five updates of a float32 buffer, and
    # means of 144 numbers of size below 4 on each rank.
    with torch.no_grad():
        means = sum(conv(x).double().mean((0, 2, 3)) for x in names["batches"]) / 5
    means = sum(on_all_ranks(means)) / world
    assert ((layer.running_mean - means).abs() <= (2 * 5 + 1) * 2**-24 * 4).all()
    assert layer.momentum == 0.1 and layer.num_batches_tracked == 5
    assert names["average"].module[1].num_batches_tracked == 5
    for model in (names["ddp"].module, names["network"]):
        first, *others = on_all_ranks(model[1].running_mean)
        assert all(torch.equal(first, other) for other in others)
