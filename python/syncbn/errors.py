"""Exceptions of the exchange. Running statistics are left as they were by all of them."""


class DivergenceError(RuntimeError):
    """The ranks of one exchange, or the devices of one process, did not make the same call.

    Raised on every rank of the group; the group stays usable.
    """

    #: of the group, where ranks differ
    group_name: str | None = None


class ExchangeTimeout(RuntimeError):
    """A rank did not come to an exchange within the time limit. The text says where the ranks are,
    as far as they answer. The group is not usable until syncbn.reset_groups()."""


class PeerLost(RuntimeError):
    """A rank of the group has ended, or left the exchange for an error of its own. The group is not
    usable until syncbn.reset_groups(), if all ranks are alive."""
