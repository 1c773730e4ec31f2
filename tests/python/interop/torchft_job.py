# SPDX-License-Identifier: Apache-2.0
"""A replica of a torchft job, started by test_torchft.py: it prints a line for each step."""

import datetime
import hashlib
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torchft.manager import Manager

import syncbn

LIMIT = datetime.timedelta(seconds=10)
STEPS = 20


def main(replica: int, store_port: int, lighthouse: str, dies_at: int) -> None:
    """Trains to STEPS, or ends in the forward or backward of a step."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=replica,
        world_size=replica + 1,
        timeout=LIMIT,
        enable_reconfigure=True,
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4))
    model = syncbn.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=dist.group.WORLD,
        use_async_quorum=False,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,
        timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=own.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{replica}_",
    )
    while manager.current_step() < STEPS:
        manager.start_quorum()
        step = manager.current_step()  # a replica that heals goes on at the others'
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1000 * step + replica))
        optimizer.zero_grad()
        errors = 0
        try:
            y = model[1](model[0](x))
            if step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            model[2:](y).square().sum().backward()
        except (syncbn.PeerLost, syncbn.ExchangeTimeout) as error:
            manager.report_error(error)
            errors += 1
        for parameter in model.parameters():
            if parameter.grad is not None:
                manager.allreduce(parameter.grad).wait()
        replicas = manager.num_participants()
        if manager.should_commit():
            optimizer.step()
        digest = hashlib.sha256()
        for value in model.state_dict().values():
            digest.update(value.numpy().tobytes())
        committed = manager.current_step() > step
        print(replica, step, replicas, committed, errors, digest.hexdigest()[:16], flush=True)
    manager.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
