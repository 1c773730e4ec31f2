# SPDX-License-Identifier: Apache-2.0
"""What ranks read in the store is not what they write there. Run by test_distributed.py as
rank_cases.py is."""

import json
import time
from unittest import mock

import torch
import torch.distributed as dist

import syncbn
from rank_cases import raises
from support import new_layer
from syncbn.exchange import meeting

#: What a rank may find in place of a list in JSON.
TEXTS = (
    *("", "{", "[]", "null", "7", '["PeerLost"]', '"text"', "[" * 100_000),
    *('["KeyError", "why", 1.0, 0]', '["PeerLost", 7, 1.0, 0]', '["PeerLost", "why", "now", 0]'),
    *('["who", "", "value", [], "", 0.0, 0]', '["who", "", {}, [1, "", ""], "", 0.0, 0]'),
    *('[1, "", "value", [1, "", ""], "", 0.0, 0]', '["who", "", "value", 7, "", 0.0, 0]'),
    *('["who", "", "value", ["1", "", ""], "", 0.0, 0]', '["who", "", "value", null, "", 0, 0]'),
)
_number = [0]


def meet(rank, world, text="value", make=None, limit=20.0):
    """In a topic of its own for each round of the test."""
    ranks, offer = tuple(range(world)), meeting.Offer("test", value="value")
    return meeting.meet(f"malformed/{_number[0]}", ranks, rank, limit, offer, make, form="value")


def store_of(world):
    store = dist.distributed_c10d._get_default_store()
    ranks = meeting._Attempt(f"malformed/{_number[0]}", tuple(range(world)), 0, 1.0, OFFER).topic
    return dist.PrefixStore(ranks, store)


OFFER = meeting.Offer("test", value="value")


def each(texts=TEXTS):
    for text in texts:
        _number[0] += 1
        dist.barrier()
        yield text
    dist.barrier()


def lost(text, function, *given, **options):
    began = time.monotonic()
    raises(
        syncbn.PeerLost,
        f"^test, while the group is made, rank .*{text}",
        function,
        *given,
        **options,
    )
    assert time.monotonic() - began < 10


GOT = "got .* in the store of torch.distributed, expected what ranks with this version of syncbn"


def case_malformed_news(rank, world):
    for text in each((*TEXTS, b"\xff\xfe \xff", "token", "token - {", 'token - ["X", "", 0, 0]')):
        if not text:  # as before the first round
            continue
        if rank == 0:
            store_of(world).set("now", text)
        dist.barrier()
        lost(f"(now|verdict): {GOT}", meet, rank, world)


def case_malformed_announcement_of_a_rank_that_has_not_come(rank, world):
    for text in each((*TEXTS, b"\xff\xfe")):
        if rank == 0:
            store_of(world).set(f"came/{world - 1}", text)
        dist.barrier()
        if rank == world - 1:
            time.sleep(1)
        lost(f"left the group: came/{world - 1}: {GOT}", meet, rank, world)


def dumped(text):
    """Has this rank write the text for its offers."""
    dumps = json.dumps
    offers = lambda value: text if isinstance(value, meeting.Offer) else dumps(value)  # noqa: E731
    return mock.patch.object(json, "dumps", offers)


def case_malformed_offer(rank, world):
    for text in each():
        with dumped(text) if rank == world - 1 else mock.patch.object(json, "dumps", json.dumps):
            lost(f"came/{world - 1}: {GOT}", meet, rank, world)
            lost(f"came/{world - 1}: {GOT}", meet, rank, world, make=lambda *_: "made")


def case_malformed_verdict(rank, world):
    for text in each(TEXTS[1:]):
        with mock.patch.object(meeting, "_refusal", lambda *_, text=text: text):
            if rank == world - 1:
                time.sleep(1.2)
            lost(f"verdict: {GOT}", meet, rank, world, limit=0.8)


def case_malformed_offer_of_a_layer(rank, world):
    """Of which the next ones know nothing."""
    group = dist.new_group(list(range(world)))
    layer = new_layer(4, process_group=group)
    with dumped('["who", "", [1, 2], [1, "", ""], "", 0.0, 0]'):
        raises(syncbn.PeerLost, f"came/.: {GOT}", layer, torch.randn(3, 4))
    dist.barrier()
    syncbn.reset_groups()
    layer(torch.randn(3, 4))
