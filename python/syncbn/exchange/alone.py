# SPDX-License-Identifier: Apache-2.0
"""Whether a process that trains with nobody has others beside it, which its layers do not see."""

import gc
import os
import sys
import warnings

#: How many processes a launcher started, as it tells each of them. torchrun's comes first: it may
#: run inside of one of the others. Slurm's is that of the step, not of the allocation.
_SIZES = (
    *("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    "SLURM_STEP_NUM_TASKS",
)

#: Whether nothing is left to be said of training alone.
looked = False
_had_others = False


def found_others() -> None:
    """Notes that this process has a group of several ranks."""
    global looked, _had_others
    looked, _had_others = False, True


def beside() -> str:
    """What tells that there are other processes; "" if nothing does."""
    for name in _SIZES:
        size = os.environ.get(name, "")
        if size.isdecimal():
            if int(size) > 1:
                return f"the environment has {name}={size}"
            break
    classes = [
        getattr(sys.modules.get(module), "Manager", None)
        for module in ("torchft", "torchft.manager")
    ]
    managers = tuple(cls for cls in classes if isinstance(cls, type))
    if managers and any(issubclass(type(object_), managers) for object_ in gc.get_objects()):
        return "torchft's Manager is there for other replicas"
    return ""


def text(why: str) -> str:
    return (
        f"statistics of this process alone, though {why}; expected a process group of all of them "
        "before training (torch.distributed.init_process_group), or sync=False"
    )


def look(who: str, initialized: bool) -> None:
    """Warns if the training call of that layer sees nobody by accident. initialized: whether there
    is a process group, of one rank."""
    global looked
    looked = True
    gone = _had_others and not initialized
    why = "the process group with others was destroyed" if gone else beside()
    if why:
        warnings.warn(f"{who}: {text(why)}", stacklevel=2)
