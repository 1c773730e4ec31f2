# SPDX-License-Identifier: Apache-2.0
"""What a training step on CUDA launches, counted on emulated kernels.

torch.nn.SyncBatchNorm launches about ten kernels for a forward.
"""

import contextlib
import types
from unittest import mock

import torch
import torch.distributed as dist
from counting import counted
from emulated import DTYPES, random, run_checks
from package import emulated, syncbn

from syncbn.exchange import callers
from syncbn.exchange.transport import InStream
from syncbn.step import layer_state, training


def check_one_rank():
    """Sums, finalize and an element-wise kernel; cumulative averages take a fourth."""
    for dtype in DTYPES:
        for options, forward in (
            ({}, 3),
            ({"activation": "leaky_relu", "affine_grad": "global"}, 3),
            ({"momentum": None}, 4),
            ({"affine": False, "track_running_stats": False}, 3),
        ):
            layer = syncbn.SyncBatchNorm(6, **options)
            x, dy = random((3, 6, 4, 5), 1, dtype).requires_grad_(), random((3, 6, 4, 5), 2, dtype)
            with emulated():
                y, *launched = counted(layer, x)
                assert launched == [forward, []], (options, launched)
                _, *launched = counted(y.backward, dy)
                assert launched == [3, []], (options, launched)


class Played:
    """A group over NCCL of two ranks that bring the same."""

    peers = types.SimpleNamespace(ranks=2, rank=0, group_name="", cuda="played")

    def __init__(self):
        self.summed = []

    def __enter__(self):
        def all_reduce(words, group):
            self.summed.append(words.shape)
            words.numpy()[:] *= 2  # NCCL's work is not counted

        self.patches = [
            mock.patch.object(layer_state.LayerState, "peers", lambda *_: self.peers),
            mock.patch.object(training, "transport_of", lambda p, device: InStream(p, device)),
            mock.patch.object(callers, "resolve", lambda _: None),
            mock.patch.object(dist, "all_reduce", all_reduce),
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()


def check_over_nccl():
    """The message is summed where it lies, and this rank's share comes from a copy that the kernel
    of the sums has made. So y, dx and that share are those of a rank alone."""
    for options, ranks in (({}, 1), ({"affine_grad": "global"}, 2)):
        x, dy = random((3, 6, 4, 5), 1), random((3, 6, 4, 5), 2)
        results = []
        for context in (Played(), None):
            layer = syncbn.SyncBatchNorm(6, **options)
            a = x.clone().requires_grad_()
            with emulated(), context or contextlib.nullcontext():
                y, *forward = counted(layer, a)
                _, *backward = counted(y.backward, dy)
            assert forward == backward == [3, []], (options, forward, backward)
            if context is None:
                layer.weight.grad *= ranks
                layer.bias.grad *= ranks
            else:
                assert context.summed == 2 * [torch.Size([8 + 6 * 19])]
            results.append([y, a.grad, layer.weight.grad, layer.bias.grad])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


run_checks(globals())
