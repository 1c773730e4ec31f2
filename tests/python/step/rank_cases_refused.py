# SPDX-License-Identifier: Apache-2.0
"""What a rank refuses, and what the others learn; run by test_distributed.py as rank_cases.py is.

torch.nn.SyncBatchNorm raises on this rank, before or after its exchange; the others wait or go on.
"""

import copy

import torch
from torch import nn

import syncbn
from rank_cases import raises, unchanged


def case_refused_input_is_an_error_on_every_rank(rank, world):
    layer = syncbn.SyncBatchNorm(4)
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(3, 4)
    sparse = x.to_sparse()
    # Named as the error names it; also what has no strided memory, or is no tensor at all.
    for name, *bad in (
        ("running_mean", torch.randn(3, 5)),
        ("input", torch.ones(3, 4, dtype=torch.int64)),
        ("input", torch.randn(4)),
        ("input", sparse),
        ("input", torch.nested.nested_tensor([torch.randn(4), torch.randn(2)])),
        ("input", None),
        ("input", x.numpy()),
        ("input", x.to("meta")),
        ("residual", x, sparse),
        ("residual", x, x.numpy()),
        ("mask", x, None, torch.ones(3, dtype=torch.bool).to_sparse()),
    ):
        if rank == 0:
            raises(ValueError, f"^{name}: got .*, expected", lambda bad=bad: layer(*bad))
        else:
            # The others are told why.
            text = f"a rank refused its input: rank 0: .*ValueError: {name}: got "
            raises(syncbn.DivergenceError, text, lambda: layer(x))
        unchanged(layer, before)
    layer(x)


def case_refused_parameters_and_buffers_are_an_error_on_every_rank(rank, world):
    x = torch.randn(3, 4)
    for name in ("weight", "bias", "running_mean", "running_var"):
        for bad in (torch.ones(4, dtype=torch.int32), torch.ones(4).to_sparse()):
            layer = syncbn.SyncBatchNorm(4)
            if rank == 0:
                good = getattr(layer, name)
                kind = nn.Parameter if name in layer._parameters else lambda t, _: t
                setattr(layer, name, kind(bad, False))
                raises(ValueError, f"^{name}: got .*, expected", lambda layer=layer: layer(x))
                setattr(layer, name, good)
            else:
                text = f"rank 0: .*ValueError: {name}: got "
                raises(syncbn.DivergenceError, text, lambda layer=layer: layer(x))
            unchanged(layer, syncbn.SyncBatchNorm(4).state_dict())
            layer(x)


def case_tracing_a_training_step_is_refused(rank, world):
    """torch.jit.trace knows no exchange. Of torch.nn.SyncBatchNorm it would keep the sums of the
    first batch as constants or fail inside torch.distributed."""
    layer = syncbn.SyncBatchNorm(4)
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(3, 4)
    if rank == 0:
        text = "^SyncBatchNorm: got torch.jit.trace .*, expected"
        raises(NotImplementedError, text, lambda: torch.jit.trace(layer, x))
    else:
        text = "rank 0: .*NotImplementedError: SyncBatchNorm: got torch.jit.trace"
        raises(syncbn.DivergenceError, text, lambda: layer(x))
    unchanged(layer, before)
    layer(x)
    assert torch.jit.trace(layer.eval(), x)(x).shape == x.shape
