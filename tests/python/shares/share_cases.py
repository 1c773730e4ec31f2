# SPDX-License-Identifier: Apache-2.0
"""What each process does; the results are compared over numbers of processes. hash_*: equal on all
ranks of all worlds. text_*: an error's text, equal on all ranks of a world."""

import functools
import time
from pathlib import Path

import timm.optim
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import syncbn
from rank_runs import TIMEOUT
from share_models import Pictures, random_network, train, trained
from syncbn.models.recording import first_difference

#: Seeds of networks that have layers of each kind, in 3, 5 and 6 shares.
NETWORKS = (4, 5, 6, 9)


def hash_of_random_networks(rank, world, folder):
    return [trained(seed) for seed in NETWORKS]


def hash_of_a_penalty_and_autocast(rank, world, folder):
    return [trained(20, penalty=True), trained(21, autocast=True)]


def hash_of_optimizers(rank, world, folder):
    """Fused, in loops over lists of tensors, and timm's, which scale by norms of layers."""
    chosen = (
        functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True, foreach=True),
        functools.partial(torch.optim.AdamW, fused=True),
        torch.optim.Adafactor,
        timm.optim.Lamb,
        functools.partial(timm.optim.Lars, momentum=0.9),
    )
    hashes = [trained(30 + i, make=make, steps=3) for i, make in enumerate(chosen)]
    # The first gradients overflow, and their step is left out.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    hashes.append(trained(42, steps=3, scaler=scaler))
    assert scaler.get_scale() == 2.0**27
    return hashes


def hash_of_accumulated_steps(rank, world, folder):
    """Micro-steps with and without exchanges, and two forwards before one backward."""
    network, shares = random_network(1)
    training = syncbn.Shares(network, shares, seed=5)
    x, target = next(iter(training.loader(Pictures(), 4 * shares)))

    def losses():
        return [F.cross_entropy(y, t) for y, t in zip(training(x), training.split(target))]

    with training.no_sync():
        training.backward(losses())
        training.backward(losses())
    training.backward(losses())
    training.backward(losses())
    training.backward([a + 2 * b for a, b in zip(losses(), losses())])
    mean = training.mean([x.detach() for x in losses()])
    return syncbn.fingerprint([p.grad for p in network.parameters()], network, mean)


class Narrow(nn.Module):
    """Forward reads the weight of a synchronized layer, which also keeps it small."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = syncbn.SyncBatchNorm(7), nn.Linear(7, 3)

    def forward(self, x):
        return self.last(self.norm(x)), self.norm.weight.abs().sum()


def hash_of_a_network_that_reads_a_layers_weight(rank, world, folder):
    torch.manual_seed(0)
    network = Narrow()
    training = syncbn.Shares(network, 3)
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(1)).chunk(3)
    outputs = training([x[share] for share in training.mine])
    training.backward([y.square().sum() + penalty for y, penalty in outputs])
    return syncbn.fingerprint([p.grad for p in network.parameters()])


def _added_in_a_tree(gradients):
    if len(gradients) == 1:
        return gradients[0]
    half = 1 << (len(gradients) - 1).bit_length() - 1
    return _added_in_a_tree(gradients[:half]) + _added_in_a_tree(gradients[half:])


def hash_of_ddp_in_a_fixed_order(rank, world, folder):
    """Whatever the buckets, as of one process that adds what it computes for each rank."""

    def network():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(7, 90), nn.GELU(), nn.Linear(90, 3))

    def backward(model, of_rank, step):
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(10 * of_rank + step))
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad for p in model.parameters()]

    group = dist.new_group(timeout=TIMEOUT) if world > 1 else None
    for megabytes in (25, 1e-3) if world > 1 else ():
        ddp = nn.parallel.DistributedDataParallel(
            network(), process_group=group, bucket_cap_mb=megabytes
        )
        ddp.register_comm_hook(group, syncbn.parallel.fixed_order_hook)
        for step in range(3):  # after the first one DDP makes other buckets
            own = [backward(network(), r, step) for r in range(world)]
            expected = [_added_in_a_tree(each).div(world) for each in zip(*own)]
            for grad, mean in zip(backward(ddp, rank, step), expected):
                assert torch.equal(grad, mean)
    return "equal"


def hash_of_the_data(rank, world, folder):
    """Each share's samples, whoever has the share, without workers and with two or one."""
    training = syncbn.Shares(nn.Linear(2, 2), 6, seed=3)
    seen: dict[str, str] = {}
    runs = []
    for workers in (0, 2 if world == 1 else 1):
        before = torch.get_rng_state()
        loader = training.loader(Pictures(), 12, num_workers=workers)
        loader.batch_sampler.set_epoch(1, start=3)
        assert len(loader) == 2
        for i, (x, _) in enumerate(loader):
            for share, part in zip(training.mine, training.split(x)):
                seen[f"{share} of {i}"] = syncbn.fingerprint(part)
        assert torch.equal(before, torch.get_rng_state())
        everybody = [seen]
        if world > 1:
            everybody = [None] * world
            dist.all_gather_object(everybody, seen)
        whole = {name: text for some in everybody for name, text in some.items()}
        assert len(whole) == 12
        runs.append([whole[name] for name in sorted(whole)])
    assert runs[0] == runs[1]
    return runs[0]


def goes_on(begin: Path | None, steps: int, end: Path | None) -> str:
    network, shares = random_network(4)
    training = syncbn.Shares(network, shares, seed=9)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    if begin:
        state = torch.load(begin)
        training.load_state_dict(state["training"])
        optimizer.load_state_dict(state["optimizer"])
    train(training, optimizer, steps)
    if end and training.mine.start == 0:
        state = {"training": training.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, end)
    return syncbn.fingerprint(network, optimizer)


def hash_of_a_training(rank, world, folder):
    """In one go, and its first half for others to go on with."""
    goes_on(None, 2, folder / "half")
    return goes_on(None, 4, None)


def caught(*errors):
    """The text of the error that a function ends with."""

    def run(function):
        try:
            function()
        except errors as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError("no error")

    return run


refused = caught(ValueError)


def text_of_more_processes_than_shares(rank, world, folder):
    return refused(lambda: syncbn.Shares(nn.Linear(2, 2), world - 1))


def text_of_other_seeds(rank, world, folder):
    return refused(lambda: syncbn.Shares(nn.Linear(2, 2), world, seed=rank))


def text_of_an_argument_that_one_rank_refuses(rank, world, folder):
    text = refused(lambda: syncbn.Shares(nn.Linear(2, 2), world, seed=-rank if rank == 1 else 0))
    return text.partition("seed: ")[2]


def text_of_losses_that_one_rank_refuses(rank, world, folder):
    training = syncbn.Shares(nn.Linear(2, 2), world)
    y = training(torch.ones(1, 2))[0]
    losses = [y.sum()] * 2 if rank == 1 else [y.sum()]
    text = caught(ValueError, syncbn.DivergenceError)(lambda: training.backward(losses))
    assert "forward that had its backward" in refused(lambda: training.backward([y.sum()]))
    training.backward(training(torch.ones(1, 2))[0].sum())  # and they go on together
    assert torch.equal(training.module.weight.grad, torch.ones(2, 2))
    return text.partition("losses: ")[2]


def text_of_a_frozen_parameter_on_one_rank(rank, world, folder):
    network = nn.Linear(2, 2)
    training = syncbn.Shares(network, world)
    network.requires_grad_(rank != 1)
    y = training(torch.ones(1, 2))[0]
    loss = y.sum() if rank != 1 else torch.ones(1, requires_grad=True).sum()
    text = caught(syncbn.DivergenceError)(lambda: training.backward(loss))
    assert "frozen parameters: none on rank" in text
    return text[text.index("weight, bias") :]


def text_of_values_that_one_rank_refuses(rank, world, folder):
    training = syncbn.Shares(nn.Linear(2, 2), world)
    values = [torch.ones(2)] * (2 if rank == 1 else 1)
    text = caught(ValueError, syncbn.DivergenceError)(lambda: training.mean(values))
    assert torch.equal(training.mean(values[0]), values[0])  # and they go on together
    return text.partition("values: ")[2]


def text_of_a_buffer_of_another_shape(rank, world, folder):
    network = nn.Linear(2, 2)
    network.register_buffer("more", torch.zeros(2 if rank == 1 else 3))
    return refused(lambda: syncbn.Shares(network, world)).partition(": got")[0]


def text_of_a_model_that_fails_on_one_rank(rank, world, folder):
    """Before the first layer and after it, with one share of each process and with two."""

    def told(shares, at):
        network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3))
        training = syncbn.Shares(syncbn.convert_sync_batchnorm(network), shares)
        x = torch.randn(2 * len(training.mine), 2)
        handle = network[at].register_forward_pre_hook(lambda *_: 1 / 0 if rank == 1 else None)
        text = caught(ZeroDivisionError, syncbn.DivergenceError)(lambda: training(x))
        handle.remove()
        training(x)  # and they go on together
        return text.rpartition("ZeroDivisionError: ")[2]

    texts = {told(shares, at) for shares in (world, 2 * world) for at in (0, 2)}
    return " or ".join(texts)


class Penalty(nn.Module):
    """Takes a gradient through its layer inside forward, where it is told to."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = syncbn.SyncBatchNorm(3), True

    def forward(self, x):
        x = x.detach().requires_grad_()
        y = self.norm(x)
        if not self.inner:
            return y
        return y + torch.autograd.grad(y.pow(3).sum(), x, retain_graph=True)[0]


def text_of_a_backward_inside_the_forward_of_a_share(rank, world, folder):
    """The first process has one share, whose backward would be the whole one's."""
    training = syncbn.Shares(Penalty(), 2 * world - 1)
    began = time.monotonic()
    text = caught(RuntimeError, syncbn.DivergenceError)(
        lambda: training(torch.randn(2 * len(training.mine), 3))
    )
    assert time.monotonic() - began < 10
    training.module.inner = False
    training(torch.randn(2 * len(training.mine), 3))  # and they go on together
    return text[text.index("got a backward") : text.index(", expected")]


def text_of_a_batch_that_one_rank_refuses(rank, world, folder):
    network = syncbn.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    training = syncbn.Shares(network, 2 * world)
    x = torch.randn(5 if rank == 1 else 4, 2)
    text = caught(ValueError, syncbn.DivergenceError)(lambda: training(x))
    training(torch.randn(4, 2))  # and they go on together
    return text.partition("inputs[0]: ")[2]


def _recorded(path, world, rank, flip=None, **options):
    """Three steps of two layers on this rank's samples of seven. flip: the step and the direction
    in which the lowest bit of one number of the first sample is another one."""
    torch.manual_seed(0)
    first, last = syncbn.SyncBatchNorm(3, **options), syncbn.SyncBatchNorm(3, **options)
    model = nn.Sequential(first, nn.ReLU(), last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    own = slice(7 * rank // world, 7 * (rank + 1) // world)
    ys = []
    with syncbn.record(model, path):
        for step in range(3):
            x, dy = (torch.randn(7, 3, 5) for _ in range(2))
            for direction, tensor in (("forward", x), ("backward", dy)):
                if flip == (step, direction):
                    tensor.view(torch.int32)[0, 1, 2] ^= 1
            ys.append(model(x[own].requires_grad_()))
            ys[-1].backward(dy[own])
            optimizer.step()
    return ys


def hash_of_records(rank, world, folder):
    """Lines of layers, on each engine; those of gradients tell of each rank's share alone."""
    texts = []
    for engine in ("auto", "process_group") if world > 1 else ("auto",):
        run = {"engine": engine, "rank": rank, "world": world}
        ys = _recorded(folder / "a", **run)
        _recorded(folder / "forward", **run, flip=(1, "forward"))
        _recorded(folder / "backward", **run, flip=(2, "backward"))
        _recorded(folder / "again", **run)
        if world > 1:
            dist.barrier()
        lines = (folder / "a").read_text().splitlines()
        found = [first_difference(folder / "a", folder / b) for b in ("forward", "backward")]
        found = [None if text is None else text.partition(":")[0] for text in found]
        found.append(first_difference(folder / "a", folder / "again"))
        assert len(lines) == 3 * (2 * 2 + 4)
        texts.append([[line for line in lines if "gradient" not in line], found])
        if world > 1:
            dist.barrier()
        assert ys
    assert all(text == texts[0] for text in texts)
    assert texts[0][1] == ["step 1, 0, forward", "step 2, 2, backward", None]
    return texts[0]


def hash_of_a_recorded_training(rank, world, folder):
    network, shares = random_network(3)
    training = syncbn.Shares(network, shares, seed=3)
    with syncbn.record(training, folder / "training"):
        train(training, torch.optim.SGD(network.parameters(), lr=1e-2), 2)
    if world > 1:
        dist.barrier()
    lines = (folder / "training").read_text().splitlines()
    assert any("gradient" in line for line in lines)
    return [lines, syncbn.fingerprint(network)]
