"""What stands for an exchange in a traced graph: one operator, which does what eager mode does when
the graph runs. So a compiled step waits, reports and raises as an eager one."""

import torch

from . import _exchange, _groups
from ._layer import Layer
from ._ops import HEADER_WORDS
from ._where import Call

_CALL = (
    "Tensor message, int channels, SymInt own, str group, str layer, ScalarType dtype, float eps, "
    "str statistics, str activation, float negative_slope"
)


def _call(channels, layer, dtype, eps, statistics, activation, slope, direction):
    options = Layer(
        layer, 0, eps=eps, statistics=statistics, activation=activation, negative_slope=slope
    )
    return Call(layer, None, direction, channels, dtype, options)


def operator(name: str, schema: str):
    """An operator in Python. It may wait for the device, or for other ranks over the host: inductor
    leaves it out of the CUDA graphs that it captures by itself."""
    return torch.library.custom_op(
        f"syncbn::{name}",
        mutates_args=(),
        device_types=("cpu", "cuda"),
        schema=schema,
        tags=(torch.Tag.cudagraph_unsafe,),
    )


@operator("all_reduce_message", f"({_CALL}, str direction) -> Tensor")
def _all_reduce_message(message, channels, own, group, *named):
    peers, call = _groups.named(group), _call(channels, *named)
    merged, rest = _exchange.exchange(message, channels, peers, call)
    if call.direction == "forward":
        _exchange.check_count(merged, own, peers, f"ranks ({call}, {peers})")
    return merged if rest is None else torch.cat([merged, rest])


@_all_reduce_message.register_fake
def _(message, *_):
    """int64 like message: its sum over the group of that name."""
    return torch.empty_like(message)


@operator("all_gather_record", f"({_CALL}, int ranks) -> (Tensor, Tensor)")
def _all_gather_record(message, channels, own, group, *named):
    peers, call = _groups.named(group), _call(channels, *named[:-1], "forward")
    merged, records = _exchange.gather(message, channels, peers, call)
    _exchange.check_count(merged, own, peers, f"ranks ({call}, {peers})")
    return merged[:HEADER_WORDS].clone(), records.clone()


@_all_gather_record.register_fake
def _(message, *arguments):
    """int64: the merged header; the records of all ranks, one after the other."""
    record, ranks = message.shape[0] - (0 if message.is_cuda else HEADER_WORDS), arguments[-1]
    return message.new_empty((HEADER_WORDS,)), message.new_empty((ranks * record,))
