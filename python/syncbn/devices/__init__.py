# SPDX-License-Identifier: Apache-2.0
"""Several devices of one process."""
