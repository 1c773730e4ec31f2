# SPDX-License-Identifier: Apache-2.0
"""Masks over the ranks of a process group; run by test_distributed.py as rank_cases.py is.

torch.nn.SyncBatchNorm has no mask; a rank's padding counts there as samples do.
"""

import numpy as np
import torch

from rank_cases import check_layer, raises, shards, unchanged
from support import new_layer, rough_samples


def masks_of(rng, parts, spatial, first):
    """Uneven counts: on the last rank nothing, on the others some elements; the first rank has a
    mask only if `first` says so."""
    masks = [rng.random((p.stop - p.start, *spatial)) < 0.3 for p in parts]
    if not first:
        masks[0] = None
    masks[-1] = np.zeros_like(masks[-1])
    return masks


def case_masks_exact(rank, world):
    for dtype in ("float16", "float32", "float64"):
        rng = np.random.default_rng(50)
        x, z, dy = (rough_samples(rng, (11, 5, 30, 20), dtype) for _ in range(3))
        for activation, residual in (("none", False), ("leaky_relu", True)):
            masks = masks_of(rng, shards(11, world, "uneven"), (30, 20), first=residual)
            given = (rank, world, x, dy, dtype, "uneven")
            check_layer(*given, z=z if residual else None, masks=masks, activation=activation)


def case_masked_rows_are_removed_rows_exact(rank, world):
    """In both modes, on all ranks; on rank 0 nothing counts, in another dtype than the group's,
    as autocast may give it to a rank."""
    generator = torch.Generator().manual_seed(60 + rank)
    x, dy = (torch.randn(12 + rank, 6, generator=generator) for _ in range(2))
    kept = torch.rand(12 + rank, generator=generator) < (0.6 if rank else 0.0)
    if rank == 0:
        x, dy = x.double(), dy.double()
    for statistics in ("reproducible", "welford"):
        results = []
        for removed in (False, True):
            layer = new_layer(6, statistics=statistics, momentum=1.0)
            leaf = (x[kept] if removed else x).clone().requires_grad_()
            y = layer(leaf) if removed else layer(leaf, mask=kept)
            y.backward(dy[kept] if removed else dy)
            results.append((y, leaf.grad, layer))
        (y, dx, layer), (removed_y, removed_dx, removed_layer) = results
        assert torch.equal(y[kept], removed_y) and not y[~kept].any()
        assert torch.equal(dx[kept], removed_dx) and not dx[~kept].any()
        for a, b in zip(layer.parameters(), removed_layer.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        unchanged(layer, removed_layer.state_dict())


def case_one_or_no_counting_value_over_all_ranks(rank, world):
    layer = new_layer(3)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    mask = torch.zeros(4, 5, dtype=torch.bool)
    y = layer(torch.randn(4, 3, 5), mask=mask)
    assert not y.any()
    mask[2, 3] = rank == 0
    raises(ValueError, "Expected more than 1 value", layer, torch.randn(4, 3, 5), mask=mask)
    unchanged(layer, before)
