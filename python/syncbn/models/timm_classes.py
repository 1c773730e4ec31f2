# SPDX-License-Identifier: Apache-2.0
"""Where pickles of version 0.1 look for the class of timm's converted layers."""

from .classes import __getattr__ as __getattr__
