"""Exceptions of the exchange."""


class DivergenceError(RuntimeError):
    """The ranks of one exchange did not make the same call.

    Raised on every rank of the group; running statistics are left as they were.
    """
