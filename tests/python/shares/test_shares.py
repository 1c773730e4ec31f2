# SPDX-License-Identifier: Apache-2.0
"""Networks trained by shares have the same bits on any number of processes. torch.nn and
DistributedDataParallel promise nothing of the kind: gradients are added in an order that depends on
the number of processes."""

import copy
import functools
import itertools
import json
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import share_cases
import share_programs
import share_refused
import share_texts
import syncbn
from rank_runs import TIMEOUT, free_port, quick_context, run_ranks, written
from share_cases import goes_on

WORLDS = (1, 2, 3, 4)
HASHES = [name for name in vars(share_cases) if name.startswith("hash_")]
TEXTS = [name for name in vars(share_texts) if name.startswith("text_")]


def _rank_main(rank: int, world: int, port: int, folder: Path, functions: dict) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=TIMEOUT)
    said = {name: function(rank, world, folder) for name, function in functions.items()}
    folder.joinpath(f"{rank}.json").write_text(json.dumps(said))
    if world > 1:
        dist.destroy_process_group()


def _run(world: int, folder: Path, functions: dict) -> dict:
    """{rank: {name: what the function returned}}."""
    arguments = (world, free_port(), folder, functions)
    run_ranks(quick_context(), _rank_main, world, arguments, 300)
    return written(str(folder), world)


def _resume(rank: int, world: int, folder: Path, half: Path) -> str:
    return goes_on(half, 2, None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{world: where its processes leave files}."""
    return {world: tmp_path_factory.mktemp(f"world{world}") for world in WORLDS}


@pytest.fixture(scope="module")
def results(folders):
    """{world: {rank: {name: what it returned}}}."""
    found = {}
    for world, folder in folders.items():
        names = [*HASHES, "programs_that_are_refused", *(TEXTS if world > 1 else [])]
        functions = {n: getattr(share_texts if n in TEXTS else share_cases, n) for n in names}
        found[world] = _run(world, folder, functions)
    return found


@pytest.mark.parametrize("name", HASHES)
def test_bits_on_any_number_of_processes_exact(results, name):
    expected = results[1][0][name]
    for world in WORLDS:
        for rank in range(world):
            assert results[world][rank] is not None, f"rank {rank} of {world} ended"
            assert results[world][rank][name] == expected, f"rank {rank} of {world}"


@pytest.mark.parametrize("name", share_programs.EQUAL)
def test_programs_have_the_same_bits_exact(results, name):
    found = {results[w][r]["hash_of_programs"][name] for w in WORLDS for r in range(w)}
    assert len(found) == 1 and "Error" not in found.pop()


@pytest.mark.parametrize("name", share_refused.REFUSED)
def test_programs_are_refused_by_name_on_every_rank(results, name):
    text = share_refused.REFUSED[name][1]
    for world in WORLDS:
        for rank in range(world):
            if world == 4 and name in share_refused.OF_SEVERAL_SHARES:
                continue
            found = results[world][rank]["programs_that_are_refused"][name]
            assert text in found, f"rank {rank} of {world}: {found}"


@pytest.mark.parametrize("name", TEXTS)
def test_refusals_reach_every_rank(results, name):
    expected = {
        "text_of_more_processes_than_shares": "ValueError: shares: got {less} for {world} "
        "processes, expected one for each",
        "text_of_other_seeds": "ValueError: Shares: seed: got {ranks}, expected the same on all",
        "text_of_an_argument_that_one_rank_refuses": "got -1, expected an integer of at least 0",
        "text_of_a_step_that_one_rank_refuses": "got 2, expected a list of 1, one entry for each "
        "share of this process",
        "text_of_a_buffer_of_another_shape": "ValueError: Shares: parameters and buffers",
        "text_of_a_model_that_fails_on_one_rank": "division by zero",
        "text_of_a_frozen_parameter_on_one_rank": "weight on rank 1",
        "text_of_a_batch_that_one_rank_cannot_load": "'no such file'",
        "text_of_ranks_that_differ": "differing, whose ranks differ: step 0, bias, gradient",
        "text_of_other_data": ["samples", "batch size", "shuffle", "epoch", "batch"],
        "text_of_other_options": ["threads", "default dtype", "denormal numbers", "parameters"],
    }
    for world in WORLDS[1:]:
        less = world - 1
        ranks = ", ".join(f"{rank} on rank {rank}" for rank in range(world))
        text = expected[name]
        if isinstance(text, str):
            text = text.format(world=world, less=less, ranks=ranks)
        assert [results[world][rank][name] for rank in range(world)] == [text] * world


@pytest.mark.parametrize("before, after", [(1, 3), (3, 2), (2, 1)])
def test_checkpoint_goes_on_with_other_processes_exact(results, folders, tmp_path, before, after):
    begin = functools.partial(_resume, half=folders[before] / "half")
    resumed = _run(after, tmp_path, {"rest": begin})
    whole = results[1][0]["hash_of_a_training"]
    assert [resumed[rank]["rest"] for rank in range(after)] == [whole] * after


def small() -> nn.Module:
    return syncbn.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))


def square(model, batch):
    return model(batch).square().sum()


def test_shares_are_those_of_one_large_batch():
    """Near: sums of 24 terms in another order. One share is the batch itself."""
    torch.manual_seed(1)
    x, dy = torch.randn(24, 2).double(), torch.randn(24, 3).double()
    grads = []
    for shares in (1, 2, 8):
        torch.manual_seed(0)
        model = small().double()
        training = syncbn.Shares(model, shares)
        batches = list(zip(x.chunk(shares), dy.chunk(shares)))
        training.step(lambda m, batch: (m(batch[0]) * batch[1]).sum() * shares, batches)  # noqa: B023
        grads.append([p.grad for p in model.parameters()])
    for other in grads[1:]:
        for a, b in zip(grads[0], other):
            assert (a - b).abs().max() <= 24 * 2.0**-52 * 24 * a.abs().max().clamp(min=1)


MODELS = (
    (nn.BatchNorm1d(3), "BatchNorm1d at ''.*convert_sync_batchnorm"),
    (nn.DataParallel(nn.Linear(2, 2)), "DataParallel at '', expected the model"),
    (nn.Embedding(3, 2, sparse=True), "sparse gradients of ''"),
    (syncbn.SyncBatchNorm(3, process_group="mine"), "a process group at ''"),
    (
        syncbn.SyncBatchNorm(3, statistics="welford"),
        "statistics='welford' at '', whose bits depend on how samples are split, expected 'repro",
    ),
    (
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
        r"tensors on \['cpu', 'meta'\], expected one device",
    ),
    ("model", "str, expected a torch.nn.Module"),
)


@pytest.mark.parametrize(
    "module, options, text",
    [
        *((module, {}, f"module: got {text}") for module, text in MODELS),
        (nn.Linear(2, 2), {"shares": 0}, "shares: got 0, expected an integer of at least 1"),
        (nn.Linear(2, 2), {"seed": 1.5}, "seed: got 1.5, expected an integer of at least 0"),
    ],
)
def test_refused_models(module, options, text):
    with pytest.raises(ValueError, match=text):
        syncbn.Shares(module, **{"shares": 2} | options)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(len(self)))

    def __len__(self) -> int:
        return 9


class Draws(torch.utils.data.Dataset):
    """As transforms of MONAI and Albumentations do, with a generator of their own."""

    def __init__(self, generator):
        self.transforms = [functools.partial(self.noisy, generator)]

    @staticmethod
    def noisy(generator, x):
        own = isinstance(generator, torch.Generator)
        return torch.rand(2, generator=generator) if own else x + generator.random()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index):
        return self.transforms[0](torch.ones(2))


@pytest.mark.parametrize(
    "make", [lambda: np.random.default_rng(0), lambda: random.Random(0), torch.Generator]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_datasets_that_draw_from_others_are_refused(make, workers):
    loader = syncbn.Shares(small(), 2).loader(Draws(make()), 4, num_workers=workers)
    with pytest.raises(ValueError, match="dataset: got random numbers from the generator 'dataset"):
        next(iter(loader))


def ones(count):
    return [torch.ones(2, 2)] * count


def test_a_loop_that_is_left_goes_on_with_the_next_batch_exact():
    """Also in another run, which loads what was saved behind the break."""

    def new():
        return syncbn.Shares(small(), 2).loader(range(20), 4)

    def parts(loader, most=10):
        return [torch.cat(batches).tolist() for batches in itertools.islice(loader, most)]

    whole = new()
    expected = parts(whole) + parts(whole)
    left, other = new(), new()
    seen = parts(left, 3)
    assert left.state_dict() == {"epoch": 0, "batch": 3, "samples": 20}
    other.load_state_dict(left.state_dict())
    for loader in (left, other):
        assert seen + parts(loader) + parts(loader) == expected
    assert len(parts(left, 5)) == 5  # the last batch ends the epoch, however the loop ends
    assert left.state_dict() == {"epoch": 3, "batch": 0, "samples": 20}


def test_refused_calls_change_nothing():
    training = syncbn.Shares(small(), 2)
    before = syncbn.fingerprint(training)
    where = "and the network itself everywhere else"
    for call, text in (
        (lambda: training(torch.ones(4, 2)), f"Shares: got a call, .*{where}"),
        (lambda: training.to(torch.float64), f"Shares: got a call of to\\(\\).*{where}"),
        (lambda: training.step(None, ones(2)), "loss: got None, expected a function"),
        (lambda: training.step(square, torch.ones(2, 2)), "batches: got Tensor, expected a list"),
        (lambda: training.step(square, ones(1)), "batches: got 1, expected a list of 2"),
        (
            lambda: training.step(lambda m, x: m(x), ones(2)),
            "loss: got 'loss' of Tensor, expected a n",
        ),
        (lambda: training.step(lambda m, x: None, ones(2)), "loss: got None, expected a tensor of"),
        (lambda: training.loader(range(9), 3), "batch_size: got 3, expected a multiple of the 2"),
        (lambda: training.loader(iter([1]), 4), "dataset: got list_iterator, whose order"),
        (lambda: training.loader(Stream(), 4), "dataset: got Stream, whose order is its own"),
        (lambda: training.loader(range(9), 4, sampler=[1]), "sampler: got one, expected none"),
        (lambda: training.loader(range(9), 4).set_epoch(-1), "epoch: got -1, expected an integer"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    for name, value in (("epoch", "7"), ("batch", 2.5), ("batch", 3), ("samples", 8)):
        state = {"epoch": 0, "batch": 0, "samples": 9} | {name: value}
        with pytest.raises(ValueError, match="state_dict"):
            training.loader(range(9), 4).load_state_dict(state)
    training.module[1].sync = False
    with pytest.raises(ValueError, match="module: got 1 with sync=False"):
        training.step(square, ones(2))
    training.module[1].sync = True
    syncbn.set_group(training.module, timeout=3.0)
    with pytest.raises(ValueError, match="module: got 1 with .*another group than"):
        training.step(square, ones(2))
    assert training.steps == 0
    assert all(p.grad is None for p in training.parameters()) and before


@pytest.mark.parametrize("change", [lambda p: p.mul_(0.9), lambda p: p.data.mul_(0.9)])
def test_a_parameter_written_later_is_refused(change):
    """Frozen ones have no copies once nobody wrote to them in the first steps."""
    model = nn.Sequential(small(), nn.Linear(3, 3).requires_grad_(False))
    training = syncbn.Shares(model, 2)
    for _ in range(3):
        training.step(square, ones(2))

    def follow(module, inputs):
        change(module.weight)

    model[1].register_forward_pre_hook(follow)
    with pytest.raises(ValueError, match="writes to the frozen parameter '1.weight' now"):
        training.step(square, ones(2))


def test_precision_of_float32_is_part_of_the_environment(monkeypatch):
    """However it is chosen."""
    states = [syncbn.Shares(small(), 2).state_dict()]
    for operation in ("matmul", "conv", "rnn"):
        backend = getattr(torch.backends.mkldnn, operation)
        before = backend.fp32_precision
        try:
            backend.fp32_precision = "bf16"
            with pytest.raises(ValueError, match="a training with float32 precision"):
                syncbn.Shares(small(), 2).load_state_dict(states[0])
        finally:
            backend.fp32_precision = before
    syncbn.Shares(small(), 2).load_state_dict(states[0])


def test_state_of_another_training_is_refused_and_nothing_is_loaded():
    training = syncbn.Shares(small(), 2, seed=1)
    before = syncbn.fingerprint(training)
    state = syncbn.Shares(small(), 2, seed=1).state_dict()
    wrong = [("steps", value) for value in (-5, "7", 2.5, None)]
    for name, value in (("shares", 3), ("seed", 2), ("PyTorch", "2.0.0"), *wrong):
        other = dict(state, _extra_state=dict(state["_extra_state"], **{name: value}))
        with pytest.raises(ValueError, match=f"state_dict: .*{name}"):
            training.load_state_dict(other)
    assert syncbn.fingerprint(training) == before
    training.load_state_dict(state)


def test_evaluation_and_programs_own_random_numbers_are_as_without_shares():
    model = nn.Sequential(small(), nn.Dropout(0.5))
    training = syncbn.Shares(model, 2)
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    training.step(square, ones(2))
    assert torch.equal(torch.randn(3), torch.randn(3, generator=torch.Generator().manual_seed(7)))
    assert random.random() == random.Random(7).random()
    assert np.random.rand() == np.random.RandomState(7).rand()
    model.eval()
    with torch.no_grad():
        model(torch.ones(4, 2))
    assert training.steps == 1


def test_numbers_are_means_over_all_shares():
    training = syncbn.Shares(small(), 3)

    def loss(model, batch):
        return {"loss": square(model, batch), "index": batch[0, 0].long(), "half": 0.5}

    batches = [torch.full((2, 2), float(i)) for i in (1, 2, 6)]
    means = training.step(loss, batches)
    assert means["index"] == 3 and means["half"] == 0.5 and list(means) == ["loss", "index", "half"]
    alone = training.step(lambda model, batch: square(model, batch) * 0 + batch[0, 0], batches)
    assert alone == 3 and alone.dtype == torch.float32 and alone.shape == ()


def test_processes_of_another_number_are_refused(monkeypatch):
    training = syncbn.Shares(small(), 2)
    copied = pickle.loads(pickle.dumps(training))
    assert syncbn.fingerprint(copied) == syncbn.fingerprint(copy.deepcopy(training))
    copied.step(square, ones(2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        copied.step(square, ones(2))  # one process still
        with pytest.raises(ValueError, match="DistributedDataParallel around it, expected"):
            nn.parallel.DistributedDataParallel(copied)
        monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
        with pytest.raises(ValueError, match="Shares: got 2 processes, expected 1 as where it was"):
            training.step(square, ones(2))
    finally:
        dist.destroy_process_group()
    monkeypatch.undo()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="Shares: got one process, though the environment has"):
        syncbn.Shares(nn.Linear(2, 2), 2)


def test_fingerprints():
    model = small()
    whole = syncbn.fingerprint(model)
    assert len(whole) == 64 and whole == syncbn.fingerprint(syncbn.Shares(model, 1))
    assert whole == syncbn.fingerprint(torch.compile(model))
    with torch.no_grad():
        model[0].weight[0, 0] += 0.0
        assert syncbn.fingerprint(model) == whole
        model[0].weight[0, 0] *= 1 + 2.0**-23
    assert syncbn.fingerprint(model) != whole
    assert syncbn.fingerprint(torch.tensor(-0.0)) != syncbn.fingerprint(torch.tensor(0.0))
    for kind, tensor in (
        ("sparse", torch.eye(2).to_sparse()),
        ("nested", torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])),
        ("meta", torch.ones(1).to("meta")),
    ):
        with pytest.raises(ValueError, match=f"objects: got a .*{kind}.* tensor, expected one"):
            syncbn.fingerprint(tensor)
    with pytest.raises(ValueError, match="objects: got object, expected modules"):
        syncbn.fingerprint(object())
