# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: tests that need a GPU run on the fake one, others as ever."""

import fake_device
import pytest


def pytest_collection_finish(session):
    fake_device.switch(False)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    reasons = [marker.kwargs.get("reason") for marker in item.iter_markers("skipif")]
    fake_device.switch("needs a GPU" in reasons)
    yield
    fake_device.switch(False)
