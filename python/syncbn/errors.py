"""Exceptions of the exchange."""


class DivergenceError(RuntimeError):
    """The ranks of one exchange, or the devices of one process, did not make the same call.

    Raised on every rank of the group; running statistics are left as they were.
    """
