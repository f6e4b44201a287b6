"""mooncake_bench over a master and a holder of its own, on loopback.

python benchmarks/mooncake_bench.py --program build/bench/mooncake_bench [its options]
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", required=True)
    arguments, options = parser.parse_known_args()
    from mooncake_store import mooncake_store

    alone = Path(__file__).with_name("mooncake_alone.py")
    with (
        tempfile.TemporaryDirectory() as directory,
        mooncake_store(Path(directory), holder_bytes=1 << 30) as running,
    ):
        command = [arguments.program, "--python", sys.executable, "--alone", str(alone)]
        sys.exit(subprocess.run([*command, "--master", running.address, *options]).returncode)


main()
