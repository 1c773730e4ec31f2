# SPDX-License-Identifier: Apache-2.0
"""Training and evaluation of one setting, on one rank; the same code for every setting."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import syncbn
from data import Source

WARMUP_STEPS = 20


@dataclass(frozen=True)
class Plan:
    """What all settings share."""

    ranks: int
    batch_per_rank: int
    epochs: int
    steps_per_epoch: int
    learning_rate: float
    seed: int

    @property
    def global_batch(self) -> int:
        return self.ranks * self.batch_per_rank

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    key: str  # "a", "b", "c" or "d"
    norm: str  # "plain", "sync" or "shares"
    ranks: int
    title: str
    plan: Plan | None = None  # its own, in place of what all share


@dataclass(frozen=True)
class Place:
    """Where this process trains; a size of 1 means without a process group."""

    rank: int
    size: int
    device: torch.device


@dataclass
class Run:
    """What came out of one setting. Lists of steps count from 1."""

    losses: list[float] = field(default_factory=list)  # one a step, of the global batch
    step_seconds: list[float] = field(default_factory=list)  # forward, backward and update
    evaluations: list[dict[str, float]] = field(default_factory=list)  # step, quality, loss
    weights: dict[int, Tensor] = field(default_factory=dict)  # step -> all parameters, flat
    state: dict[str, Tensor] = field(default_factory=dict)  # after the last step
    fingerprint: str = ""  # of the network and the optimizer, after the last step
    models: int = 1  # different fingerprints of the ranks
    seconds: float = 0.0  # all of it, evaluations and pictures included


def ranks_text(ranks: int) -> str:
    """A number of ranks in words: 1 rank, 4 ranks."""
    return f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a polynomial decay to zero at the end."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * (1.0 - step / steps) ** 0.9


def predict(network: nn.Module, pictures: Tensor, batch: int = 20) -> Tensor:
    """Scores (N, classes, H, W) on the CPU, in the mode that the network is in."""
    device = next(network.parameters()).device
    with torch.no_grad():
        return torch.cat([network(part.to(device)).cpu() for part in pictures.split(batch)])


def evaluate(
    network: nn.Module, source: Source, pictures: Tensor, labels: Tensor
) -> tuple[float, float]:
    """(quality, loss) as deployed: evaluation mode, with the running statistics."""
    network.eval()
    scores = predict(network, pictures)
    network.train()
    return source.quality(scores, labels), float(source.loss(scores, labels))


def train(setting: Setting, plan: Plan, source: Source, place: Place) -> Run:
    """Trains one setting; the result is complete on rank 0 only."""
    started = time.perf_counter()
    network = source.build_network(plan.seed)
    if setting.norm != "plain":
        network = syncbn.convert_sync_batchnorm(network)
    network.to(place.device)
    replica: nn.Module = network
    training: syncbn.Shares | None = None
    if setting.norm == "shares":
        torch.backends.cudnn.deterministic = True
        threads = torch.get_num_threads()
        training = syncbn.Shares(network, plan.ranks, plan.seed, threads=threads)
    elif place.size > 1:
        if place.rank == 0 and setting.norm == "sync":
            engine = syncbn.report(network)[0].engine
            print(f"{setting.title}: the layers exchange over {engine}", flush=True)
        ids = [place.device.index] if place.device.type == "cuda" else None
        replica = DistributedDataParallel(network, device_ids=ids)
    optimizer = torch.optim.Adam(network.parameters(), lr=plan.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, plan.steps)
    )

    def loss_of_share(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return source.loss(model(batch[0]), batch[1])

    share = plan.global_batch // place.size
    leader = place.rank == 0
    held_out = source.test_pictures() if leader else None
    run = Run()
    epoch_losses: list[Tensor] = []
    bar = tqdm(
        total=plan.steps,
        desc=setting.title,
        unit="step",
        disable=not leader,
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
    )
    for step in range(plan.steps):
        pictures, labels = source.train_pictures(plan.seed, step, place.rank * share, share)
        pictures, labels = pictures.to(place.device), labels.to(place.device)
        begun = _clock(place.device)
        optimizer.zero_grad(set_to_none=True)
        if training is not None:
            count = len(training.mine)
            parts = list(zip(pictures.chunk(count), labels.chunk(count)))
            loss = training.step(loss_of_share, parts)
        else:
            loss = loss_of_share(replica, (pictures, labels))
            loss.backward()
        optimizer.step()
        run.step_seconds.append(_clock(place.device) - begun)
        schedule.step()
        epoch_losses.append(loss.detach())
        bar.update()
        done = step + 1
        if leader and done == 1:
            run.weights[1] = _flat(network)
        if done % plan.steps_per_epoch == 0:
            run.losses += _average_over_ranks(epoch_losses, place)
            epoch_losses.clear()
            if held_out is not None:
                quality, test_loss = evaluate(network, source, *held_out)
                run.evaluations.append({"step": done, "quality": quality, "loss": test_loss})
                run.weights[done] = _flat(network)
                bar.set_postfix(loss=f"{run.losses[-1]:.3f}", quality=f"{quality:.3f}")
    bar.close()
    run.state = {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}
    run.fingerprint = syncbn.fingerprint(network, optimizer)
    run.seconds = time.perf_counter() - started
    return run


def _average_over_ranks(losses: list[Tensor], place: Place) -> list[float]:
    """The global batch's losses: every rank has the same number of pixels."""
    values = torch.stack(losses).double()
    if place.size > 1:
        dist.all_reduce(values)
    return (values / place.size).tolist()


def _flat(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in network.parameters()])


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
