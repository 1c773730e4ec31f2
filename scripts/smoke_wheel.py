# SPDX-License-Identifier: Apache-2.0
"""Installs a wheel into an environment of its own and trains with it, in a folder that is not the
repository: python scripts/smoke_wheel.py [--with-dependencies | --torch VERSION] WHEEL

PyTorch is that of the interpreter that runs this, linked into the new environment without a syncbn
that may lie beside it; nothing is downloaded. With --with-dependencies pip installs PyTorch, too,
and with --torch that version of it.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 300  # for one command
#: PyTorch works without NumPy, and so must the package.
NOT_LINKED = ("syncbn", "pip", "__editable__", "numpy")

#: With torchrun the ranks' uneven shares must have the bits of the whole batch on one process.
#: Those of BITS are the same on every processor, Python and PyTorch, in both layouts.
STEP = """
import hashlib
import os
import pathlib
import sys

import torch

import syncbn

assert pathlib.Path(syncbn.__file__).is_relative_to(sys.prefix), syncbn.__file__
rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
random = torch.Generator().manual_seed(1)
x, dy = (torch.randn(7, 8, 5, 5, generator=random) for _ in range(2))


def step(layer, x, dy):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.running_mean, layer.running_var


BITS = {
    torch.float16: "41e196c01391eb8f",
    torch.bfloat16: "4ee83ab4287dc3f4",
    torch.float32: "6cb1e5ee5f66e06d",
    torch.float64: "7631fce5aa8d8096",
}


def bits(dtype, layout):
    n = torch.arange(7 * 8 * 5 * 5)
    x, dy = (
        (n * k % 8191 - 4095).div(512).reshape(7, 8, 5, 5).to(dtype, memory_format=layout)
        for k in (3571, 2909)
    )
    layer = syncbn.convert_sync_batchnorm(torch.nn.BatchNorm2d(8)).to(dtype)
    results = [*step(layer, x, dy), layer.weight.grad, layer.bias.grad]
    torch.optim.SGD(layer.parameters(), 0.5).step()  # a power of two: fused or not is the same
    results.append(layer(x).detach())
    words = torch.cat([result.reshape(-1) for result in results]).view(torch.uint8)
    return hashlib.sha256(bytes(words.tolist())).hexdigest()[:16]


for dtype, expected in BITS.items():
    for layout in (torch.contiguous_format, torch.channels_last):
        got = bits(dtype, layout)
        assert got == expected, f"{dtype}, {layout}: other bits: got {got}, expected {expected}"
plain = step(torch.nn.BatchNorm2d(8), x, dy)
whole = step(syncbn.convert_sync_batchnorm(torch.nn.BatchNorm2d(8)), x, dy)
for ours, theirs in zip(whole, plain):
    torch.testing.assert_close(ours, theirs)
if ranks > 1:
    torch.distributed.init_process_group("gloo")
    cut = [0, 2, 7]
    mine = slice(cut[rank], cut[rank + 1])
    layer = syncbn.convert_sync_batchnorm(torch.nn.BatchNorm2d(8))
    y, dx, mean, var = step(layer, x[mine], dy[mine])
    assert torch.equal(y, whole[0][mine]) and torch.equal(dx, whole[1][mine])
    assert torch.equal(mean, whole[2]) and torch.equal(var, whole[3])
    assert syncbn.report(layer)[0].ranks == 2
    torch.distributed.destroy_process_group()
print(f"rank {rank} of {ranks}: as it should be")
"""


class Failed(Exception):
    """A command that did not end as it should."""


def run(command: list[str], folder: Path) -> str:
    """Standard output; the command sees no Python but its own environment's."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(command)}: not done after {SECONDS} s") from error
    if done.returncode:
        raise Failed(
            f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def link_torch(site: Path, folder: Path) -> None:
    """Puts what lies beside this interpreter's torch on the new environment's path, but syncbn."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Failed(f"{sys.executable} has no torch: use --with-dependencies")
    folder.mkdir()
    for entry in Path(spec.origin).parents[1].iterdir():
        if not entry.name.startswith(NOT_LINKED) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    (site / "torch.pth").write_text(f"{folder}\n", encoding="utf-8")


def smoke(wheel: Path, torch: str | None, folder: Path) -> None:
    """torch: what pip is to install of PyTorch, "" for what the wheel asks for; None: nothing."""
    environment, elsewhere = folder / "venv", folder / "elsewhere"
    elsewhere.mkdir()
    python = str(environment / "bin" / "python")
    # Without the setuptools that come with pip: PyTorch may need newer ones, which lie beside it.
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)], elsewhere)
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet"]
    if torch:
        install.append(torch)
    elif torch is None:
        (site,) = environment.glob("lib/python*/site-packages")
        link_torch(site, folder / "torch")
        install.append("--no-index")  # the torch that is there must do
    run([*install, str(wheel.resolve())], elsewhere)

    cmake = Path(run([python, "-m", "syncbn", "--cmake-dir"], elsewhere).strip())
    if not cmake.is_relative_to(environment) or not (cmake / "syncbn-config.cmake").is_file():
        raise Failed(f"--cmake-dir: got {cmake}, expected a folder of {environment}")
    (elsewhere / "step.py").write_text(STEP, encoding="utf-8")
    run([python, "step.py"], elsewhere)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run([python, *ranks, "step.py"], elsewhere)
    print(run([python, "-m", "syncbn", "doctor"], elsewhere), end="")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    pytorch = parser.add_mutually_exclusive_group()
    pytorch.add_argument("--with-dependencies", dest="torch", action="store_const", const="")
    pytorch.add_argument("--torch", type=lambda version: f"torch=={version}", metavar="VERSION")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            smoke(given.wheel, given.torch, Path(folder).resolve())
        except Failed as error:
            print(f"{given.wheel.name}: {error}", file=sys.stderr)
            return 1
    print(f"{given.wheel.name}: installed alone, trains on one and on two ranks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
