# SPDX-License-Identifier: Apache-2.0
"""The operators on CUDA: loaded at the first tensor there, so that CPU needs nothing of them."""

import pathlib

import torch

from . import _build

_loaded = False


def why_not() -> str | None:
    """Why the operators on CUDA cannot be used; None if they can."""
    if _build.cuda_version is None:
        return "this build has no CUDA library"
    if not torch.backends.cuda.is_built():
        return "this PyTorch is for CPU only"
    if torch.version.cuda is None or _major(torch.version.cuda) != _major(_build.cuda_version):
        return (
            f"it was built with CUDA {_build.cuda_version}, and this PyTorch is for "
            f"{'CUDA ' + torch.version.cuda if torch.version.cuda else 'another kind of GPU'}"
        )
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    return None


def _major(version: str) -> str:
    return version.partition(".")[0]


def _remedy() -> str:
    """What to do about why_not()."""
    if _build.cuda_version is not None and torch.version.cuda is None:
        return "install a PyTorch for CUDA"
    wanted = _major(torch.version.cuda or "12")
    text = (
        f"build it again with CUDA {wanted}: nvcc on PATH, or CUDA_HOME set, and "
        "`pip install -C cmake.define.SYNCBN_CUDA=ON .` beside this PyTorch"
    )
    if _build.cuda_version is None:
        return text
    if _major(_build.cuda_version) != wanted:
        return f"{text}; or install a PyTorch for CUDA {_major(_build.cuda_version)}"
    return "see torch.cuda.is_available(), which needs a driver and a visible device"


@torch.compiler.assume_constant_result
def load() -> None:
    """Loads the operators, once. Raises RuntimeError: why that cannot be, and what to do."""
    global _loaded
    if _loaded:
        return
    reason = why_not()
    if reason is not None:
        raise RuntimeError(f"syncbn cannot work on CUDA: {reason}; {_remedy()}")
    folder = pathlib.Path(_build.__file__).parent / "lib"
    torch.ops.load_library(folder / "libsyncbn_torch_cuda.so")
    _loaded = True
