# SPDX-License-Identifier: Apache-2.0
"""One rank's training step through the operators, whose messages the caller adds up."""

import torch
from torch.utils._pytree import tree_map_only

from syncbn.operators import HEADER_WORDS, MESSAGE, ops

TESTS = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
FAKES = ("update_running_statistics",)


class Rank:
    """kind, statistics: numbers of the core's enums. running: mean, variance and number of batches.
    ops: what the operators are looked up in."""

    def __init__(
        self, x, weight=None, bias=None, residual=None, mask=None, *, eps=1e-5, kind=0, slope=0.0,
        statistics=0, layer=0, call=None, running=(None,) * 3, momentum=0.0, ops=ops
    ):  # fmt: skip
        self.given = (x, weight, bias, residual, mask, *running, call, None)
        self.numbers = (eps, momentum, kind, slope, statistics)
        self.x, self.layer, self.ops = x, layer, ops
        self.through = (weight, bias, None, mask, kind, slope)

    def begin(self, frame=0, way=MESSAGE, word=0):
        """This rank's message."""
        begun = self.ops.forward_begin(*self.given, self.layer, *self.numbers, word, way, frame)
        self.y, self.saved, self.bits, *_, message, _, _ = begun
        self.through = (*self.through[:2], self.bits, *self.through[3:])
        return message

    def finish(self, merged, ranks=1, rest=None):
        """y; mean, var and rstd are there then."""
        self.y = self.x if self.y is None else self.y
        outputs = (self.y, self.saved, self.bits, merged, rest)
        self.ops.forward_finish(*self.given, *outputs, *self.numbers, ranks)
        self.mean, self.var, self.rstd = self.saved[:-2].view(3, -1)
        return self.y

    def step(self):
        """y, of one rank alone."""
        message = self.begin()
        return self.finish(message, 1, message[HEADER_WORDS:].clone() if self.numbers[-1] else None)

    def begin_backward(self, dy, keep=False, dtypes=(torch.float64,) * 2, share=False, way=MESSAGE):
        """This rank's message. u is the residual's gradient, if keep says that it is wanted."""
        arguments = (dy, self.x, self.saved, *self.through, keep, *dtypes, share, way, 0)
        *gradients, u, room, message, _, _ = self.ops.backward_begin(*arguments)
        self.u, self.outputs = u, (*gradients, room, message if share else None)
        after = self.through if u is None else (self.through[0], None, None, self.through[3], 0, 0)
        self.backward = (dy if u is None else u, self.x, self.saved, *after)
        return message

    def finish_backward(self, merged, ranks=1):
        """Gradients of x, weight and bias. merged None: of weight and bias alone."""
        self.ops.backward_finish(*self.backward, *self.outputs, merged, None, ranks)
        return self.outputs[:3]


class Checked:
    """The operators, which meet their schemas, and their fakes where they have one."""

    def __getattr__(self, name):
        def call(*arguments):
            operator = getattr(ops, name).default
            given = tree_map_only(torch.Tensor, torch.clone, arguments)
            torch.library.opcheck(operator, given, test_utils=TESTS[: 3 if name in FAKES else 1])
            return operator(*arguments)

        return call
