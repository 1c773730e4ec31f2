# SPDX-License-Identifier: Apache-2.0
"""Operators called with arguments of which one or two are odd: any tensor that PyTorch can make,
and numbers at the ends of their ranges. Under a sanitizer, as scripts/sanitize.sh starts the tests,
`python odd_tensors.py CALLS SEED` finds what only damages memory."""

import random
import sys

import torch

import syncbn.ops  # noqa: F401  its operators
from rank import Rank
from syncbn.operators import ALONE, FRAMED, MESSAGE, OWN, WANTS_SHARE, WANTS_U, ops

C = 4
X = torch.linspace(-2, 3, 60).sin().view(5, C, 3)
EPS = 1e-5


class Wrapped(torch.Tensor):
    """A subclass that does nothing of its own."""


def _resized(t, share):
    t = t.clone()
    t.untyped_storage().resize_(int(t.untyped_storage().nbytes() * share))
    return t


def _conjugate(t):
    return torch.complex(t.float(), t.float()).conj()


def _overlapping(t):
    return t.flatten().as_strided(t.shape, [1 if s > 1 else 0 for s in t.shape])


def _garbage(t):
    data = random.Random(str(t.shape)).randbytes(max(t.numel(), 1) * t.element_size())
    return torch.frombuffer(bytearray(data), dtype=t.dtype)[: t.numel()].view(t.shape)


def _inference(t):
    with torch.inference_mode():
        return t.clone()


def _strided_slice(t):
    return torch.stack((t, t), -1)[..., 0]


ODD = {
    "negative": lambda t: torch._neg_view(t),
    "negative imaginary part": lambda t: _conjugate(t).imag,
    "conjugate": _conjugate,
    "expanded": lambda t: t.flatten()[:1].expand(t.numel()).view(t.shape),
    "overlapping": _overlapping,
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "sparse": lambda t: t.to_sparse(),
    "sparse rows": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.float().to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "jagged": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
    "meta": lambda t: t.to("meta"),
    "zeros without memory": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "requires grad": lambda t: t.clone().requires_grad_(),
    "inference": _inference,
    "parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
    "subclass": lambda t: t.clone().as_subclass(Wrapped),
    "no entries": lambda t: t.new_empty(0),
    "no samples": lambda t: t[:0],
    "no channels": lambda t: t.new_empty([0 if i == 1 else n for i, n in enumerate(t.shape)]),
    "one entry": lambda t: t.flatten()[:1],
    "a scalar": lambda t: t.flatten()[0],
    "more entries": lambda t: torch.cat((t, t)),
    "fewer entries": lambda t: t[: t.shape[0] // 2],
    "another axis": lambda t: t[None],
    "axes without end": lambda t: t.view(t.shape + (1,) * (13 - t.dim())),
    "transposed": lambda t: t.transpose(0, -1),
    "gaps": _strided_slice,
    "no storage": lambda t: _resized(t, 0),
    "half a storage": lambda t: _resized(t, 0.5),
    "late in no storage": lambda t: _resized(torch.cat((t, t)), 0)[t.shape[0] :],
    "garbage": _garbage,
    "none": lambda t: None,
    **{
        str(dtype): lambda t, dtype=dtype: t.to(dtype)
        for dtype in (
            *(torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.bool),
            *(torch.int32, torch.int64, torch.uint16, torch.complex64, torch.float8_e4m3fn),
        )
    },
}
INTEGERS = (-(2**63), -1, 0, 1, 2, 3, 7, 2**20 + 1, 2**31 - 1, 2**31, 2**32 + 1, 2**63 - 1)
FLOATS = (float("nan"), float("inf"), float("-inf"), -0.0, -1.0, 5e-324, 1e308)
DTYPES = (torch.int64, torch.complex64, torch.float8_e4m3fn, torch.bool, torch.qint8, None)


def _group() -> int:
    """Shared memory of this process alone."""
    offer = torch.zeros(256, dtype=torch.uint8)
    handle = ops.shm_offer(offer, 0, 1)
    assert ops.shm_open(handle, offer, 5.0) == ""
    return handle


def calls(handle: int) -> dict:
    """Good arguments of every operator, new ones at each call: {name: arguments}. A second word of
    a name is how far it goes."""
    x, counters = X.clone(), torch.zeros(2, dtype=torch.int64)
    weight, bias, residual = torch.ones(C), torch.zeros(C), X.clone()
    mask = torch.ones(5, 3, dtype=torch.bool)
    running = (torch.zeros(C), torch.ones(C), torch.zeros(1, dtype=torch.int64))
    tensors = (x, weight, bias, residual, mask)
    options = {"kind": 1, "slope": 0.5, "counters": counters, "running": running, "momentum": 0.1}
    rank = Rank(*tensors, **options)
    message = rank.begin()
    y, saved, bits = rank.finish(message).clone(), rank.saved, rank.bits
    dtypes = (torch.float32, torch.float32)
    sums = rank.begin_backward(y, False, dtypes, True)
    gathering = Rank(*tensors, **options, statistics=1)
    record = gathering.begin()
    in_place = Rank(*tensors, **options, in_place=True)
    begin, back = (
        lambda r, way: (*tensors, *r.running, r.form, 0, way),
        lambda way: (y, *rank.through, WANTS_U | WANTS_SHARE, *dtypes, way),
    )
    finish = (*tensors, rank.y, saved, bits, rank.running)
    forked = (x, torch.zeros(C), torch.ones(C), weight, bias, torch.tensor([2]))
    *_, forked_saved = ops.batch_norm(*forked, False, False, EPS, 0.9, "odd", None)
    layer = ("odd", None, 5.0, "auto", False, False, EPS, "share", "relu", 0.5, "reproducible")
    offer = torch.zeros(256, dtype=torch.uint8)
    opening = ops.shm_offer(offer, 0, 1)
    return {
        "header": (message, 1),
        "forward_begin alone": begin(rank, ALONE),
        "forward_begin message": begin(rank, MESSAGE),
        "forward_begin framed": begin(rank, FRAMED),
        "forward_begin in place": begin(in_place, MESSAGE),
        "forward_begin record": begin(gathering, MESSAGE),
        "forward_begin group": begin(rank, handle),
        "forward_finish": (*finish, [message, None], rank.form, 1),
        "forward_finish record": (*finish, [record, None], gathering.form, 1),
        "backward_begin alone": back(ALONE),
        "backward_begin message": back(MESSAGE),
        "backward_begin own": back(OWN),
        "backward_begin group": back(handle),
        "backward_finish": rank.backward(sums),
        "backward_finish constants": rank.backward(None),
        "recover_input": (y, saved, weight, bias, rank.form),
        "update_running_statistics": (*running, saved, 0.1),
        "evaluate": (x, *running[:2], weight, bias),
        "batch_norm": (*forked, False, False, EPS, 0.9, "odd", None),
        "batch_norm_backward": (
            *(y, x, weight, forked_saved, False, True, *dtypes, EPS, 0.9, "odd", None),
        ),
        "training_step": (*tensors, 0, None, *layer),
        "training_step_backward": (
            *(y, x, weight, bias, saved, bits, mask, torch.tensor([3, 0])),
            *(torch.float32, [True] * 4, None, *layer),
        ),
        "shm_offer": (offer.clone(), 0, 1),
        "shm_open": (opening, offer, 5.0),
        "shm_sum": (message, handle, 1),
    }


#: Options by name.
OPTIONS = {"evaluate": {"eps": EPS}}
#: Without a tensor.
OTHERS = {
    *("shm_leave", "shm_set", "shm_wait", "cpu_instruction_set", "cumulative_factor"),
    *("constants", "form"),
}


def odd(value, draw: random.Random):
    """Something else in the place of a good argument, and what it is."""
    if isinstance(value, torch.Tensor):
        name = draw.choice(list(ODD))
        try:
            return ODD[name](value), name
        except Exception:  # no such tensor of this shape and dtype
            return value, "good"
    if isinstance(value, (list, tuple)) and isinstance(value[0], torch.Tensor):
        at = draw.randrange(len(value))
        other, name = odd(value[at], draw)
        return [*value[:at], *(() if other is None else (other,)), *value[at + 1 :]], name
    if isinstance(value, bool):
        return not value, "not"
    if isinstance(value, (int, float)):
        other = draw.choice(INTEGERS if isinstance(value, int) else FLOATS)
        return other, repr(other)
    if isinstance(value, torch.dtype):
        other = draw.choice(DTYPES)
        return other, repr(other)
    return value, "good"


def run(number: int, seed: int, say=None) -> dict:
    """Makes that many calls: {operator: (calls that gave a result, errors)}. say(text) is told what
    comes next."""
    draw = random.Random(seed)
    counts: dict[str, list[int]] = {}
    handle = _group()
    for _ in range(number):
        table = calls(handle)
        name = draw.choice(list(table))
        arguments = list(table[name])
        kinds = {}
        for i in draw.sample(range(len(arguments)), draw.choice((1, 1, 2))):
            waits = name.endswith(" group") or (name.startswith("shm_") and name != "shm_offer")
            if not (waits and i >= len(arguments) - 1):
                arguments[i], kinds[i] = odd(arguments[i], draw)
        if say is not None:
            say(f"{name} {kinds}")
        count = counts.setdefault(name, [0, 0])
        try:
            getattr(ops, name.split()[0])(*arguments, **OPTIONS.get(name, {}))
            count[0] += 1
        except Exception as error:
            count[1] += 1
            assert "INTERNAL ASSERT" not in str(error), f"{name} {kinds}: {error}"
    return counts


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open("last_call.txt", "w", encoding="utf-8") as last:

        def _say(text):
            last.seek(0)
            last.write(text.ljust(200))
            last.flush()

        for operator, (results, errors) in sorted(run(*map(int, sys.argv[1:3]), _say).items()):
            print(f"{operator}: {results} results, {errors} errors")
