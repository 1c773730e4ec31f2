# SPDX-License-Identifier: Apache-2.0
"""benchmarks/model_gpu.py: the page has what it prints, and its formula gives that."""

import sys

import pytest

from support import PROJECT

sys.path.append(str(PROJECT / "benchmarks"))
import model_gpu

PAGE = model_gpu.PAGE.read_text(encoding="utf-8")


def test_page_has_the_modelled_tables():
    for table in model_gpu.tables(PAGE):
        text = "\n".join(table) + "\n\n"
        assert text in PAGE, f"run `python benchmarks/model_gpu.py`; it prints\n{text}"


def test_ceiling_is_that_of_the_example():
    """An RTX 4090 in forward with 16 bits, and on it with conversions."""
    gpu = next(gpu for gpu in model_gpu.GPUS if gpu.name == "RTX 4090")
    assert model_gpu.binary64(gpu, 1) / (128 * 2.52) == pytest.approx(3.10e-3, rel=1e-3)
    assert model_gpu.ceiling(PAGE, gpu, "forward", "bfloat16") == "84 %"
    converting = gpu._replace(conversions=2)
    assert model_gpu.ceiling(PAGE, converting, "forward", "bfloat16") == "69 %"


def test_instructions_bound_what_takes_many():
    """And a page without their table is refused by name."""
    gpu = next(gpu for gpu in model_gpu.GPUS if gpu.name == "H200")
    for row in ("sums forward", "normalize"):
        cells = model_gpu.cells_of(PAGE, row, "784 |")
        more = PAGE.replace("|".join(cells), "|".join([cells[0], *[" 90.0 / 90.0 "] * 4])[:-1])
        assert int(model_gpu.ceiling(more, gpu, "forward", "bfloat16")[:-2]) < 80, row
    with pytest.raises(SystemExit, match=r"no row of normalize, 784"):
        model_gpu.counted(PAGE.replace("| normalize |", "| other |"), "normalize", 784, "float32")
