# SPDX-License-Identifier: Apache-2.0
"""Replays of agent sessions: their trace formats, the closed loop, simulated hints and charts."""
