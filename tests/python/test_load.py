"""Many processes and many steps on one machine, through shared memory."""

import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import syncbn

WORLD, STEPS, CHANNELS = 16, 1000, 8


def _rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    layer = syncbn.SyncBatchNorm(CHANNELS, timeout=60)
    assert syncbn.report(layer)[0].engine == "shared memory"
    generator = torch.Generator().manual_seed(rank)
    began = time.monotonic()
    for _ in range(STEPS):
        x = torch.randn(2, CHANNELS, generator=generator, requires_grad=True)
        layer(x).square().sum().backward()
    result = {"seconds": time.monotonic() - began, **layer.state_dict()}
    torch.save(result, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results():
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["test_load"])
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_rank_main, args=(r, folder)) for r in range(WORLD)]
        for process in processes:
            process.start()
        until = time.monotonic() + 120
        for process in processes:
            process.join(max(0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        assert [process.exitcode for process in processes] == [0] * WORLD
        return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(WORLD)]


def test_running_statistics_are_equal_after_many_steps_exact(results):
    first = results[0]
    assert first["num_batches_tracked"] == STEPS
    # 1,000 steps: what running statistics start with has gone, and they are those of N(0, 1).
    assert (first["running_mean"] != 0).all() and (first["running_var"] != 1).all()
    for result in results:
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(result[name], first[name]), name


def test_many_steps_take_seconds(results):
    """On two busy cores, 16 processes share them by turns."""
    print(max(result["seconds"] for result in results))
    assert max(result["seconds"] for result in results) < 60
