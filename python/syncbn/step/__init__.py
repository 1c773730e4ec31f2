# SPDX-License-Identifier: Apache-2.0
"""One training step of a layer: options, passes, the exchange between them, gradients."""
