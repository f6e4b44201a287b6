# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the core, for tests that choose the state of the machine."""

from typing import Any

# pure functions: no need to fake them
from kv_offload._core import directory_usage, format_bytes, parse_byte_size

__all__ = ["directory_usage", "format_bytes", "parse_byte_size"]

GIB = 1 << 30
NAMESPACE = '{"model": {"name": "org/model", "revision": "c0ffee123456"}, "kv_dtype": "bfloat16"}'


class ResourceError(RuntimeError):
    pass


class FsRoot:
    """Two namespaces, three records, two of them damaged: one permanently, one only unreadable."""

    def __init__(self, root_dir: str) -> None:
        if "not-a-root" in root_dir:
            raise ValueError(f"{root_dir} is no root of kv-offload: it has no kv_offload.json")
        if "forbidden" in root_dir:
            raise PermissionError(13, "Permission denied", root_dir)
        self.purged: list[str | None] = []
        self.ids = ["ab" * 32, "ac" * 32]

    def stat(self) -> dict[str, Any]:
        times = {"oldest": 1000.0, "newest": 2000.0}
        return {
            "bytes": 3 << 20,
            "records": 3,
            "temporaries": 1,
            "namespaces": [
                {
                    "id": self.ids[0],
                    "json": NAMESPACE,
                    "epoch": 1,
                    "bytes": 2 << 20,
                    "records": 2,
                    "open": True,
                }
                | times,
                {
                    "id": self.ids[1],
                    "json": "broken",
                    "epoch": 0,
                    "bytes": 1 << 20,
                    "records": 1,
                    "open": False,
                }
                | times,
            ],
        }

    def records(self, namespace: str | None = None, strict: bool = False) -> Any:
        for number, (space, mtime) in enumerate(((0, 10), (0, 30), (1, 20))):
            if namespace in (None, self.ids[space]):
                yield {
                    "namespace": self.ids[space],
                    "epoch": 1,
                    "key": f"{number:02x}" * 8,
                    "bytes": 1 << 20,
                    "mtime": float(mtime),
                    "path": f"/r/{number}.rec",
                }

    damaged: tuple[dict[str, Any], ...] = (
        {
            "path": "/r/0.rec",
            "kind": "corrupt",
            "message": "payload checksum 1, expected 2",
            "removed": False,
        },
        {"path": "/r/1.rec", "kind": "io", "message": "Input/output error", "removed": False},
    )

    def verify(
        self, repair: bool = False, progress: Any = None, encryption_key_files: list[str] | None = None
    ) -> list[dict[str, Any]]:
        for done in range(4):
            progress(done, 3)
        return [bad | {"removed": repair and bad["kind"] == "corrupt"} for bad in self.damaged]

    def purge(self, namespace: str | None = None) -> tuple[int, int]:
        FsRoot.last_purge = namespace  # type: ignore[attr-defined]
        return (3, 3 << 20) if namespace is None else (2, 2 << 20)


def measure_codec() -> tuple[float, float]:
    return 1.5e9, 3.0e9


def codec_advice(**_: float) -> str:
    return "off: a read of 1 MiB takes 0.50 ms raw and 0.70 ms compressed"


def record_created(path: str) -> float:
    return {"/r/0.rec": 5.0, "/r/1.rec": 29.0, "/r/2.rec": 20.0}[path]


def memory_headroom(shm_directory: str = "/dev/shm") -> tuple[int, str]:
    return 8 * GIB, "/dev/shm"


def region_files(shm_directory: str = "/dev/shm") -> list[tuple[str, int, bool]]:
    return []


def cuda_unavailable_reason() -> str:
    return "no CUDA driver"


def hosts_problem() -> str:
    return ""


def probe_disk(directory: str, total_bytes: int, record_bytes: int) -> dict[str, Any]:
    return {"o_direct": True, "write_bytes_per_second": 1.0 * GIB, "read_bytes_per_second": 2.0 * GIB}


def measure_copy(total_bytes: int, threads: int) -> float:
    return 10.0 * GIB
