# SPDX-License-Identifier: Apache-2.0
"""The operators of a shared-memory group, called by name: what they are given, and what becomes of
an exchange whose caller drops it."""

import gc

import pytest
import torch

from syncbn.operators import DONE, PENDING, ops


def new_offer() -> torch.Tensor:
    return torch.zeros(256, dtype=torch.uint8)


def two_ranks() -> list[int]:
    """Both in this process."""
    offers = [new_offer(), new_offer()]
    handles = [ops.shm_offer(offer, rank, 2) for rank, offer in enumerate(offers)]
    for handle in handles:
        assert ops.shm_open(handle, torch.cat(offers), 20.0) == ""
    return handles


@pytest.mark.parametrize("rank, size", ((-1, 2), (2, 2), (2**32, 2), (0, 2**32 + 1), (0, 0)))
def test_ranks_are_checked(rank, size):
    with pytest.raises(RuntimeError, match="^(rank|ranks|size): got "):
        ops.shm_offer(new_offer(), rank, size)


def test_offers_of_other_dtypes_and_strides_are_refused():
    offer = new_offer()
    handle = ops.shm_offer(offer, 0, 1)
    wide = torch.zeros(512, dtype=torch.uint8)
    wide[::2] = offer
    text = ": expected a contiguous uint8 tensor of 256 entries on the CPU"
    for bad in (offer.view(torch.int8), offer.long(), wide[::2], offer[:1].expand(256)):
        with pytest.raises(RuntimeError, match=f"^offers{text}"):
            ops.shm_open(handle, bad, 20.0)
        with pytest.raises(RuntimeError, match=f"^out{text}"):
            ops.shm_offer(bad, 0, 1)
    for timeout in (float("nan"), float("inf"), 0.0, -1.0, 1e10):
        with pytest.raises(RuntimeError, match="^timeout: got .* expected a positive number"):
            ops.shm_open(handle, offer, timeout)
    assert ops.shm_open(handle, offer, 20.0) == ""


@pytest.mark.parametrize("words", (60, 1_000_000))
def test_a_pending_result_that_is_dropped_is_not_written_after_its_end(words):
    zero, one = two_ranks()
    message = torch.arange(words)
    total, status = ops.shm_sum(message, zero, 0)
    assert status == PENDING
    del total
    gc.collect()
    others = [torch.zeros(words, dtype=torch.int64) for _ in range(20)]
    second, statuses = ops.shm_sum(message, one, 0)[0], [PENDING]
    while PENDING in statuses:  # a long message goes in pieces
        statuses = [ops.shm_wait(zero, 10)[0], ops.shm_wait(one, 10)[0]]
    assert statuses == [DONE, DONE] and torch.equal(second, 2 * message)
    assert not any(other.any() for other in others)
    for handle in (zero, one):
        ops.shm_leave(handle)


def test_a_second_exchange_waits_for_the_end_of_the_first():
    zero, one = two_ranks()
    message = torch.arange(60)
    first, status = ops.shm_sum(message, zero, 0)
    assert status == PENDING
    text = "^handle: got a group in the middle of an exchange, expected its end"
    with pytest.raises(RuntimeError, match=text):
        ops.shm_sum(message, zero, 0)
    second, status = ops.shm_sum(message, one, 0)
    assert status == DONE and ops.shm_wait(zero, 10)[0] == DONE
    assert torch.equal(first, 2 * message) and torch.equal(second, first)
