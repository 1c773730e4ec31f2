# SPDX-License-Identifier: Apache-2.0
"""Two hosts with two ranks each, shared memory inside and Gloo between, on a link that is cut,
loses and delays packets, and with a host that is stopped: the bits are equal, every rank on both
sides raises in time, and ranks that are alive go on."""

import signal
import tempfile
import time

import pytest

import host_cases
import host_link
import syncbn
from host_cases import LIMIT
from hosts import TWO_LEVELS, Hosts

WHY_NOT = host_link.why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"two hosts: {WHY_NOT}")


@pytest.fixture
def hosts(request):
    with tempfile.TemporaryDirectory() as folder:
        one = Hosts(folder, request.param, (2, 2))
        yield one
        one.close()


@pytest.mark.weekly  # test_nodes.py and test_walls.py have its parts
@pytest.mark.parametrize("hosts", [(0, 0)], indirect=True)
def test_two_containers_of_one_host(hosts):
    """Processes of different PID namespaces cannot watch each other, and share no memory."""
    assert hosts.do("make", LIMIT) == [TWO_LEVELS] * 4
    hosts.check_steps(0, 3, syncbn.SyncBatchNorm(host_cases.CHANNELS))


@pytest.mark.parametrize("hosts", [(0, 1)], indirect=True)
def test_two_hosts(hosts):
    """One after the other, because a start takes longer than most of it."""
    assert hosts.do("make", LIMIT) == [TWO_LEVELS] * 4
    reference = syncbn.SyncBatchNorm(host_cases.CHANNELS)
    hosts.check_steps(0, 5, reference)

    hosts.link.loss, hosts.link.delay = 0.05, 0.01
    hosts.check_steps(5, 10, reference)
    hosts.link.loss, hosts.link.delay = 0.0, 0.0

    hosts.signal(1, signal.SIGSTOP)
    hosts.begin("steps", 100, 1)
    time.sleep(2 * LIMIT + 6)
    hosts.signal(1, signal.SIGCONT)
    hosts.check_errors("a host is stopped")
    assert hosts.do("reset") == ["passed"] * 4
    assert hosts.do("make", LIMIT) == [TWO_LEVELS] * 4
    hosts.check_steps(15, 2, syncbn.SyncBatchNorm(host_cases.CHANNELS))

    hosts.link.loss = 1.0
    hosts.begin("steps", 200, 1)
    hosts.check_errors("the link is cut")
    hosts.begin("make", LIMIT + 1)
    hosts.check_errors("the link is cut while a group is made")
