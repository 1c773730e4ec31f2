"""What each of four ranks on two simulated nodes runs; test_nodes.py starts them.

A case is a function case_*(rank, world), as in rank_cases.py; it runs once per layout of LAYOUTS.
"""

import contextlib
import logging

import numpy as np
import torch
import torch.distributed as dist

import oracle
import rank_cases
import rank_cases_groups
import rank_cases_modes
import syncbn
from rank_cases import check_layer, raises, unchanged
from support import rough_samples
from syncbn import _groups, _shared_memory

#: The node of each of four ranks.
LAYOUTS = {"in blocks": "AABB", "interleaved": "ABAB", "uneven": "AAAB"}
BETWEEN_NODES = "shared memory, gloo between nodes"


def place(nodes: str, rank: int) -> None:
    """From now on groups are made as if each rank ran on its own of these nodes."""
    _groups.node_identity = lambda: f"node {nodes[rank]}"


class LogLines(logging.Handler):
    """What the package logs meanwhile, on all ranks."""

    def __enter__(self):
        self.lines = []
        logging.getLogger("syncbn").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("syncbn").removeHandler(self)
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.lines)
        self.of_all_ranks = [line for lines in gathered for line in lines]

    def emit(self, record):
        self.lines.append(record.getMessage())


def engine_and_note() -> tuple[str, str]:
    (row,) = syncbn.report(syncbn.SyncBatchNorm(4))
    return row.engine, row.note


def is_uneven(world: int) -> bool:
    """Whether some node has one rank alone, which has nobody to share memory with."""
    nodes = [None] * world
    dist.all_gather_object(nodes, _groups.node_identity())
    return any(nodes.count(node) == 1 for node in nodes)


def case_report_names_the_engine(rank, world):
    with LogLines() as log:
        syncbn.reset_groups()
        engine, note = engine_and_note()
    if is_uneven(world):
        why = f"rank {world - 1}: it is the only rank of its node"
        assert (engine, note) == ("gloo between nodes", f"no shared memory: {why}")
        assert log.of_all_ranks == [f"exchanging over Gloo, not through shared memory: {why}"]
    else:
        assert (engine, note) == (BETWEEN_NODES, "")
        assert log.of_all_ranks == []


def case_bits_equal_the_oracle_exact(rank, world):
    for dtype in ("bfloat16", "float32", "float64"):
        rng = np.random.default_rng(40)
        x = rough_samples(rng, (11, 5, 6, 7), dtype)
        dy = oracle.round_to(rng.standard_normal(x.shape), dtype)
        for kind in ("even", "uneven", "empty first"):
            check_layer(rank, world, x, dy, dtype, kind)
    check_layer(rank, world, x, dy, dtype, "uneven", "global")


def case_layers_wider_than_the_frame_exact(rank, world):
    for channels, dtype in ((512, "float32"), (513, "float32"), (130, "float64")):
        rng = np.random.default_rng(41)
        x = rough_samples(rng, (6, channels), dtype)
        dy = oracle.round_to(rng.standard_normal(x.shape), dtype)
        check_layer(rank, world, x, dy, dtype, "uneven")


def case_compiled_wide_step_is_equal_exact(rank, world):
    eager, traced = syncbn.SyncBatchNorm(600), syncbn.SyncBatchNorm(600)
    step = torch.compile(traced, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 600, generator=torch.Generator().manual_seed(rank))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    ya, yb = eager(a), step(b)
    ya.square().sum().backward()
    yb.square().sum().backward()
    assert torch.equal(ya, yb) and torch.equal(a.grad, b.grad)
    assert torch.equal(eager.running_var, traced.running_var)


def case_disagreement_of_any_rank_is_an_error_on_every_rank(rank, world):
    """Each rank in turn is the odd one: a node's first rank, and one that is not."""
    layer = syncbn.SyncBatchNorm(4)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    for odd in range(world):
        layer.eps = 1e-3 if rank == odd else 1e-5
        raises(syncbn.DivergenceError, "same call: rank 0: .*rank 3: ", lambda: layer(torch.eye(4)))
        unchanged(layer, before)
    layer.eps = 1e-5
    layer(torch.eye(4))


case_disagreement = rank_cases.case_disagreement_is_an_error_on_every_rank
case_refused_input = rank_cases.case_refused_input_is_an_error_on_every_rank
case_empty_rank_of_another_dtype = rank_cases.case_empty_rank_of_another_dtype
case_compiled_step = rank_cases.case_compiled_step_is_equal_exact
case_interrupted = rank_cases_groups.case_interrupted_within_a_second
case_welford_within_bound = rank_cases_modes.case_welford_within_bound
case_welford_gradients = rank_cases_modes.case_welford_gradients
case_welford_disagreement = rank_cases_modes.case_welford_disagreement_and_empty_ranks


class _OldOffer:
    """The operators, in a process whose library has another version of the exchange."""

    def __init__(self, ops):
        self._ops = ops

    def __getattr__(self, name):
        return getattr(self._ops, name)

    def shm_offer(self, offer, rank, size):
        handle = self._ops.shm_offer(offer, rank, size)
        offer[:8] ^= 0xFF  # an offer begins with its version
        return handle


@contextlib.contextmanager
def _cannot_share_memory(refusing: bool):
    ops = _shared_memory.ops
    if refusing:
        _shared_memory.ops = _OldOffer(ops)
    try:
        yield
    finally:
        _shared_memory.ops = ops


def case_one_rank_that_cannot_share_memory_exact(rank, world):
    """All ranks of all nodes take Gloo, and say why once; with the same bits."""
    if is_uneven(world):
        return  # no shared memory to begin with
    # The ranks of a node are numbered from 0; ranks of other nodes name the world's rank that says
    # so.
    why = r"rank \d: rank \d has another version of the exchange"
    x = rough_samples(np.random.default_rng(42), (11, 5, 6), "float32")
    for refusing in range(world):
        with _cannot_share_memory(rank == refusing), LogLines() as log:
            syncbn.reset_groups()
            engine, note = engine_and_note()
        assert engine == "gloo between nodes"
        (line,) = log.of_all_ranks
        raises(ValueError, f"^exchanging over Gloo, not through shared memory: {why}$", _say(line))
        raises(ValueError, f"^no shared memory: {why}$", _say(note))
        check_layer(rank, world, x, x, "float32", "uneven")
    syncbn.reset_groups()
    assert engine_and_note() == (BETWEEN_NODES, "")
    check_layer(rank, world, x, x, "float32", "uneven")


def _say(text: str):
    def function():
        raise ValueError(text)

    return function
