# SPDX-License-Identifier: Apache-2.0
"""Ray Train with one to three workers on three simulated nodes. A worker is killed, a node is lost,
and one joins: python ray_job.py FOLDER. Prints how many workers began at which step, and whether
the job ended with the bits of one process that nobody disturbed."""

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, nn

import syncbn

STEPS, SHARES, BATCH = 60, 6, 12
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_TRAIN_V2_ENABLED": "1"}


class Pictures(torch.utils.data.Dataset):
    """Noise whose mean is the class, mirrored at random."""

    def __len__(self) -> int:
        return 10 * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index)) + index % 5
        return (x.flip(-1) if torch.rand(()) < 0.5 else x), index % 5


def train(folder: Path, on_ray: bool) -> None:
    """What each worker does."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = syncbn.convert_sync_batchnorm(
        nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Dropout(0.2), nn.Flatten(), nn.Linear(8 * 6 * 6, 5)),
        )
    )
    training = syncbn.Shares(network, SHARES, seed=1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    loader = training.loader(Pictures(), BATCH)
    parts = {"training": training, "optimizer": optimizer, "loader": loader}
    checkpoint = ray.train.get_checkpoint() if on_ray else None
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory) / "state.pt")
        for name, part in parts.items():
            part.load_state_dict(state[name])
    rank = ray.train.get_context().get_world_rank() if on_ray else 0
    workers = ray.train.get_context().get_world_size() if on_ray else 1
    if rank == 0:
        with open(folder / "began", "a") as file:
            print(workers, training.steps, file=file)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    while training.steps < STEPS:
        for batches in loader:
            training.step(loss, batches)
            optimizer.step()
            optimizer.zero_grad()
            (folder / f"process{rank}").write_text(str(os.getpid()))
            if on_ray:
                report(rank, {name: part.state_dict() for name, part in parts.items()})
                time.sleep(0.3)  # time for what happens to the job
            if training.steps == STEPS:
                break
    if rank == 0:
        (folder / "hash").write_text(syncbn.fingerprint(network, optimizer))


def report(rank: int, state: dict) -> None:
    with tempfile.TemporaryDirectory() as directory:
        saved = None
        if rank == 0:
            torch.save(state, Path(directory) / "state.pt")
            saved = ray.train.Checkpoint.from_directory(directory)
        ray.train.report({}, checkpoint=saved)


def began(folder: Path) -> list[tuple[int, int]]:
    """The numbers of workers so far, and the steps that they began with."""
    if not (folder / "began").exists():
        return []
    return [
        (int(workers), int(step))
        for workers, step in map(str.split, (folder / "began").read_text().splitlines())
    ]


def disturb(folder: Path, cluster: Cluster, nodes: list, training: threading.Thread) -> None:
    def until(condition: Callable[[], bool]) -> None:
        while not condition():
            if not training.is_alive():
                raise SystemExit(f"the job ended after {began(folder)}")
            time.sleep(0.2)

    def steps() -> int:
        return len(list((folder / "storage").glob("*/checkpoint_*")))

    def some_steps() -> None:
        before = steps()
        until(lambda: steps() >= before + 5)

    until(lambda: [workers for workers, _ in began(folder)][-1:] == [3])
    some_steps()
    os.kill(int((folder / "process1").read_text()), signal.SIGKILL)
    until(lambda: len(began(folder)) >= 2)
    some_steps()
    cluster.remove_node(nodes[-1], allow_graceful=False)
    until(lambda: began(folder)[-1][0] < 3)
    some_steps()
    cluster.add_node(**NODE)
    until(lambda: began(folder)[-1][0] == 3)


def main() -> None:
    os.environ.update(ENVIRONMENT)
    folder = Path(sys.argv[1])
    whole, elastic = folder / "whole", folder / "elastic"
    whole.mkdir()
    elastic.mkdir()
    train(whole, on_ray=False)
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    nodes = [cluster.add_node(**NODE) for _ in range(2)]
    ray.init(address=cluster.address, runtime_env={"env_vars": ENVIRONMENT})
    trainer = TorchTrainer(
        lambda: train(elastic, on_ray=True),
        scaling_config=ray.train.ScalingConfig(
            num_workers=(1, 3), elastic_resize_monitor_interval_s=3.0
        ),
        torch_config=TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(elastic / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=9),
        ),
    )
    fit = threading.Thread(target=trainer.fit)
    fit.start()
    disturb(elastic, cluster, nodes, fit)
    fit.join()
    ray.shutdown()
    cluster.shutdown()
    equal = (elastic / "hash").read_text() == (whole / "hash").read_text()
    print("workers", [workers for workers, _ in began(elastic)], "equal", equal)


if __name__ == "__main__":
    main()
