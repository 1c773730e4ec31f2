"""What goes first in an exchange: a frame that all calls of a group have in common."""

import torch

from ..operators import HEADER_WORDS
from . import transports
from .call import Call
from .groups import Peers

#: Words of the first message of an exchange over Gloo, the same for every call of the group: Gloo
#: ends the process when ranks bring different lengths, so lengths may differ only after the first
#: message has shown that the calls agree. 512 channels of float32 fit.
FRAME_WORDS = HEADER_WORDS + 512 * 19

CPU = torch.device("cpu")


def frame_words(peers: Peers | None, device: torch.device = CPU) -> int:
    """How many words a message to that group has at least. On CUDA there is no frame: over NCCL
    nobody reads a header, and what goes through the host is framed there."""
    return 0 if peers is None or peers.any_length or device.type == "cuda" else FRAME_WORDS


def sum_first(message: torch.Tensor, peers: Peers, call: Call) -> torch.Tensor:
    """The sum of what goes first: over Gloo the frame; where lengths may differ the whole message,
    and if they do the header alone, which tells why."""
    if not peers.any_length:
        return transports.all_reduce(message[:FRAME_WORDS], peers, call)
    try:
        return transports.all_reduce(message, peers, call)
    except transports.LengthsDiffer:
        return transports.all_reduce(message[:HEADER_WORDS], peers, call)
