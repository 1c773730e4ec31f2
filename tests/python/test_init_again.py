"""init_process_group again, on the same port, after destroy_process_group: nothing of the layers'
groups may hold the old store."""

import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import syncbn


def _rank(rank: int, port: int, folder: str) -> None:
    layer = syncbn.convert_sync_batchnorm(torch.nn.BatchNorm1d(4))
    for seed in range(3):
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
        )
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed + rank))
        layer(x.requires_grad_()).square().sum().backward()
        assert syncbn.report(layer)[0].ranks == 2
        means = [torch.empty(4) for _ in range(2)]
        dist.all_gather(means, layer.running_mean)
        assert torch.equal(*means)
        dist.barrier()
        dist.destroy_process_group()
        assert syncbn.report(layer)[0].note == "no process group"
        # Or a rank may find the other's old store, which is about to close.
        Path(folder, f"{seed}.{rank}").touch()
        while not Path(folder, f"{seed}.{1 - rank}").exists():
            time.sleep(0.01)


def test_same_port_three_times(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_rank, (port, str(tmp_path)), nprocs=2)
