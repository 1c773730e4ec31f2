# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of its layer pass with this one (pytorchs_tests.py)."""

import os

import pytest

import pytorchs_tests
from rank_runs import check_case, run_cases

pytest.importorskip("expecttest")  # PyTorch's test modules need it

#: Of PyTorch 2.11 to 2.15. A newer one may have more, which run, too.
EXPECTED = {
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
    "test_DistributedDataParallel_SyncBatchNorm_half",
    "test_SyncBatchNorm_process_group",
    "test_ddp_inference",
    "test_ddp_sync_bn_training_vs_eval",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    "test_sync_bn_logged",
}


def test_they_are_all_found():
    """Names in this version's file; no other file of PyTorch's tests has any."""
    assert pytorchs_tests.files() == [pytorchs_tests.FILE]
    assert set(pytorchs_tests.tests()) >= EXPECTED


WORLDS = (2, 3) if os.environ.get("SYNCBN_INTEROP") else (2,)  # seconds, mostly for imports


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world} ranks")
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return run_cases(pytorchs_tests.cases, request.param, "shared memory", folder)


@pytest.mark.parametrize("name", pytorchs_tests.tests())
def test_of_pytorchs(results, name):
    check_case(results, name)
