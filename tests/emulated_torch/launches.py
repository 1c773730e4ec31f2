# SPDX-License-Identifier: Apache-2.0
"""What a training step on CUDA launches, counted on emulated kernels.

torch.nn.SyncBatchNorm launches about ten kernels for a forward.
"""

import contextlib
import itertools
import types
from unittest import mock

import torch
import torch.distributed as dist
from counting import counted
from emulated import DTYPES, random, run_checks
from package import emulated, syncbn

from syncbn.exchange import groups
from syncbn.exchange.nccl_transport import InStream
from syncbn.step import layer_state, training


def check_one_rank():
    """Planes of 24 elements are whole vectors, those of 20 only in float32."""
    for dtype, width in itertools.product(DTYPES, (5, 6)):
        whole = dtype == torch.float32 or (width == 6 and dtype != torch.float64)
        one = 1 if whole else 3
        for options, forward, backward in (
            ({}, one, one),
            ({"activation": "relu"}, one, one),
            ({"activation": "leaky_relu"}, 3, 3),
            ({"affine_grad": "global"}, one, one),
            ({"momentum": None}, 4, one),
            ({"affine": False, "track_running_stats": False}, one, one),
        ):
            layer = syncbn.SyncBatchNorm(6, **options)
            shape = (3, 6, 4, width)
            x, dy = random(shape, 1, dtype).requires_grad_(), random(shape, 2, dtype)
            with emulated():
                y, kernels, others = counted(layer, x)
                assert (kernels, others) == (forward, []), (options, kernels, others)
                _, kernels, others = counted(y.backward, dy)
                assert (kernels, others) == (backward, []), (options, kernels, others)


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
            mock.patch.object(groups, "resolve", lambda _: None),
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
            kernels = 1 if context is None else 3
            assert forward == backward == [kernels, []], (options, forward, backward)
            if context is None:
                layer.weight.grad *= ranks
                layer.bias.grad *= ranks
            else:
                assert context.summed == 2 * [torch.Size([8 + 6 * 19])]
            results.append([y, a.grad, layer.weight.grad, layer.bias.grad])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


run_checks(globals())
