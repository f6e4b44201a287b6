# SPDX-License-Identifier: Apache-2.0
"""Starts servers in seconds, as forks of a process that has imported vLLM (tests/python/zygote.py)."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from forked_process import Zygote
from local_server import SERVER_MODULE, LocalServer, RunningProcess


@dataclass
class ForkedServer(LocalServer):
    """A LocalServer that is forked from ``zygote``."""

    zygote: Zygote | None = None

    def launch(self, environment: dict[str, str]) -> RunningProcess:
        assert self.zygote is not None
        python, option, module, *arguments = self.command()
        assert [python, option, module] == [sys.executable, "-m", SERVER_MODULE]
        return self.zygote.start([module, *arguments], environment, self.log_file)
