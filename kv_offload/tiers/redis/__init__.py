# SPDX-License-Identifier: Apache-2.0
"""Records as values of a Redis or Valkey server or cluster."""
