# SPDX-License-Identifier: Apache-2.0
"""What each of four ranks on two simulated nodes runs; test_nodes.py starts them.

A case is a function case_*(rank, world), as in rank_cases.py; it runs once per layout of LAYOUTS.
"""

import contextlib
import itertools
import re

import numpy as np
import torch
import torch.distributed as dist

import rank_cases
import rank_cases_groups
import rank_cases_join
import rank_cases_modes
import rank_cases_refused
import syncbn
from rank_cases import LogLines, check_layer, diverges, unchanged
from support import assert_same_step, rough_samples
from syncbn.exchange import connections, groups

#: The node of each of four ranks.
LAYOUTS = {"in blocks": "AABB", "interleaved": "ABAB", "uneven": "AAAB", "alone": "ABCD"}
BETWEEN_NODES = "shared memory, gloo between nodes"


def place(nodes: str, rank: int, world: int) -> None:
    """From now on groups are made as if each rank ran on its own of these nodes."""
    groups.node_identity = lambda: f"node {nodes[rank]}"
    forget_groups()


def forget_groups() -> None:
    for key in list(groups._own_groups):
        groups._forget(key)


def engine_and_note() -> tuple[str, str]:
    (row,) = syncbn.report(syncbn.SyncBatchNorm(4))
    return row.engine, row.note


def nodes_of_ranks(world: int) -> list[str]:
    nodes = [None] * world
    dist.all_gather_object(nodes, groups.node_identity())
    return nodes


def all_are_alone(world: int) -> bool:
    """Whether each rank has a node of its own, so that nobody shares memory."""
    return len(set(nodes_of_ranks(world))) == world


def first_of_node(world: int) -> int:
    """The first rank on the last rank's node."""
    nodes = nodes_of_ranks(world)
    return nodes.index(nodes[-1])


def case_report_names_the_engine(rank, world):
    with LogLines() as log:
        engine, note = engine_and_note()
    if all_are_alone(world):
        why = "each rank is the only one of its node or container"
        assert (engine, note) == ("gloo between nodes", f"no shared memory: {why}")
        assert log.of_all_ranks == [f"exchanging over Gloo, not through shared memory: {why}"]
    else:
        assert (engine, note) == (BETWEEN_NODES, "")
        assert log.of_all_ranks == []


def case_uneven_batches_exact(rank, world):
    """Groups of the ranks that remain, on nodes that lose theirs one by one."""
    rank_cases_join.check_uneven(rank, world, [2, 1, 4, 3], lambda network: network)


def case_compiled_wide_step_is_equal_exact(rank, world):
    eager, traced = syncbn.SyncBatchNorm(600), syncbn.SyncBatchNorm(600)
    step = torch.compile(traced, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 600, generator=torch.Generator().manual_seed(rank))
    assert_same_step(step, eager, x)


def case_compiled_step_goes_on_after_reset_exact(rank, world):
    eager, traced = syncbn.SyncBatchNorm(4), syncbn.SyncBatchNorm(4)
    step = torch.compile(traced, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        assert torch.equal(eager(x), step(x))
        syncbn.reset_groups()
    assert torch.equal(eager.running_var, traced.running_var)


def case_disagreement_of_any_rank_is_an_error_on_every_rank(rank, world):
    """Each rank in turn is the odd one: a node's first rank, and one that is not."""
    layer = syncbn.SyncBatchNorm(4)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    for odd in range(world):
        layer.eps = 1e-3 if rank == odd else 1e-5
        diverges(f"same call: eps: .*0.001 on rank {odd}", layer, torch.eye(4))
        unchanged(layer, before)
    layer.eps = 1e-5
    layer(torch.eye(4))


case_bits_equal_the_oracle_exact = rank_cases.case_bits_equal_the_oracle_exact
case_layers_wider_than_the_frame_exact = rank_cases.case_layers_wider_than_the_frame_exact
case_disagreement = rank_cases.case_disagreement_is_an_error_on_every_rank
case_bad_input = rank_cases_refused.case_bad_input_is_an_error_on_every_rank
case_empty_rank_of_another_dtype = rank_cases.case_empty_rank_of_another_dtype
case_interrupted = rank_cases_groups.case_interrupted_within_a_second
case_welford_within_bound = rank_cases_modes.case_welford_within_bound
case_welford_gradients = rank_cases_modes.case_welford_gradients
case_welford_disagreement = rank_cases_modes.case_welford_disagreement_and_empty_ranks


class _Failing:
    """The operators, of which one fails in this process. What the system itself refuses is not
    played here: a limit of the process would hit PyTorch's threads, too."""

    def __init__(self, ops, name):
        self._ops, self._name = ops, name

    def __getattr__(self, name):
        return getattr(self._ops, name)

    def shm_offer(self, offer, rank, size):
        handle = self._ops.shm_offer(offer, rank, size)
        if self._name == "bytes":
            offer[:8] ^= 0xFF  # an offer begins with the version of the exchange
        return handle

    def shm_open(self, *arguments):
        if self._name == "shm_open":
            raise RuntimeError("memfd_create: Too many open files")
        return self._ops.shm_open(*arguments)


@contextlib.contextmanager
def _cannot_share_memory(refusing: bool, how: str):
    ops = connections.ops
    if refusing:
        connections.ops = _Failing(ops, how)
    try:
        yield
    finally:
        connections.ops = ops


#: What goes wrong, and what the log says of it.
REFUSALS = {
    "shm_open": ".*Too many open files",
    "bytes": r"(offers: got other bytes|rank \d has another version of the exchange)",
}


def case_one_rank_that_cannot_share_memory_exact(rank, world):
    """All ranks of all nodes take Gloo, and say why once; with the same bits."""
    if all_are_alone(world):
        return  # no shared memory to begin with
    forget_groups()
    x = rough_samples(np.random.default_rng(42), (11, 5, 6), "float32")
    for refusing, how in itertools.product((0, world - 1), REFUSALS):
        with _cannot_share_memory(rank == refusing, how), LogLines() as log:
            syncbn.reset_groups()
            engine, note = engine_and_note()
        assert engine == "gloo between nodes"
        (line,) = log.of_all_ranks
        why = note.removeprefix("no shared memory: ")
        first = 0 if refusing == 0 else first_of_node(world) if how == "bytes" else refusing
        expected = f"rank {first}: on its node, whose ranks count from 0: {REFUSALS[how]}"
        assert re.match(expected, why), f"{how} on rank {refusing}: {why}"
        assert line == f"exchanging over Gloo, not through shared memory: {why}"
        check_layer(rank, world, x, x, "float32", "uneven")
    syncbn.reset_groups()
    assert engine_and_note() == (BETWEEN_NODES, "")
    check_layer(rank, world, x, x, "float32", "uneven")
