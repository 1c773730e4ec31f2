# SPDX-License-Identifier: Apache-2.0
"""Networks trained by shares have the same bits on any number of processes. torch.nn and
DistributedDataParallel promise nothing of the kind: gradients are added in an order that depends on
the number of processes."""

import contextlib
import functools
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import share_cases
import syncbn
from rank_runs import TIMEOUT, free_port, quick_context, run_ranks, written
from share_cases import goes_on
from syncbn.__main__ import main

WORLDS = (1, 2, 3)
HASHES = [name for name in vars(share_cases) if name.startswith("hash_")]
TEXTS = [name for name in vars(share_cases) if name.startswith("text_")]


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
        names = [*HASHES, *(TEXTS if world > 1 else [])]
        functions = {name: getattr(share_cases, name) for name in names}
        found[world] = _run(world, folder, functions)
    return found


@pytest.mark.parametrize("name", HASHES)
def test_bits_on_any_number_of_processes_exact(results, name):
    expected = results[1][0][name]
    for world in WORLDS:
        for rank in range(world):
            assert results[world][rank] is not None, f"rank {rank} of {world} ended"
            assert results[world][rank][name] == expected, f"rank {rank} of {world}"


@pytest.mark.parametrize("name", TEXTS)
def test_refusals_reach_every_rank(results, name):
    expected = {
        "text_of_more_processes_than_shares": "ValueError: shares: got {less} for {world} "
        "processes, expected one for each",
        "text_of_other_seeds": "ValueError: Shares: seed: got {ranks}, expected the same on all",
        "text_of_an_argument_that_one_rank_refuses": "got -1, expected an integer of at least 0",
        "text_of_losses_that_one_rank_refuses": "got [(), ()], expected floating-point numbers, "
        "one for each of the 1 shares of this process",
        "text_of_values_that_one_rank_refuses": "got [(2,), (2,)], expected floating-point tensors "
        "of one shape and dtype, one for each of the 1 shares of this process",
        "text_of_a_buffer_of_another_shape": "ValueError: Shares: parameters and buffers",
        "text_of_a_model_that_fails_on_one_rank": "division by zero",
        "text_of_a_frozen_parameter_on_one_rank": "weight, bias on rank 1",
        "text_of_a_backward_inside_the_forward_of_a_share": "got a backward pass inside "
        "the forward of one device",
        "text_of_a_batch_that_one_rank_refuses": "got shape (5, 2), expected equal parts for the 2 "
        "shares of this process along the first axis",
    }
    for world in WORLDS[1:]:
        less = world - 1
        ranks = ", ".join(f"{rank} on rank {rank}" for rank in range(world))
        text = expected[name].format(world=world, less=less, ranks=ranks)
        assert [results[world][rank][name] for rank in range(world)] == [text] * world


@pytest.mark.parametrize("before, after", [(1, 3), (3, 2), (2, 1)])
def test_checkpoint_goes_on_with_other_processes_exact(results, folders, tmp_path, before, after):
    begin = functools.partial(_resume, half=folders[before] / "half")
    resumed = _run(after, tmp_path, {"rest": begin})
    whole = results[1][0]["hash_of_a_training"]
    assert [resumed[rank]["rest"] for rank in range(after)] == [whole] * after


def small() -> nn.Module:
    return syncbn.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))


def test_shares_are_those_of_one_large_batch():
    """Near: sums of 24 terms in another order. One share is the batch itself."""
    torch.manual_seed(1)
    x, dy = torch.randn(24, 2).double(), torch.randn(24, 3).double()
    grads = []
    for shares in (1, 2, 8):
        torch.manual_seed(0)
        model = small().double()
        training = syncbn.Shares(model, shares)
        outputs = training(x)
        losses = [(y * g).sum() * shares for y, g in zip(outputs, training.split(dy))]
        training.backward(losses)
        grads.append([p.grad for p in model.parameters()])
        assert [len(y) for y in outputs] == [24 // shares] * shares
    for other in grads[1:]:
        for a, b in zip(grads[0], other):
            assert (a - b).abs().max() <= 24 * 2.0**-52 * 24 * a.abs().max().clamp(min=1)


def compiled() -> nn.Module:
    part = nn.ReLU()
    part.compile(backend="eager")
    return nn.Sequential(part)


MODELS = (
    (nn.BatchNorm1d(3), "BatchNorm1d at ''.*convert_sync_batchnorm"),
    (nn.DataParallel(nn.Linear(2, 2)), "DataParallel at '', expected the model"),
    (compiled(), "compiled ReLU at '0', expected the model itself"),
    (torch.compile(nn.ReLU()), "compiled OptimizedModule at '', expected"),
    (nn.Embedding(3, 2, sparse=True), "sparse gradients of ''"),
    (syncbn.SyncBatchNorm(3, process_group="mine"), "a process group at ''"),
    (syncbn.SyncBatchNorm(3, statistics="welford"), "statistics='welford' at '', expected 'repro"),
    (syncbn.SyncBatchNorm(3, inplace=True), "inplace=True at '', expected False"),
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


def test_refused_calls_change_nothing():
    training = syncbn.Shares(small(), 2)
    before = syncbn.fingerprint(training)
    for call, text in (
        (lambda: training(), "inputs: got none, expected the model's arguments"),
        (lambda: training(torch.ones(3, 2)), r"inputs\[0\]: got shape \(3, 2\), expected equal"),
        (lambda: training([torch.ones(2, 2)]), r"inputs\[0\]: got a list of 1, expected 2"),
        (lambda: training.split(torch.ones(())), r"x: got shape \(\), expected equal parts"),
        (lambda: training.backward(torch.ones(2)), r"losses: got \[\(2,\)\], expected floating"),
        (lambda: training.backward([1.0, 2.0]), r"losses: got \[1.0, 2.0\], expected floating"),
        (lambda: training.mean([]), r"values: got \[\], expected floating-point tensors"),
        (
            lambda: training.mean([torch.ones(2), torch.ones(3)]),
            r"got \[\(2,\), \(3,\)\], expected",
        ),
        (lambda: training.mean([torch.tensor(1)] * 2), r"got \[\(\), \(\)\], expected floating"),
        (lambda: training.loader(range(9), 3), "batch_size: got 3, expected a multiple of the 2"),
        (lambda: training.loader(iter([1]), 4), "dataset: got list_iterator, whose order"),
        (lambda: training.loader(Stream(), 4), "dataset: got Stream, whose order is its own"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    training.module[1].sync = False
    with pytest.raises(ValueError, match="module: got 1 with sync=False, expected sync=True"):
        training(torch.ones(4, 2))
    assert syncbn.fingerprint(training) == before and training.steps == 0


def test_parameters_may_be_frozen_between_steps_alone():
    model = small()
    training, x = syncbn.Shares(model, 2), torch.ones(4, 2)
    model[0].weight.requires_grad_(False)
    training.backward([y.sum() for y in training(x)])
    assert model[0].weight.grad is None and model[0].bias.grad is not None
    model[0].weight.requires_grad_(True)
    with training.no_sync():
        training.backward([y.sum() for y in training(x)])
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="module: got other parameters that are trained"):
        training(x)
    model[0].weight.requires_grad_(True)
    training.backward([y.sum() for y in training(input=x)])
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("register", ("register_hook", "register_post_accumulate_grad_hook"))
def test_hooks_of_parameters_are_refused(register):
    """They would be called for synchronized layers alone."""
    training = syncbn.Shares(small(), 2)
    handle = getattr(training.module[0].weight, register)(lambda p: None)
    with pytest.raises(
        ValueError, match="module: got a hook of the parameter '0.weight', expected"
    ):
        training(torch.ones(4, 2))
    handle.remove()
    training(torch.ones(4, 2))


class Hidden(nn.Linear):
    """Its output is nothing that Shares looks into."""

    def forward(self, x):
        return torch.distributions.Normal(super().forward(x), 1.0)


def test_losses_of_what_is_hidden_in_outputs_are_refused():
    training = syncbn.Shares(Hidden(2, 2), 2)
    with pytest.raises(
        ValueError, match="losses: got one that reaches parameters past the outputs"
    ):
        training.backward([y.mean.square().sum() for y in training(torch.ones(4, 2))])
    assert all(p.grad is None for p in training.parameters())


def test_a_forward_has_one_backward():
    training = syncbn.Shares(small(), 2)
    outputs = training(torch.ones(4, 2))
    training.backward([y.sum() for y in outputs])
    with pytest.raises(ValueError, match="losses: got one of a forward that had its backward"):
        training.backward([y.sum() for y in outputs])


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


def test_a_backward_that_fails_leaves_no_gradients_exact():
    def fail(gradient):
        raise RuntimeError("of a hook")

    found = []
    for failing in (False, True):
        torch.manual_seed(0)
        model, x = small(), torch.arange(8.0).view(4, 2)
        training = syncbn.Shares(model, 2)
        if failing:
            outputs = training(x)
            outputs[1].register_hook(fail)
            with pytest.raises(RuntimeError, match="of a hook"):
                training.backward([y.sum() for y in outputs])
        training.backward([y.square().sum() for y in training(x)])
        found.append(syncbn.fingerprint([p.grad for p in model.parameters()]))
    assert found[0] == found[1]


def test_state_of_another_training_is_refused_and_nothing_is_loaded():
    training = syncbn.Shares(small(), 2, seed=1)
    before = syncbn.fingerprint(training)
    state = syncbn.Shares(small(), 2, seed=1).state_dict()
    for name, value in (("shares", 3), ("seed", 2), ("PyTorch", "2.0.0")):
        other = dict(state, _extra_state=dict(state["_extra_state"], **{name: value}))
        with pytest.raises(ValueError, match=f"state_dict: got one of a training with {name}"):
            training.load_state_dict(other)
    assert syncbn.fingerprint(training) == before
    training.load_state_dict(state)


def test_a_compiled_program_runs_shares_as_they_are_exact():
    found = []
    for around in (lambda run: run, functools.partial(torch.compile, backend="eager")):
        torch.manual_seed(0)
        training = syncbn.Shares(nn.Sequential(small(), nn.Dropout(0.5)), 2)
        outputs = around(lambda x, training=training: training(x + 1))(torch.ones(4, 2))
        training.backward([y.square().sum() for y in outputs])
        found.append(syncbn.fingerprint([p.grad for p in training.parameters()], outputs))
    assert found[0] == found[1]


def test_evaluation_and_programs_own_random_numbers_are_as_without_shares():
    training = syncbn.Shares(nn.Sequential(small(), nn.Dropout(0.5)), 2)
    x = torch.randn(4, 2)
    torch.manual_seed(7)
    training(x)
    assert torch.equal(torch.randn(3), torch.randn(3, generator=torch.Generator().manual_seed(7)))
    training.eval()
    assert torch.equal(torch.cat(training(x)), training.module(x)) and training.steps == 1


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
    assert syncbn.fingerprint([1], [2]) != syncbn.fingerprint([1, 2])
    x = torch.tensor([1 + 2j])
    assert syncbn.fingerprint(x.conj(), x.conj().imag) == syncbn.fingerprint(
        torch.tensor([1 - 2j]), torch.tensor([-2.0])
    )
    with pytest.raises(ValueError, match="objects: got object, expected modules"):
        syncbn.fingerprint(object())


def test_first_difference_of_two_records(tmp_path, capsys):
    def written_as(name, *values):
        lines = [[step, "bn", "forward", value] for step, value in enumerate(values)]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(tmp_path / name)

    a, other = written_as("a", "0", "1", "2"), written_as("other", "0", "7", "8")
    shorter = written_as("shorter", "0", "1")
    for files, code, text in (
        ((a, a), 0, "no difference"),
        ((a, other), 1, f"step 1, bn, forward: 1 in {a}, 7 in {other}"),
        ((a, shorter), 1, f"{shorter} ends before step 2, bn, forward"),
        ((shorter, a), 1, f"{shorter} ends before step 2, bn, forward"),
    ):
        assert main(["diff", *files]) == code
        assert capsys.readouterr().out == f"{text}\n"
    (tmp_path / "text").write_text("no record\n")
    for name in ("text", "nowhere"):
        with pytest.raises(SystemExit, match="2"):
            main(["diff", a, str(tmp_path / name)])
        assert "expected two files of syncbn.record" in capsys.readouterr().err


def test_records_change_no_bit_and_do_not_nest(tmp_path):
    def gradients(record):
        torch.manual_seed(0)
        model, x = small(), torch.randn(4, 2, requires_grad=True)
        with syncbn.record(model, tmp_path / "a") if record else contextlib.nullcontext():
            model(x).square().sum().backward()
        return syncbn.fingerprint(model, x.grad, [p.grad for p in model.parameters()])

    assert gradients(True) == gradients(False)
    model = small()
    with syncbn.record(model, tmp_path / "a"), pytest.raises(RuntimeError, match="record: got 1, "):
        syncbn.record(model, tmp_path / "b").__enter__()
    assert model[1].state.record is None


def test_gradients_in_a_bucket_are_noted(tmp_path):
    """As DistributedDataParallel's, with gradient_as_bucket_view, which begin at any element."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    for name, start in (("a", 0), ("b", 1)):
        for p in model.parameters():
            p.grad = torch.arange(10.0)[start:][: p.numel()].view_as(p).sub_(start)
        with syncbn.record(model, tmp_path / name):
            optimizer.step()
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
