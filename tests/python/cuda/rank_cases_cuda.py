# SPDX-License-Identifier: Apache-2.0
"""How messages of CUDA tensors travel, with tensors on the CPU in their place: through the host
with the frame, and in stream order, where no rank reads anything.

torch.nn.SyncBatchNorm sends no header: ranks whose calls differ wait for each other, or mix sums of
different layers.
"""

import contextlib
import functools
import itertools
import math
from unittest import mock

import torch
import torch.distributed as dist

from rank import Rank
from rank_cases import diverges, raises, shards
from support import new_layer
from syncbn.exchange import callers, groups, host
from syncbn.exchange.call import Call
from syncbn.exchange.host import ThroughHost, transport_of
from syncbn.exchange.transport import SUMMED, InStream, with_places
from syncbn.exchange.turn import Turn
from syncbn.operators import DTYPES, HEADER_WORDS, ops
from syncbn.parallel import all_reduce
from syncbn.step.options import Options


def peers_of_world():
    return groups.peers(callers.Sharing())


def through_host():
    return ThroughHost(peers_of_world())


def message_of(x, number=0, statistics=0):
    return Rank(x, layer=number, statistics=statistics).begin()


def exchanged(way, message, channels, call, records=0):
    """What the way gives of a message."""
    turn = Turn(way.peers, lambda: call, message, None)
    return way.exchange(turn, message, None, channels, records)


def saved_of(x, merged, ranks):
    """What a forward of these messages saves besides the fingerprint."""
    rank = Rank(x)
    rank.begin()
    rank.finish(merged, ranks)
    return rank.saved[:-1]


def case_messages_through_the_host_exact(rank, world):
    """In one piece and of the group's length, also beyond the frame and on ranks without samples,
    which autocast may have left with another dtype; the sum is that of one rank with all of them.
    """
    way, call = through_host(), Call("layer")
    for dtype in DTYPES:
        for channels in (3, 700):
            whole = torch.randn(9, channels, generator=torch.Generator().manual_seed(1)).to(dtype)
            x = whole[shards(9, world, "empty first")[rank]]
            if rank == 0:
                x = x.to(torch.float64 if dtype == torch.float16 else torch.float16)
            got = exchanged(way, message_of(x), channels, call)[0]
            expected = message_of(whole)
            assert got.shape == expected.shape and got[0] == 9, (dtype, channels)
            # Digits are summed without carries, so moments are compared, not words.
            a, b = saved_of(whole, got, world), saved_of(whole, expected, 1)
            assert torch.equal(a, b), (dtype, channels)


def case_empty_messages_through_the_host(rank, world):
    x = torch.empty(0, 5, dtype=DTYPES[rank % len(DTYPES)])
    got = exchanged(through_host(), message_of(x), 5, Call("layer"))[0]
    assert got[0] == 0 and got.numel() == message_of(x).numel()


def case_messages_that_differ_through_the_host_are_an_error(rank, world):
    def exchange():
        message = message_of(torch.randn(2, 3), number=rank)
        exchanged(through_host(), message, 3, Call("layer"))

    diverges("did not make the same call", exchange)


def peers_with_nccl():
    """The world's own group in the place of an NCCL group."""
    return peers_of_world()._replace(cuda=dist.group.WORLD.group_name)


def in_stream_order():
    return InStream(peers_with_nccl(), torch.device("cpu"))


def case_messages_in_stream_order_exact(rank, world):
    """The host learns nothing, the header tells the device."""
    way, call = in_stream_order(), Call("layer")
    whole = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))
    got = exchanged(way, message_of(whole[shards(9, world, "uneven")[rank]]), 4, call)[0]
    assert torch.equal(saved_of(whole, got, world), saved_of(whole, message_of(whole), 1))
    differing, _ = exchanged(way, message_of(torch.randn(2, 4), number=rank), 4, call)
    _, agree, rejected, _ = ops.header(differing, world).tolist()
    assert not agree and not rejected


def case_welford_messages_exact(rank, world):
    """The sum brings every rank's record to all, behind the sum of the headers."""
    whole = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))
    own = message_of(whole[shards(9, world, "empty first")[rank]], 3, 1)
    for way in (in_stream_order(), through_host()):
        merged, rest = exchanged(way, with_places(own, way), 4, Call("layer"), world)
        rows = merged[HEADER_WORDS:].view(world, -1)
        assert rest is None and torch.equal(rows[rank], own[HEADER_WORDS:])
        assert rows[:, 0].sum() == merged[0] and merged[1] == world * own[1]
        assert ops.header(merged, world).tolist() == [9, 1, 0, DTYPES.index(torch.float32)]


def refuse(x, call):
    in_stream_order().refuse(call, ValueError("refused"), x=x, parameter=torch.ones(4))


def case_refusal_in_stream_order_reaches_the_header(rank, world):
    """Of the length that the others' messages have by the layer's parameters, whatever the shape of
    the refused input."""
    call = Call("layer", options=Options())
    if rank == 0:
        refuse(torch.randn(2, 7), call)
        return
    message = message_of(torch.randn(2, 4))
    got = exchanged(in_stream_order(), message, 4, call)[0]
    assert ops.header(got, world)[2] == 1 and got.numel() == HEADER_WORDS + 4 * 19


def case_refused_welford_call_in_stream_order_reaches_the_headers(rank, world):
    """Its message is as long as the others', also that of its backward."""
    call = Call("layer", options=Options(statistics="welford"))
    for dtype in DTYPES:
        x = torch.randn(2, 4).to(dtype)
        if rank == 0:
            refuse(torch.randn(2, 7).to(dtype), call)
            refuse(x, call._replace(direction="backward"))
            continue
        own = message_of(x, 3, 1)
        way = in_stream_order()
        merged = exchanged(way, with_places(own, way), 4, call, world)[0]
        assert ops.header(merged, world)[2] == 1
        summed = exchanged(in_stream_order(), message_of(x), 4, call)[0]
        assert ops.header(summed, world)[2] == 1


def whole_numbers(shape, dtype, rank):
    """Small ones, of which sums are exact in every dtype; in bool whether they are even."""
    x = torch.arange(1, 1 + math.prod(shape)).view(shape) * (rank + 1)
    return x % 2 == 0 if dtype == torch.bool else x.to(dtype)


def sum_over(world, make):
    """What make(rank) adds up to."""
    dtype = make(0).dtype
    whole = torch.stack([make(r).to(torch.complex128) for r in range(world)]).sum(0)
    return (whole if dtype.is_complex else whole.real).to(dtype)


def numbers(x):
    """In float64: of complex numbers of 32 bits PyTorch tells nothing."""
    return torch.view_as_real(x).double() if x.is_complex() else x.double()


def same_numbers(got, expected):
    assert got.dtype == expected.dtype and got.shape == expected.shape, got
    assert torch.equal(numbers(got), numbers(expected)), (got, expected)


def case_sums_in_stream_order_exact(rank, world):
    """The sum, in x's dtype; where the ranks' tags differ NaN, and of a dtype without NaN an
    error."""
    way, call = in_stream_order(), Call("layer")
    for dtype in SUMMED:
        make = functools.partial(whole_numbers, (2, 3), dtype)
        for tag in (0, 1, 2**20 - 1):
            same_numbers(way.sum(make(rank), tag, call), sum_over(world, make))
        for tag in (rank, 2**20 - 1 - rank, 3 * (rank == 0)):
            if dtype.is_floating_point or dtype.is_complex:
                got = way.sum(make(rank), tag, call)
                assert got.dtype == dtype and got.shape == (2, 3)
                assert (numbers(got)[..., 0] if dtype.is_complex else got).isnan().all(), dtype
            else:
                diverges("did not make the same call", way.sum, make(rank), tag, call)


@contextlib.contextmanager
def all_reduce_over_nccl():
    """all_reduce as of CUDA tensors over NCCL, in whose place is Gloo."""
    peers = peers_with_nccl()
    with (
        mock.patch.object(groups, "peers", lambda *_: peers),
        mock.patch.object(host, "transport_of", InStream),
    ):
        yield


def case_all_reduce_over_nccl_exact(rank, world):
    """Of every dtype, layout and number of devices, with its gradient, and that one's."""
    with all_reduce_over_nccl():
        for dtype, shape in itertools.product(SUMMED, ((2, 3), (), (0, 4), (5,))):
            make = functools.partial(whole_numbers, shape, dtype)
            x, expected = make(rank), sum_over(world, make)
            same_numbers(all_reduce(x), expected)
            same_numbers(x, make(rank))
            if len(shape) == 2:
                same_numbers(all_reduce(x.t()), expected.t())
            if not (dtype.is_floating_point or dtype.is_complex) or dtype == torch.complex32:
                continue
            xs = [make(rank).requires_grad_() for _ in range(2)]
            sums = all_reduce(xs)
            for each in sums:
                same_numbers(each.detach(), 2 * expected)
            factor = torch.tensor(rank + 1, dtype=dtype, requires_grad=True)
            of_sum = torch.ones_like(sums[0]) * factor
            gradients = torch.autograd.grad(sums[0], xs, of_sum, create_graph=True)
            for gradient in gradients:
                same_numbers(gradient.detach(), torch.full_like(expected, world * (world + 1) / 2))
            (second,) = torch.autograd.grad(gradients[0].real.sum(), factor)
            assert second == expected.numel() * world, dtype


def case_all_reduce_over_nccl_that_differs_is_an_error_on_every_rank(rank, world):
    """By its name, whatever the lengths; and also of a rank that refuses its x."""
    last = rank == world - 1
    with all_reduce_over_nccl():
        for name, mine in (
            ("shape", torch.zeros(4 if last else 3)),
            ("shape", torch.zeros((2, 3) if last else (3, 2), dtype=torch.int64)),
            ("dtype", torch.zeros(3, dtype=torch.float16 if last else torch.bfloat16)),
            ("dtype", torch.zeros(3, dtype=torch.int64 if last else torch.float64)),
            ("dtype", torch.zeros(3, dtype=torch.float32 if last else torch.complex64)),
        ):
            diverges(f"did not make the same call: {name}: ", all_reduce, mine)
        if last:
            raises(ValueError, "x: got torch.int16 for", all_reduce, torch.zeros(3).short())
        else:
            diverges("raised an error.*got torch.int16", all_reduce, torch.zeros(3))
        assert all_reduce(torch.ones(1)).item() == world


def engine_of(peers):
    return transport_of(peers, torch.device("cuda")).name


def case_nccl_is_taken_where_the_group_has_it(rank, world):
    """By what init_process_group was asked for; a Gloo group has none."""
    backends = dist.distributed_c10d._world.pg_backend_config
    group = dist.group.WORLD
    assert peers_of_world().cuda == "" and engine_of(peers_of_world()) in (
        "gloo, through the host",
        "shared memory, through the host",
    )
    before = backends[group]
    backends[group] = "cpu:gloo,cuda:nccl"
    try:
        peers = peers_of_world()
        assert peers.cuda == group.group_name and engine_of(peers) == "nccl"
        assert groups.named(peers.group_name) == peers
        assert not callers.is_nccl_alone(peers.cuda)
        backends[group] = "cuda:nccl"
        assert callers.is_nccl_alone(peers.cuda) and not callers.is_nccl_alone("")
        # The groups of group_size are PyTorch's then, made by all ranks, and once.
        parts = [groups.choose(None, group_size=1, group=None, timeout=None).name for _ in range(2)]
        assert parts[0] == parts[1] and callers.resolve(parts[0]).size() == 1
    finally:
        backends[group] = before
        groups._nccl_groups.clear()


def case_own_share_with_the_input_gradient_exact(rank, world):
    """dweight and dbias that come with dx have the bits of the share computed alone."""
    layer = new_layer(5)
    x = torch.randn(4 + rank, 5, 6, requires_grad=True)
    layer(x).square().sum().backward()
    alone = new_layer(5)
    alone.load_state_dict(layer.state_dict())
    z = x.detach().clone()  # needs no gradient: nothing is exchanged in backward
    alone(z).square().sum().backward()
    assert torch.equal(layer.weight.grad, alone.weight.grad)
    assert torch.equal(layer.bias.grad, alone.bias.grad)
