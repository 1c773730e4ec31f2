# SPDX-License-Identifier: Apache-2.0
"""Statistics by Welford's recurrence: mean and variance of each rank, gathered and merged.

Three ranks of uneven size, one of them empty, normalize a batch whose mean is 4,000 times its
deviation, and compare with one process that has it all. Exits with 1 if something is wrong.

    python examples/08_welford.py
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import syncbn

SHARES = (5, 0, 11)


def batch() -> torch.Tensor:
    return 4000 + torch.randn(16, 8, 14, 14, generator=torch.Generator().manual_seed(0))


def rank_main(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(SHARES)
    )
    share = batch().split(SHARES)[rank].clone().requires_grad_()
    layer = syncbn.SyncBatchNorm(8, momentum=1.0, statistics="welford")
    layer(share).square().sum().backward()
    torch.save((layer.running_mean, layer.running_var, share.grad), f"{folder}/{rank}")
    dist.destroy_process_group()


def main() -> int:
    whole = batch()
    exact_mean, exact_var = whole.double().mean((0, 2, 3)), whole.double().var((0, 2, 3))
    # The textbook's sum of squares in float32 loses the variance altogether.
    naive = (whole**2).mean((0, 2, 3)) - whole.mean((0, 2, 3)) ** 2
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder,), nprocs=len(SHARES))
        results = [torch.load(f"{folder}/{rank}") for rank in range(len(SHARES))]
    mean, var, _ = results[0]
    same = all(torch.equal(mean, m) and torch.equal(var, v) for m, v, _ in results)
    error = ((var - exact_var) / exact_var).abs().max().item()
    print(f"variance: exact {exact_var[0]:.6f}, welford {var[0]:.6f}, naive {naive[0]:.6f}")
    print(f"largest relative error {error:.1e}; the same on every rank: {same}")
    # n kappa u of Chan, Golub and LeVeque: 196 additions in a row, kappa = 4,000, u = 2^-24.
    allowed = 196 * 4000 * 2**-24
    close = (mean - exact_mean).abs().max() <= 4000 * 2**-20
    return int(not (same and error <= allowed and close))


if __name__ == "__main__":
    sys.exit(main())
