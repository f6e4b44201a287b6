# SPDX-License-Identifier: Apache-2.0
"""examples/kubernetes: valid by Kubernetes' own schemas; its sizes, paths and commands fit together."""

import copy
import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from kv_offload.cli import app
from kv_offload.config import OffloadConfig
from kv_offload.sizes import parse_byte_size

# Not installed on every test machine; tests/run.sh installs it.
kubernetes_validate = pytest.importorskip("kubernetes_validate")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "kubernetes" / "vllm.yaml"
VERSIONS = ("1.30", "1.37")  # sidecars exist since 1.29


def documents():
    return list(yaml.safe_load_all(EXAMPLE.read_text()))


def validate(document, version):
    kubernetes_validate.validate(document, version, strict=True)


def kind(name):
    (found,) = [document for document in documents() if document["kind"] == name]
    return found


@pytest.fixture
def pod():
    return kind("Deployment")["spec"]["template"]["spec"]


@pytest.fixture
def server(pod):
    (container,) = pod["containers"]
    return container


@pytest.fixture
def evictor(pod):
    (container,) = pod["initContainers"]
    return container


@pytest.fixture
def transfer():
    return json.loads(kind("ConfigMap")["data"]["kv-transfer-config"])


@pytest.fixture
def config(transfer):
    config, notes = OffloadConfig.parse(transfer["kv_connector_extra_config"])
    assert not notes
    return config


def size(quantity):
    """Converts a Kubernetes quantity to bytes: 32Gi is our 32GiB."""
    return parse_byte_size(f"{quantity}B")


@pytest.mark.parametrize("version", VERSIONS)
def test_each_document_is_valid(version):
    for document in documents():
        validate(document, version)


def misspelt_probe(document):
    container = document["spec"]["template"]["spec"]["containers"][0]
    container["readynessProbe"] = container.pop("readinessProbe")


def port_as_text(document):
    document["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"] = "8000"


def no_selector(document):
    del document["spec"]["selector"]


@pytest.mark.parametrize("plant", [misspelt_probe, port_as_text, no_selector])
def test_a_planted_mistake_is_detected(plant):
    document = copy.deepcopy(kind("Deployment"))
    plant(document)
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(document, VERSIONS[0])


def test_the_server_gets_the_configuration(server, transfer):
    assert transfer["kv_connector"] == "OffloadingConnector"
    (source,) = [entry["valueFrom"]["configMapKeyRef"] for entry in server["env"]]
    assert source["name"] == kind("ConfigMap")["metadata"]["name"]
    assert source["key"] in kind("ConfigMap")["data"]
    assert f"--kv-transfer-config=$({server['env'][0]['name']})" in server["args"]


def test_host_memory_fits_in_the_memory_limit(pod, server, config):
    (shm,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
    (mount,) = [mount for mount in server["volumeMounts"] if mount["name"] == "shm"]
    assert (shm["medium"], mount["mountPath"]) == ("Memory", "/dev/shm")
    limit = size(server["resources"]["limits"]["memory"])
    assert config.cpu_bytes_to_use < size(shm["sizeLimit"]) < limit
    assert size(server["resources"]["requests"]["memory"]) == limit, (
        "a lower request lets the node reclaim memory"
    )


def test_the_tier_bound_fits_between_evictor_and_volume(evictor, config):
    (tier,) = config.secondary_tiers
    evicts_at = parse_byte_size(evictor["args"][evictor["args"].index("--max-bytes") + 1])
    volume = size(kind("PersistentVolumeClaim")["spec"]["resources"]["requests"]["storage"])
    assert evicts_at <= tier.max_bytes < volume


def test_server_and_evictor_use_the_root_as_the_same_user(pod, server, evictor, config):
    (tier,) = config.secondary_tiers
    assert evictor["args"][1] == tier.root_dir
    for container in (server, evictor):
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "cache"]
        # Below the mount, which root owns: the server creates its own directory.
        assert Path(tier.root_dir).parent == Path(mount["mountPath"])
        assert not {"runAsUser", "runAsGroup"} & set(container["securityContext"]), "the pod's user"
    assert pod["securityContext"]["runAsNonRoot"]


def restricted(pod):
    """Lists the missing security contexts of Pod Security Standard "restricted"."""
    context = pod.get("securityContext", {})
    missing = []
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        missing.append("seccompProfile")
    if context.get("runAsNonRoot") is not True or context.get("runAsUser", 0) == 0:
        missing.append("runAsNonRoot")
    for container in (*pod["initContainers"], *pod["containers"]):
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            missing.append(f"{container['name']}: allowPrivilegeEscalation")
        if own.get("capabilities") != {"drop": ["ALL"]}:
            missing.append(f"{container['name']}: capabilities")
        if own.get("privileged") or {"seccompProfile", "runAsUser", "runAsNonRoot"} & set(own):
            missing.append(f"{container['name']}: loosens the pod's context")
    return missing


def test_the_pod_has_only_the_rights_that_it_needs(pod):
    assert restricted(pod) == []


@pytest.mark.parametrize(
    ("container", "key"),
    [
        ("evictor", "allowPrivilegeEscalation"),
        ("evictor", "capabilities"),
        ("vllm", "allowPrivilegeEscalation"),
        ("vllm", "capabilities"),
    ],
)
def test_an_extra_right_is_detected(pod, container, key):
    changed = copy.deepcopy(pod)
    for found in (*changed["initContainers"], *changed["containers"]):
        if found["name"] == container:
            found["securityContext"] = {k: v for k, v in found["securityContext"].items() if k != key}
    assert restricted(changed) == [f"{container}: {key}"]


def test_the_evictor_is_a_sidecar_with_a_command_that_exists(evictor, tmp_path):
    assert evictor["restartPolicy"] == "Always"
    assert evictor["command"] == ["kv-offload"]
    arguments = [argument for argument in evictor["args"] if argument != "--watch"]
    arguments[1] = str(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert f"{tmp_path} is an empty directory" in result.stderr, "an option was not accepted"


def test_probes_and_service_name_the_port(server):
    names = {port["name"] for port in server["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"]["path"] == "/health"
        assert server[probe]["httpGet"]["port"] in names
    assert {port["targetPort"] for port in kind("Service")["spec"]["ports"]} <= names


def test_queued_chunks_are_written_before_the_end(pod, server):
    (timeout,) = [int(text.split("=")[1]) for text in server["args"] if "--shutdown-timeout" in text]
    assert 0 < timeout < pod["terminationGracePeriodSeconds"]
