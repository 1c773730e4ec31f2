# SPDX-License-Identifier: Apache-2.0
"""syncbn.record, and what `python -m syncbn diff` and `prove` make of its notes; those of several
processes: share_cases.py."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import syncbn
from syncbn.__main__ import main
from syncbn.models import recording
from test_shares import small

PROGRAM = str(Path(__file__).parent / "proved_program.py")


def test_first_difference_of_two_records(tmp_path, capsys):
    def written_as(name, *values, kind="forward", begin=()):
        lines = [[step, kind, -1, 0, "bn", value] for step, value in enumerate(values)]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in [*begin, *lines]))
        return str(tmp_path / name)

    a, other = written_as("a", "0", "1", "2"), written_as("other", "0", "7", "8")
    shorter = written_as("shorter", "0", "1")
    threads = written_as("threads", "5", begin=[[0, "environment", -1, 0, "threads", "2"]])
    less = written_as("less", "6", begin=[[0, "environment", -1, 0, "threads", "1"]])
    for files, code, text in (
        ((a, a), 0, "no difference"),
        ((a, other), 1, f"step 1, bn, forward: 1 in {a}, 7 in {other}"),
        ((a, shorter), 1, f"{shorter} has no step 2, bn, forward"),
        ((shorter, a), 1, f"{shorter} has no step 2, bn, forward"),
        ((threads, less), 1, f"environment, threads: 2 in {threads}, 1 in {less}"),
    ):
        assert main(["diff", *files]) == code
        assert capsys.readouterr().out == f"{text}\n"
    damaged = ["no record\n", "[1, 2]\n", '{"a": 1}\n', '[0, "other", -1, 0, "bn", "1"]\n', "7\n"]
    for text in (*damaged, '[0, "forward", -1, 0, "bn"\n', '[{}, "forward", [], 0, "bn", "1"]\n'):
        (tmp_path / "text").write_text(text)
        with pytest.raises(SystemExit, match="2"):
            main(["diff", a, str(tmp_path / "text")])
        assert "expected two files of syncbn.record" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["diff", a, str(tmp_path / "nowhere")])


def test_records_change_no_bit_and_do_not_nest(tmp_path):
    def gradients(record):
        torch.manual_seed(0)
        model, x = small(), torch.randn(4, 2, requires_grad=True)
        with syncbn.record(model, tmp_path / "a") if record else contextlib.nullcontext():
            model(x).square().sum().backward()
        return syncbn.fingerprint(model, x.grad, [p.grad for p in model.parameters()])

    assert gradients(True) == gradients(False)
    model = small()
    with syncbn.record(model, tmp_path / "a"), pytest.raises(RuntimeError, match="record: got a m"):
        syncbn.record(syncbn.Shares(model, 1), tmp_path / "b").__enter__()
    with syncbn.record(model, tmp_path / "a"):  # another one
        pass


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path):
    model = small()
    with pytest.warns(UserWarning, match="syncbn.record: .*nothing is noted"):
        with syncbn.record(model, tmp_path / "nowhere" / "a"):
            model(torch.ones(2, 2).cumsum(0))
    with pytest.warns(UserWarning, match="syncbn.record: .*the notes end here"):
        with syncbn.record(model, "/dev/full"):
            model(torch.ones(2, 2).cumsum(0))


def test_where_a_gradient_lies_is_noted(tmp_path):
    """Rows that are exchanged, and steps of one ulp that cancel each other."""
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradient = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    near = gradient.clone()
    near.view(torch.int32)[0] += torch.tensor([1, -1], dtype=torch.int32)
    for name, value in (("a", gradient), ("b", gradient.flip(0)), ("c", near)):
        model.weight.grad = value.clone()
        with syncbn.record(model, tmp_path / name):
            optimizer.step()
    for name in "bc":
        text = recording.first_difference(tmp_path / "a", tmp_path / name)
        assert text.startswith("step 0, weight, gradient: ")


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    (
        ("nothing", 0, "the same bits after 2 steps"),
        ("module", 1, "the first difference: step 0, share 2, 1, forward: "),
        pytest.param(
            *("data", 1, "the first difference: step 0, share 2, batch: "), marks=pytest.mark.weekly
        ),
    ),
)
def test_prove_finds_what_differs_first(capfd, fault, code, text):
    assert main(["prove", "--processes", "1,2", "--steps", "2", PROGRAM, fault]) == code
    assert text in capfd.readouterr().out


def test_prove_ends_with_an_error_in_its_last_line(capfd):
    assert main(["prove", "--processes", "1", PROGRAM, "list"]) == 2
    last = capfd.readouterr().out.splitlines()[-1]
    error = "ValueError: loss: got a forward that changes seen"
    assert last.startswith(f"  1 process ended before step 3: {error}")
    with pytest.raises(SystemExit, match="2"):
        main(["prove", "--steps", "0", PROGRAM])
