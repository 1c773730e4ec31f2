# SPDX-License-Identifier: Apache-2.0
"""syncbn.join without a process group; with one: rank_cases_join*.py, fault_cases.py."""

import torch

import syncbn
from support import assert_same_layers, new_layer


def test_nothing_to_join_without_a_process_group():
    joined, plain = new_layer(4), new_layer(4)
    x = torch.randn(5, 4)
    with syncbn.join(joined):
        joined(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert_same_layers(joined, plain)
    assert not joined._forward_pre_hooks
