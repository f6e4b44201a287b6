# SPDX-License-Identifier: Apache-2.0
"""Runs the ranks of a host without the scheduler, as ``vllm serve --headless`` does.

The command itself does not start in the CPU build of vLLM.
"""

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    ServeSubcommand.cmd(make_arg_parser(FlexibleArgumentParser()).parse_args())
