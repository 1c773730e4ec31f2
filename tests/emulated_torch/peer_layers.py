# SPDX-License-Identifier: Apache-2.0
"""Layers of ranks whose GPUs exchange by themselves (engine="peer_memory"), from the meeting on:
the bits of one rank on the CPU, and what ranks hear that wait for one."""

import time
from unittest import mock

import torch
from counting import counted
from emulated import DTYPES, assert_equal, random, run_checks
from package import syncbn
from played_gpus import on_played_gpus
from torch.utils.checkpoint import checkpoint

from syncbn import operators_cuda
from syncbn.exchange import groups, peer_meeting, peer_memory, peer_transport
from syncbn.exchange.transports import transport_of
from syncbn.step import training

CHANNELS, SIZES = 6, [3, 0, 2]
PEERS = {"engine": "peer_memory"}


def train(layer, x, dy, residual=None, mask=None, run=None):
    """Two steps."""
    results = []
    for _ in range(2):
        a = x.clone().requires_grad_()
        y = (run or layer)(a * 1 if layer.inplace else a, residual, mask=mask)
        y.backward(dy)
        results += [y.detach(), a.grad]
    return results


def recomputed(layer):
    return lambda *inputs, **named: checkpoint(layer, *inputs, use_reentrant=False, **named)


def parts(tensor, rank):
    return None if tensor is None else tensor.split(SIZES)[rank].contiguous()


def check_bits_of_one_rank():
    """In every way that a step of a layer takes, each beside the plain one on other ranks."""
    leaky = {"activation": "leaky_relu", "negative_slope": 0.25}
    cases = (
        ({}, {}),
        ({"momentum": None, "activation": "relu"}, {"residual": 5}),
        ({}, {"mask": 6}),
        ({**leaky, "inplace": True}, {}),
        ({}, {"checkpointed": 1}),
    )
    for (options, more), dtype in zip(cases * 2, DTYPES * 3, strict=False):
        shape = (sum(SIZES), CHANNELS, 3, 5)
        x, dy = random(shape, 1, dtype), random(shape, 2, dtype)
        residual = random(shape, 3, dtype) if "residual" in more else None
        mask = random((shape[0], *shape[2:]), 6) > -0.5 if "mask" in more else None

        def layer_of(own, options=options):
            made = syncbn.SyncBatchNorm(CHANNELS, affine_grad="global", **options, **own)
            with torch.no_grad():
                made.weight.copy_(1 + random(CHANNELS, 7).abs())
            return made

        def results_of(layer):
            return [*(p.grad for p in layer.parameters()), *layer.buffers()]

        def step(rank, x=x, dy=dy, residual=residual, mask=mask, more=more, layer_of=layer_of):
            layer = layer_of(PEERS)
            run = recomputed(layer) if "checkpointed" in more and rank == 0 else None
            given = (parts(t, rank) for t in (x, dy, residual, mask))
            steps = train(layer, *given, run)
            syncbn.check(layer)
            return steps, results_of(layer), syncbn.report(layer)[0].note

        whole = layer_of({})
        expected = train(whole, x, dy, residual, mask)
        for rank, (steps, left, note) in enumerate(on_played_gpus(len(SIZES), step)):
            what = (options, more, dtype, rank)
            assert_equal(steps, [parts(t, rank) for t in expected], what)
            assert_equal(left, results_of(whole), what)
            assert note == "", note


def check_launches():
    """Three kernels for a direction, one of them the exchange."""

    def step(rank):
        layer = syncbn.SyncBatchNorm(CHANNELS, **PEERS)
        x, dy = random((4, CHANNELS, 5), rank), random((4, CHANNELS, 5), 9)
        for _ in range(2):
            layer.zero_grad()
            y, *forward = counted(layer, x.clone().requires_grad_())
            _, *backward = counted(y.backward, dy)
        return forward, backward

    for forward, backward in on_played_gpus(2, step):
        assert forward == backward == [3, []], (forward, backward)


def error_of(kind, run):
    try:
        run()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def check_a_rank_that_refuses():
    """NaN for all, which check() reports; the next step is as good as any."""

    def step(rank):
        layer = syncbn.SyncBatchNorm(CHANNELS, **PEERS)
        x = random((4, CHANNELS, 5), rank)
        layer(x)
        if rank == 1:
            error_of(ValueError, lambda: layer(x[:, :3]))
        else:
            assert layer(x).isnan().all()
            assert "did not make the same call" in error_of(
                syncbn.DivergenceError, lambda: syncbn.check(layer)
            )
            layer.state.call -= 1  # a call that is refused does not count
        assert not layer(x).isnan().any()

    on_played_gpus(2, step)


def check_a_rank_that_does_not_come():
    """The ranks that wait get NaN and, with check() or the next call, an error that names rank and
    layer; they go on when all have met again."""

    def step(rank):
        layer = syncbn.SyncBatchNorm(CHANNELS, timeout=1e-2, **PEERS)
        x = random((4, CHANNELS, 5), rank)
        before = layer(x)
        texts = []
        if rank != 1:
            with mock.patch.object(peer_transport._log, "error") as told:
                assert layer(x).isnan().all()
                while not told.called:  # by the thread that watches
                    time.sleep(0.01)
            texts = [
                told.call_args.args[3],
                error_of(syncbn.ExchangeTimeout, lambda: syncbn.check(layer)),
                error_of(syncbn.PeerLost, lambda: layer(x)),
            ]
        else:
            layer.state.call += 1
        syncbn.reset_groups()
        assert torch.equal(layer(x), before)
        syncbn.check(layer)
        return texts

    (watched, first, last), _, _ = on_played_gpus(3, step, meetings=2)
    assert watched.startswith(("rank 1 did not come", "rank 2 gave up")), watched
    assert "rank 0 of 3: rank" in first and "in an exchange between the GPUs" in first, first
    assert "SyncBatchNorm, call 1, forward, 6 channels" in first, first
    assert "call syncbn.reset_groups()" in last, last


def check_a_graph_of_a_group_that_was_left():
    """It has pointers to memory that is gone when the ranks have met anew. Replays end at once, as
    exchanges that failed, and touch nothing but the group's state."""

    def step(rank):
        layer = syncbn.SyncBatchNorm(CHANNELS, **PEERS)
        x = random((4, CHANNELS, 5), rank)
        before = layer(x)
        ((_, met),) = peer_meeting.all_met()
        captured, memory = met.group(60.0).clone(), met.memory.own
        del met
        syncbn.reset_groups()
        assert torch.equal(layer(x), before)
        memory.fill_(-5)
        message = torch.ones(8 + CHANNELS * 19, dtype=torch.int64)
        peer_meeting.ops.exchange_sums(message, CHANNELS, captured)
        assert message[3] != 0 and (memory == -5).all()

    on_played_gpus(2, step, meetings=2)


def check_a_rank_that_is_interrupted():
    """Before its kernel exchanges: the others do not wait for their time limit."""

    def interrupt(*_):
        raise KeyboardInterrupt

    def step(rank):
        layer = syncbn.SyncBatchNorm(CHANNELS, **PEERS)
        x = random((4, CHANNELS, 5), rank)
        layer(x)
        if rank == 0:
            with mock.patch.object(training.ops, "normalize_and_update", interrupt, create=True):
                error_of(KeyboardInterrupt, lambda: layer(x))
        else:
            assert layer(x).isnan().all()
        return error_of(syncbn.PeerLost, lambda: layer(x))

    first, second = on_played_gpus(2, step)
    assert "was interrupted" in first and "rank 0 left the group" in second, (first, second)


def check_agreed_refusals():
    """Where one rank cannot, all take NCCL, and say why."""

    def failing(*_):
        raise RuntimeError("no CAP_SYS_PTRACE\nin this container")

    class Deaf:
        def get_buffer(self, rank, sizes, dtype, storage_offset):
            return torch.zeros(sizes, dtype=dtype)

    def unheard(own, *_):
        return peer_memory.PeerMemory(own, [own.data_ptr()] * 2, Deaf())

    cases = (
        (peer_meeting, "current_device", lambda: None, "rank 1: this build has no CUDA library"),
        (peer_meeting, "_gpu", lambda _: "GPU 0", "ranks 0 and 1 share a GPU"),
        (peer_meeting, "_check_reach", failing, "rank 1: no CAP_SYS_PTRACE"),
        (peer_memory, "why_not", lambda: "no rendezvous", "rank 1: no rendezvous"),
        (operators_cuda, "load", failing, "rank 1: no CAP_SYS_PTRACE"),
        (peer_memory, "share", failing, "rank 1: no CAP_SYS_PTRACE"),
        (peer_memory, "share", unheard, "rank 0: its memory has [1, 0] of the ranks' numbers"),
    )

    def meet(rank):
        for number, (module, name, played, text) in enumerate(cases):
            with mock.patch.object(module, name, played if rank else getattr(module, name)):
                asked = groups.sharing(None, 60.0 + number, "peer_memory")
                peers = groups.peers(asked)
            assert text in peers.no_peer_memory, (text, peers.no_peer_memory)
            assert "\n" not in peers.no_peer_memory
            assert transport_of(peers, torch.device("cuda")).name == "nccl"

    on_played_gpus(2, meet, meetings=len(cases))


run_checks(globals())
