# SPDX-License-Identifier: Apache-2.0
"""Every example and every Python snippet of the docs runs. A snippet's page may expect more."""

import functools
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

import syncbn
from rank_runs import free_port, quick_context, run_ranks
from support import PROJECT, run_snippets, snippets

# On two ranks only, with the library that each is about; test_training_loops.py has the bits.
TRAINERS = {"11_accelerate.py": "accelerate", "12_lightning.py": "lightning"}
RANKED = ("04_forked_graph.py", "07_activation.py", "24_all_reduce.py")
WEEKLY = ("06_static_graph.py", *TRAINERS)
#: On four ranks; docs/tutorial.md quotes what they print.
TUTORIAL = ("19_contrastive.py", "20_point_clouds.py")
EXAMPLES = sorted(path.name for path in (PROJECT / "examples").glob("*.py"))
EXAMPLES = [name for name in EXAMPLES if name not in (*TRAINERS, *TUTORIAL, "00_start.py")]
#: Arguments of long ones; with none they run weekly.
SHORT = {"21_shares.py": "--steps 2 --changes 0 --processes 1 --networks unet".split()}
PAGES = sorted(
    str(path.relative_to(PROJECT))
    for path in (PROJECT / "docs").glob("*.md")
    if "```python" in path.read_text(encoding="utf-8")
)
#: Pages that run on ranks or as a part of a training step, and the file that does it.
ELSEWHERE = {
    "README.md": "test_examples.py",
    "docs/start.md": "test_examples.py",
    "docs/training.md": "rank_cases_parallel.py",
    "docs/groups.md": "rank_cases_groups.py",
    "docs/diagnosis.md": "rank_cases_profile.py",
    "docs/jax.md": "test_jax.py",
}
PAGES = [page for page in PAGES if page not in ELSEWHERE]


def _main(rank, script, arguments, world, port, folder):
    if world > 1:  # as torchrun says it
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that it starts
    torch.set_num_threads(1)
    os.chdir(PROJECT)
    with open(folder / f"printed.{rank}", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [script, *arguments]
    # Without PyTorch's import in each process that an example starts.
    mp.spawn = functools.partial(mp.start_processes, start_method="fork")
    runpy.run_path(script, run_name="__main__")


def run(folder, script, *arguments, world=1):
    """What each rank prints; as `python SCRIPT ARGUMENTS`, without PyTorch's import."""
    options = (script, arguments, world, free_port(), folder)
    codes = run_ranks(quick_context(), _main, world, options, 600)
    printed = [(folder / f"printed.{rank}").read_text() for rank in range(world)]
    assert not any(codes), "\n".join([f"exit code {codes[0]}", *printed])
    return printed


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(tmp_path, name):
    assert all(run(tmp_path, f"examples/{name}", *SHORT.get(name, ()))), "it says nothing"


@pytest.mark.weekly
@pytest.mark.parametrize("options", ("", "--steps 500 --processes 1 3 --networks residual"))
def test_networks_by_shares_exact(tmp_path, options):
    """On 1 to 4 processes, and while their number changes ten times; and longer."""
    assert all(run(tmp_path, "examples/21_shares.py", *options.split())), "it says nothing"


@pytest.mark.parametrize(
    "name",
    (*RANKED, *(pytest.param(name, marks=pytest.mark.weekly) for name in WEEKLY)),
)
def test_example_on_two_ranks(tmp_path, name):
    if name in TRAINERS:
        pytest.importorskip(TRAINERS[name])
    assert any(run(tmp_path, f"examples/{name}", world=2)), "it says nothing"


def test_start_prints_what_its_page_quotes(tmp_path):
    printed = run(tmp_path, "examples/00_start.py", world=2)
    lines = quoted_print("docs/start.md", "00_start.py").splitlines()
    for rank, (said, line) in enumerate(zip(printed, lines[2:], strict=True)):
        assert line in said and line.startswith(f"rank {rank}: ")
    report = {*lines[0].split(), *lines[1].split()}
    assert report - {"avx512"} <= {*printed[0].split()}  # the vector code is the machine's


NCCL_ON_THE_CPU = """
import torch
torch.cuda.set_device = lambda device: None
torch.nn.Module.cuda = torch.Tensor.cuda = lambda self: self
begin, wrapper = torch.distributed.init_process_group, torch.nn.parallel.DistributedDataParallel
torch.distributed.init_process_group = lambda backend: begin({"nccl": "gloo"}[backend])
wrap = wrapper.__init__
wrapper.__init__ = lambda self, module, device_ids: wrap(self, module)
"""


def test_the_program_of_several_gpus_makes_its_calls_on_the_cpu(tmp_path):
    script = tmp_path / "page.py"
    script.write_text(NCCL_ON_THE_CPU + "\n".join(snippets("docs/start.md")), encoding="utf-8")
    assert all("loss" in told for told in run(tmp_path, str(script), world=2))


def test_example_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*command, "examples/10_ddp.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=PROJECT,
    )
    assert ended.returncode == 0 and ended.stdout, f"{ended.stdout}\n{ended.stderr}"


#: What follows a page's program.
SAME_ESTIMATES = """
for value in model[1].buffers():
    every = [torch.empty_like(value) for _ in range(2)]
    torch.distributed.all_gather(every, value)
    assert model[1].batches == 3 and torch.equal(*every)
"""


@pytest.mark.parametrize(
    "page, after", (("README.md", ""), ("docs/forked_graph.md", SAME_ESTIMATES))
)
def test_page_on_two_ranks(tmp_path, page, after):
    script = tmp_path / "page.py"
    script.write_text("\n".join((*snippets(page), after)), encoding="utf-8")
    run(tmp_path, str(script), world=2)


def quoted_print(page, program):
    text = (PROJECT / page).read_text(encoding="utf-8")
    quoted = text.partition(f"<!-- printed by examples/{program} -->\n```\n")[2].partition("```")[0]
    assert quoted
    return quoted


def hashes_of(table):
    heads, *rows = table.splitlines()
    assert heads.split() == "1 process 2 processes 4 processes".split()
    found = {way: hashes for way, *hashes in map(str.split, rows)}
    assert {len(h) for hashes in found.values() for h in hashes} == {12}
    return found["DDP"], found["Shares"]


def test_hashes_of_shares_are_one_and_those_of_ddp_differ_exact(tmp_path):
    """As the README has them; other processors have other hashes."""
    (printed,) = run(tmp_path, "examples/21_shares.py", "--table")
    for table in (printed, quoted_print("README.md", "21_shares.py")):
        by_ddp, by_shares = hashes_of(table)
        assert len(by_ddp) == len(set(by_ddp)) == len(by_shares) == 3
        assert len(set(by_shares)) == 1


@pytest.mark.parametrize("name", TUTORIAL)
def test_tutorial_quotes_what_its_programs_print(name, tmp_path):
    if name != "20_point_clouds.py":
        pytest.importorskip("sklearn")
    printed = run(tmp_path, f"examples/{name}", world=4)
    assert quoted_print("docs/tutorial.md", name) in printed[0]


@pytest.mark.parametrize(
    "options", ("--boxes", pytest.param("--rates 1 2", marks=pytest.mark.weekly))
)
def test_comparisons_train_and_synchronized_ranks_agree(options):
    """The exit status says so; running statistics of plain ranks differ."""
    pytest.importorskip("sklearn")
    pytest.importorskip("tqdm")
    command = [sys.executable, PROJECT / "examples" / "segmentation" / "compare.py"]
    command += [*options.split(), *"--ranks 2 --steps 40 --seeds 1 --test-pictures 8".split()]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert "Different models at the end: plain 2, synchronized 1" in ended.stdout


def test_cpp_training_ends_as_its_page_says(tmp_path):
    program, library = tmp_path / "training", Path(syncbn.__file__).parent / "lib" / "libsyncbn.so"
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-std=c++20", "-pthread"]
    command += ["-I", PROJECT / "include", PROJECT / "examples" / "17_training.cpp", "-o", program]
    subprocess.run([*command, library, f"-Wl,-rpath,{library.parent}"], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    own, shared = (line.split()[-3:] for line in printed.splitlines() if "step 300" in line)
    page = (PROJECT / "docs" / "cpp_guide.md").read_text(encoding="utf-8")
    assert "accuracies of {}, {} and {}.".format(*own) in page
    assert shared == [shared[0]] * 3 and f"end with {shared[0]} on each" in page


@pytest.mark.parametrize("page", PAGES)
def test_page(page):
    EXPECTED.get(page, lambda names: None)(run_snippets(page))


def _devices(names):
    assert [len(y) for y in names["outputs"]] == [3, 3, 2, 2]
    assert all(p.grad is not None for p in names["network"].parameters())


def _compile(names):
    targets = [str(node.target) for node in names["program"].graph.nodes]
    assert any("conv" in name for name in targets)
    assert not any("batch_norm" in name for name in targets)


def _options(names):
    assert names["out"].data_ptr() == names["h"].data_ptr()
    assert not names["local"].sync
    assert not names["y"].movedim(1, -1)[~names["mask"]].any()
    assert not names["x"].grad.movedim(1, -1)[~names["mask"]].any()


def _conversion(names):
    assert [type(m) for m in names["model"]][1::2] == [names["torch"].nn.BatchNorm2d] * 2


def _tutorial(names):
    layer = names["model"][1]
    assert not layer.training and layer.num_batches_tracked == 0
    assert layer.weight.grad is None and names["model"][0].weight.grad is not None


EXPECTED = {
    "docs/tutorial.md": _tutorial,
    "docs/conversion.md": _conversion,
    "docs/shares.md": _devices,
    "docs/compile.md": _compile,
    "docs/options.md": _options,
}
