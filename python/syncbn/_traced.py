"""What stands for an exchange in a traced graph: one operator, which does what eager mode does when
the graph runs. So a compiled step waits, reports and raises as an eager one."""

import torch

from . import _exchange, _groups
from ._layer import Layer
from ._ops import HEADER_WORDS
from ._where import Call

_CALL = (
    "Tensor message, int channels, str group, str layer, ScalarType dtype, float eps, "
    "str statistics, str activation, float negative_slope"
)


def _call(channels, layer, dtype, eps, statistics, activation, slope, direction):
    options = Layer(
        layer, 0, eps=eps, statistics=statistics, activation=activation, negative_slope=slope
    )
    return Call(layer, None, direction, channels, dtype, options)


def _operator(name: str, schema: str):
    return torch.library.custom_op(
        f"syncbn::{name}", mutates_args=(), device_types=("cpu", "cuda"), schema=schema
    )


def _refuse_one_value(message, merged, peers, call):
    sizes = f"ranks ({call}, {peers}, which has {int(message[0])})"
    _exchange.check_count(merged, int(message[0]), peers, sizes)


@_operator("all_reduce_message", f"({_CALL}, str direction) -> Tensor")
def _all_reduce_message(message, channels, group, *named):
    peers, call = _groups.named(group), _call(channels, *named)
    merged, rest = _exchange.exchange(message, channels, peers, call)
    _refuse_one_value(message, merged, peers, call)
    return merged if rest is None else torch.cat([merged, rest])


@_all_reduce_message.register_fake
def _(message, *_):
    """int64 like message: its sum over the group of that name."""
    return torch.empty_like(message)


@_operator("all_gather_record", f"({_CALL}, int ranks) -> (Tensor, Tensor)")
def _all_gather_record(message, channels, group, *named):
    peers, call = _groups.named(group), _call(channels, *named[:-1], "forward")
    merged, records = _exchange.gather(message, channels, peers, call)
    _refuse_one_value(message, merged, peers, call)
    return merged[:HEADER_WORDS].clone(), records.clone()


@_all_gather_record.register_fake
def _(message, *arguments):
    """int64: the merged header; the records of all ranks, one after the other."""
    record, ranks = message.shape[0] - (0 if message.is_cuda else HEADER_WORDS), arguments[-1]
    return message.new_empty((HEADER_WORDS,)), message.new_empty((ranks * record,))
