# SPDX-License-Identifier: Apache-2.0
"""Records as objects of a Mooncake Store."""
