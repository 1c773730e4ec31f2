# SPDX-License-Identifier: Apache-2.0
"""What each process does; the results are compared over numbers of processes. hash_*: equal on all
ranks of all worlds. Errors: share_texts.py."""

import functools
import random
from pathlib import Path

import numpy as np
import timm.optim
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import share_programs
import share_refused
import syncbn
from rank_runs import TIMEOUT
from share_models import Pictures, drawn_training, random_network, train, trained
from syncbn.models import recording

#: Seeds of networks that have layers of each kind, in 4 to 7 shares.
NETWORKS = (4, 5, 6, 9)


def hash_of_random_networks(rank, world, folder):
    return [trained(seed) for seed in NETWORKS]


def hash_of_drawn_programs(rank, world, folder):
    """A program has one hash, or is refused by name."""
    found = []
    for seed in range(8):
        try:
            found.append(drawn_training(seed))
        except (ValueError, syncbn.DivergenceError) as error:
            found.append(str(error).partition("got ")[2])
    return found


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


def batches_of(training, step, size=4):
    """Random (x, target) of this process's shares."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(training.shares, size, 4, generator=generator)
    target = torch.randint(3, (training.shares, size), generator=generator)
    return [(x[share], target[share]) for share in training.mine]


def run_of(kind, steps=4, shares=4):
    """The hash that the training of a program ends with, or the text of its error."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    network, loss = share_programs.made(kind)
    network = syncbn.convert_sync_batchnorm(network)
    values = []
    try:
        training = syncbn.Shares(network, shares, seed=3)
        trained = [p for p in network.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        for step in range(steps):
            values.append(training.step(loss, batches_of(training, step)))
            optimizer.step()
            optimizer.zero_grad()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return syncbn.fingerprint(network, optimizer, values)


def hash_of_programs(rank, world, folder):
    return {name: run_of(kind) for name, kind in share_programs.EQUAL.items()}


def programs_that_are_refused(rank, world, folder):
    return {name: run_of(kind) for name, (kind, _) in share_refused.REFUSED.items()}


def hash_of_accumulated_steps(rank, world, folder):
    """Micro-steps with and without exchanges."""
    network, shares = random_network(1)
    training = syncbn.Shares(network, shares, seed=5)
    batches = next(iter(training.loader(Pictures(), 4 * shares)))

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    with training.no_sync():
        values = [training.step(loss, batches) for _ in range(2)]
        assert all(p.grad is None for p in network.parameters())
    values += [training.step(loss, batches), training.step(loss, batches)]
    return syncbn.fingerprint([p.grad for p in network.parameters()], network, values)


def hash_of_what_the_program_changes(rank, world, folder):
    """Between the steps: attributes, containers, hooks, buffers, memory of parameters, evaluation,
    and parameters that are frozen."""

    class Network(share_programs.Base):
        def __init__(self):
            super().__init__()
            self.rate, self.rates = 1.0, [1.0, {"last": 1.0}]
            self.register_buffer("shift", torch.zeros(8))

        def forward(self, x):
            h = self.bn(self.a(x)) * self.rate * self.rates[0] * self.rates[1]["last"]
            return self.b(h + self.shift)

    torch.manual_seed(0)
    network = syncbn.convert_sync_batchnorm(Network())
    training, values = syncbn.Shares(network, 4), []

    def step():
        values.append(training.step(share_programs.loss, batches_of(training, 0)))

    def changed(change):
        change()
        step()
        assert not torch.equal(values[-1], values[-2])

    step()
    network.bn.momentum = 0.0
    step()
    assert torch.equal(values[0], values[1])
    changed(lambda: setattr(network, "rate", 0.5))
    changed(lambda: network.rates.__setitem__(0, 0.5))
    changed(lambda: network.rates[1].update(last=0.5))
    changed(lambda: network.shift.add_(1))
    changed(lambda: setattr(network, "shift", torch.linspace(-3, 3, 8)))
    handle = network.b.register_forward_hook(lambda m, i, output: output * 2)
    changed(lambda: None)
    changed(handle.remove)
    vector = nn.utils.parameters_to_vector(network.parameters()).detach()
    changed(lambda: nn.utils.vector_to_parameters(vector * 0.5, network.parameters()))
    network.a.requires_grad_(False)
    network.zero_grad()
    step()
    assert network.a.weight.grad is None and network.b.weight.grad is not None
    changed(lambda: nn.init.ones_(network.a.weight))
    network.eval()
    with torch.no_grad():
        values.append(network(torch.ones(2, 4)))
    return syncbn.fingerprint(network, values)


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
            # Exact but for rounding of what is below 2^-50 of the largest.
            sums = [torch.stack(each).double().sum(0) for each in zip(*own)]
            expected = [total.div(world).float() for total in sums]
            for grad, mean in zip(backward(ddp, rank, step), expected):
                assert torch.equal(grad, mean)
    return "equal"


def _mixed(samples):
    """Collates with random numbers, to the length of the longest."""
    scale = torch.rand(()) + random.random() + np.random.rand()
    x = nn.utils.rnn.pad_sequence([scale * x.flatten()[: 5 + 9 * y] for x, y in samples], True)
    return x, torch.tensor([y for _, y in samples])


def hash_of_the_data(rank, world, folder):
    """Each share's samples, whoever has the share, without workers and with two or one."""
    training = syncbn.Shares(nn.Linear(2, 2), 6, seed=3)
    runs = []
    for workers in (0, 2 if world == 1 else 1):
        seen = {}
        before = torch.get_rng_state()
        loader = training.loader(Pictures(), 12, num_workers=workers, collate_fn=_mixed)
        loader.load_state_dict({"epoch": 1, "batch": 3, "samples": 60})
        for epoch in (1, 2):
            assert loader.epoch == epoch
            for i, batches in enumerate(loader):
                for share, batch in zip(training.mine, batches, strict=True):
                    seen[f"{share} of {i} of {epoch}"] = syncbn.fingerprint(batch)
        assert loader.state_dict() == {"epoch": 3, "batch": 0, "samples": 60}
        assert torch.equal(before, torch.get_rng_state())
        everybody = [seen]
        if world > 1:
            everybody = [None] * world
            dist.all_gather_object(everybody, seen)
        whole = {name: text for some in everybody for name, text in some.items()}
        assert len(whole) == 6 * (2 + 5) == len(set(whole.values()))
        runs.append([whole[name] for name in sorted(whole)])
    assert runs[0] == runs[1]
    return runs[0]


def goes_on(begin: Path | None, steps: int, end: Path | None) -> str:
    network, shares = random_network(4)
    training = syncbn.Shares(network, shares, seed=9)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    loader = training.loader(Pictures(), 10 * shares)  # few batches in an epoch
    parts = {"training": training, "optimizer": optimizer, "loader": loader}
    if begin:
        for name, state in torch.load(begin).items():
            parts[name].load_state_dict(state)
    train(training, loader, optimizer, steps)
    if end and training.mine.start == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()}, end)
    return syncbn.fingerprint(network, optimizer)


def hash_of_a_training(rank, world, folder):
    """In one go, and its first half for others to go on with."""
    goes_on(None, 2, folder / "half")
    return goes_on(None, 4, None)


def _recorded(path, world, rank, flip=None, **options):
    """Three steps of two layers on this rank's samples of seven. flip: the step and the direction
    in which a bit of one number of the first sample is another one."""
    torch.manual_seed(0)
    options["affine_grad"] = "global"  # the ranks have the same gradients
    first, last = syncbn.SyncBatchNorm(3, **options), syncbn.SyncBatchNorm(3, **options)
    model = nn.Sequential(first, nn.ReLU(), last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    own = slice(7 * rank // world, 7 * (rank + 1) // world)
    with syncbn.record(model, path):
        for step in range(3):
            x, dy = (torch.randn(7, 3, 5) for _ in range(2))
            for direction, tensor in (("forward", x), ("backward", dy)):
                if flip == (step, direction):
                    tensor.view(torch.int32)[0, 1, 2] ^= 1 << 16
            optimizer.zero_grad()
            model(x[own].requires_grad_()).backward(dy[own])
            optimizer.step()


def _notes(path, world):
    """All but the environment, of all ranks."""
    if world > 1:
        dist.barrier()
    found = recording._lines(path)
    if world > 1:
        dist.barrier()
    return [[*place, *note] for place, note in sorted(found.items()) if place[0] >= 0]


def hash_of_records(rank, world, folder):
    """On each engine, of a model without Shares."""
    texts = []
    for engine in ("auto", "process_group") if world > 1 else ("auto",):
        run = {"engine": engine, "rank": rank, "world": world}
        paths = [folder / name for name in ("a", "forward", "backward", "again")]
        for path, flip in zip(paths, (None, (1, "forward"), (2, "backward"), None)):
            _recorded(path, **run, flip=flip)
        notes = _notes(paths[0], world)
        found = [recording.first_difference(paths[0], path) for path in paths[1:]]
        found = [None if text is None else text.partition(":")[0] for text in found]
        assert len(notes) == 3 * (2 + 4 + 4) + 4
        texts.append([notes, found])
        if world > 1:
            dist.barrier()
    assert all(text == texts[0] for text in texts)
    assert texts[0][1] == ["step 1, 0, forward", "step 2, 2.bias, gradient", None]
    return texts[0]


def hash_of_a_recorded_training(rank, world, folder):
    network, shares = random_network(3)
    training = syncbn.Shares(network, shares, seed=3)
    with syncbn.record(training, folder / "training"):
        loader = training.loader(Pictures(), 2 * shares)
        train(training, loader, torch.optim.SGD(network.parameters(), lr=1e-2), 2)
    notes = _notes(folder / "training", world)
    assert {note[1] for note in notes} == {1, 2, 3, 4, 5}
    assert {note[3] for note in notes} == {-1, *range(shares)}
    return [notes, syncbn.fingerprint(network)]
