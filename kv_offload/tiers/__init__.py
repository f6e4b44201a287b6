# SPDX-License-Identifier: Apache-2.0
"""The types of tiers: a folder each, their list (registry.py), and the code that several share."""
