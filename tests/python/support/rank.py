# SPDX-License-Identifier: Apache-2.0
"""One rank's training step through the operators, whose messages the caller adds up."""

import torch
from torch.utils._pytree import tree_map_only

from syncbn.operators import MESSAGE, WANTS_SHARE, WANTS_U, ops

TESTS = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
FAKES = ("update_running_statistics",)


class Rank:
    """kind, statistics: numbers of the core's enums. running: mean, variance and number of batches.
    counters: the call's number and room for the count. ops: what the operators are looked up in."""

    def __init__(
        self, x, weight=None, bias=None, residual=None, mask=None, *, eps=1e-5, kind=0, slope=0.0,
        statistics=0, layer=0, counters=None, running=(None,) * 3, momentum=0.0, in_place=False,
        ops=ops
    ):  # fmt: skip
        self.tensors, self.running = (x, weight, bias, residual, mask), (*running, counters)
        self.form = ops.form(
            layer=layer, eps=eps, momentum=momentum, activation=kind, negative_slope=slope,
            statistics=statistics, in_place=in_place
        )  # fmt: skip
        self.x, self.statistics, self.ops = x, statistics, ops

    def begin(self, way=MESSAGE, word=0):
        """This rank's message."""
        begun = self.ops.forward_begin(*self.tensors, *self.running, self.form, word, way)
        self.y, self.saved, self.bits, _, _, message, *_ = begun
        return message

    def finish(self, merged, ranks=1, rest=None):
        """y; mean, var and rstd are there then."""
        self.y = self.x if self.y is None else self.y
        outputs = (self.y, self.saved, self.bits, self.running, (merged, rest))
        self.ops.forward_finish(*self.tensors, *outputs, self.form, ranks)
        self.mean, self.var, self.rstd = self.saved[:-2].view(3, -1)
        return self.y

    def step(self):
        """y, of one rank alone."""
        return self.finish(self.begin())

    def begin_backward(self, dy, keep=False, dtypes=(torch.float64,) * 2, share=False, way=MESSAGE):
        """This rank's message. u is the residual's gradient, if keep says that it is wanted."""
        x, weight, bias, _, mask = self.tensors
        self.through = (x, self.saved, weight, bias, self.bits, mask, self.form)
        wanted = keep * WANTS_U | share * WANTS_SHARE
        begun = self.ops.backward_begin(dy, *self.through, wanted, *dtypes, way)
        dx, dweight, dbias, self.u, room, message, *_ = begun
        self.dy, self.outputs = dy, (dx, dweight, dbias, room)
        self.own = message if share else None
        return message

    def backward(self, merged, ranks=1):
        """Arguments of the backward's finish."""
        kept = self.u is not None
        dy, sums = self.u if kept else self.dy, (self.own, merged, None)
        return dy, *self.through, kept, self.outputs, sums, ranks

    def finish_backward(self, merged, ranks=1):
        """Gradients of x, weight and bias. merged None: of weight and bias alone."""
        self.ops.backward_finish(*self.backward(merged, ranks))
        return self.outputs[:3]


class Checked:
    """The operators, which meet their schemas, and their fakes where they have one."""

    def __getattr__(self, name):
        def call(*arguments, **options):
            operator = getattr(ops, name).default
            given = tree_map_only(torch.Tensor, torch.clone, arguments)
            tests = TESTS[: 3 if name in FAKES else 1]
            torch.library.opcheck(operator, given, options, test_utils=tests)
            return operator(*arguments, **options)

        return call
