# SPDX-License-Identifier: Apache-2.0
"""No operator crashes or damages memory, whatever tensor PyTorch hands it; odd_tensors.py makes the
calls. make sanitize runs them with the sanitizers."""

import os

import pytest
import torch

import odd_tensors
import syncbn
from odd_tensors import C, X
from rank import Rank
from syncbn.operators import ops

CALLS = int(os.environ.get("SYNCBN_EXAMPLES", "60")) * 25


def test_the_table_has_all_operators():
    table = odd_tensors.calls(odd_tensors._group())
    known = {name.split()[0] for name in table} | odd_tensors.OTHERS
    names = torch._C._dispatch_get_all_op_names()
    assert {n.removeprefix("syncbn::") for n in names if n.startswith("syncbn::")} == known


def test_good_arguments_are_taken():
    for name, arguments in odd_tensors.calls(odd_tensors._group()).items():
        getattr(ops, name.split()[0])(*arguments, **odd_tensors.OPTIONS.get(name, {}))


def test_odd_arguments_are_errors_or_results():
    table = odd_tensors.calls(odd_tensors._group())
    before = Rank(X).step()
    counts = odd_tensors.run(CALLS, seed=1)
    assert counts.keys() == table.keys()
    assert sum(errors for _, errors in counts.values()) > CALLS / 4
    assert torch.equal(Rank(X).step(), before)


def _statistics():
    counter = torch.tensor([3])
    return [torch.zeros(C), torch.ones(C), counter, torch.tensor([3, 0])]


@pytest.mark.parametrize("odd", ("negative", "negative imaginary part", "conjugate"))
@pytest.mark.parametrize("at", range(4))
def test_running_statistics_with_a_pending_sign_are_refused(odd, at):
    """PyTorch's own way with such tensors expects the operator to return what it wrote to."""
    rank = Rank(X)
    rank.step()
    good = _statistics()
    given = list(good)
    given[at] = odd_tensors.ODD[odd](good[at])
    text = "negative or conjugate bit, expected the results of tensor.resolve_neg()"
    if at < 3:
        with pytest.raises(RuntimeError, match=text):
            ops.update_running_statistics(*given[:3], rank.saved, 0.1)
    for step in (Rank.begin, Rank.step):
        with pytest.raises(RuntimeError, match=text):
            step(Rank(X, running=given[:3], counters=given[3]))
    assert all(map(torch.equal, good, _statistics()))


def test_a_layer_takes_inputs_with_the_negative_bit_exact():
    """As the imaginary part of a conjugate has it."""
    layers = [syncbn.SyncBatchNorm(C, activation="relu") for _ in range(2)]
    negative = torch.complex(X, X).conj().imag
    assert negative.is_neg()
    given = ((negative, -negative.clone()), (-X, X.clone()))
    assert torch.equal(*(layer(*tensors) for layer, tensors in zip(layers, given, strict=True)))
    assert torch.equal(layers[0].running_var, layers[1].running_var)


def test_eps_has_one_zero():
    messages = [Rank(X, eps=eps).begin() for eps in (0.0, -0.0)]
    assert torch.equal(*messages)
