# SPDX-License-Identifier: Apache-2.0
"""python -m syncbn doctor. PyTorch's torch.utils.collect_env prints versions and tests nothing."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

import syncbn
from support import LEVELS
from syncbn import __main__
from syncbn.operators import ops


def test_doctor_prints_what_is_active_and_passes():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "syncbn", "doctor", "--timeout", "240"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    names = [line[:16].strip() for line in lines[:8]]
    assert names == list(__main__.facts())
    folder = pathlib.Path(syncbn.__file__).parent
    assert lines[0] == f"{'syncbn':16}{syncbn.__version__}, in {folder}"
    assert torch.__version__ in lines[1]
    assert lines[4].split()[1] in LEVELS
    gloo, shared = lines[9:]
    assert gloo == "  gloo          passed: the bits of one process"
    assert shared.startswith("  shared memory passed: the bits of one process")


def test_facts_leave_the_instruction_set_as_it_was():
    before = ops.cpu_instruction_set()
    facts = __main__.facts()
    assert ops.cpu_instruction_set() == before and facts["CPU"].startswith(before)
    assert "reference" in facts["CPU"]


def test_doctor_says_where_apex_is_installed(tmp_path, monkeypatch):
    """It takes this package for its own extension."""
    assert "apex" not in __main__.facts()
    (tmp_path / "apex.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert "does not work beside this package" in __main__.facts()["apex"]


def test_why_cuda_is_not_active(monkeypatch):
    """test_cuda.py has the other reasons."""
    monkeypatch.setattr(__main__._build, "cuda_version", "13.0.88")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert __main__.facts()["CUDA library"] == "not active: this PyTorch is for CPU only"


def test_processes_without_a_result_are_a_failure(monkeypatch, capsys):
    late = "FAILED: no result within 0.05 s"
    assert __main__.self_test(timeout=0.05) == {"rank 0": late, "rank 1": late}
    monkeypatch.setattr(__main__.sys, "executable", "/bin/false")
    assert __main__.main(["doctor"]) == 1
    assert "  rank 1        FAILED: exit code 1: no message\n" in capsys.readouterr().out


def test_other_bits_are_a_failure(monkeypatch, capsys):
    """Rank 0's share alone, as a layer that does not exchange would see it; on any rank."""
    monkeypatch.setattr(__main__.SyncBatchNorm, "forward", _alone)
    assert "y" in __main__._differences(0, "auto", 1.0)
    said = [{"gloo": "passed: so"}, {"gloo": "FAILED: differs from one process in y"}]
    for late in (0, 1):
        monkeypatch.setattr(__main__, "_run_rank", lambda rank, *_, n=late: said[rank ^ n])
        assert __main__.main(["doctor"]) == 1
        assert "  gloo          FAILED: differs from one process in y" in capsys.readouterr().out


def _alone(layer, x):
    return torch.nn.functional.batch_norm(
        x, layer.running_mean, layer.running_var, layer.weight, layer.bias, True
    )


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main([])
    assert ended.value.code == 2 and "doctor" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ("0", "-3", "nan", "soon"))
def test_a_time_limit_that_is_none_is_refused(capsys, seconds):
    with pytest.raises(SystemExit) as ended:
        __main__.main(["doctor", f"--timeout={seconds}"])
    expected = f"--timeout: got '{seconds}', expected a positive number of seconds"
    assert ended.value.code == 2 and expected in capsys.readouterr().err


def test_without_an_installed_cmake_package_cmake_dir_says_so(monkeypatch, tmp_path, capsys):
    """test_libtorch.py builds against the installed one."""
    monkeypatch.setattr(__main__, "__file__", str(tmp_path / "__main__.py"))
    assert __main__.main(["--cmake-dir"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and f"--cmake-dir: got {tmp_path}, which has no CMake" in printed.err
    (tmp_path / "cmake").mkdir()
    assert __main__.main(["--cmake-dir"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'cmake'}\n"
