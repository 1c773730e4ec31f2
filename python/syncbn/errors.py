# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the exchange. None of them changes running statistics.

A function that raises one holds it in no variable: the error holds the function's frame, and they
would keep the step's tensors until the garbage collector comes.
"""


class DivergenceError(RuntimeError):
    """The ranks of one exchange, or the devices of one process, did not make the same call.

    Every rank of the group raises it. The group stays usable.
    """

    def __init__(self, text: str = "", group_name: str | None = None) -> None:
        super().__init__(text)
        #: of the process group; None where the devices of one process differ
        self.group_name = group_name


class ExchangeTimeout(RuntimeError):
    """A rank did not come to an exchange within the time limit.

    The text says where each rank is, if it answers. The group cannot be used again before
    syncbn.reset_groups().
    """


class PeerLost(RuntimeError):
    """A rank of the group has ended, or has left the exchange because of an error of its own.

    If all ranks are alive, the group can be used again after syncbn.reset_groups().
    """
