# SPDX-License-Identifier: Apache-2.0
"""What ranks exchange: messages, the ways that they take, groups, and errors that name ranks."""
