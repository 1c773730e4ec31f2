# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked from a rank: its groups stay the rank's own."""

import os

import torch.distributed as dist

# The default group of the rank that this process was forked from, if it was.
_inherited: dist.ProcessGroup | None = None
_ranks = ""


def _note() -> None:
    global _inherited, _ranks
    _inherited = dist.group.WORLD if dist.is_available() else None
    if _inherited is not None:
        _ranks = f"rank {_inherited.rank()} of {_inherited.size()}"


def check() -> None:
    """Raises RuntimeError where the groups are another process's: its connections lead to ranks
    that would take what comes through them for that process's words."""
    if _inherited is not None and dist.group.WORLD is _inherited:
        raise RuntimeError(
            f"syncbn: process {os.getpid()} was forked from {_ranks} and has no part in its "
            "groups; expected evaluation mode or sync=False in it, or a process that is spawned"
        )


os.register_at_fork(after_in_child=_note)
