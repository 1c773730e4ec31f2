# SPDX-License-Identifier: Apache-2.0
"""Python reads this first, where the folder is on its path: PyTorch finds the fake device."""

import importlib.abc
import importlib.util
import sys


class Finder(importlib.abc.MetaPathFinder):
    """Finds torch as others do, once, and has the device installed behind it."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            import fake_device  # noqa: F401 (installs itself)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
