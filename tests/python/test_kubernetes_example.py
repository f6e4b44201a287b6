# SPDX-License-Identifier: Apache-2.0
"""examples/kubernetes: renders and is valid by Kubernetes' own schemas; its sizes, paths and commands agree.

Kustomize is the one in kubectl. The recipes are not rendered: their tools (Helm, KServe's controller) are not
installed. Their JSON, sizes and quoting are checked.
"""

import copy
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from kv_offload.cli import app
from kv_offload.config import OffloadConfig
from kv_offload.sizes import parse_byte_size

# Not installed on every test machine; tests/run.sh installs it.
kubernetes_validate = pytest.importorskip("kubernetes_validate")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECIPES = EXAMPLES / "kubernetes" / "recipes"
VERSIONS = ("1.30", "1.37")  # sidecars exist since 1.29
CUSTOM = ("ServiceMonitor", "PrometheusRule")  # kinds of the Prometheus Operator, not of Kubernetes


def render(folder):
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is missing: no kustomize to render the example with")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def plain():
    """The objects of the example as it is."""
    return render(EXAMPLES / "kubernetes")


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """The objects of the example with all components enabled."""
    copied = tmp_path_factory.mktemp("complete")
    for name in ("kubernetes", "monitoring"):
        shutil.copytree(EXAMPLES / name, copied / name)
    top = copied / "kubernetes" / "kustomization.yaml"
    text, changes = re.subn(r"^  # - ", "  - ", top.read_text(), flags=re.MULTILINE)
    assert changes == 2
    top.write_text(text)
    return render(copied / "kubernetes")


@pytest.fixture(params=["plain", "complete"])
def objects(request):
    return request.getfixturevalue(request.param)


def kind(objects, name, prefix=""):
    (found,) = [
        each for each in objects if each["kind"] == name and each["metadata"]["name"].startswith(prefix)
    ]
    return found


def pod_of(objects):
    return kind(objects, "Deployment")["spec"]["template"]["spec"]


def server_of(objects):
    (container,) = pod_of(objects)["containers"]
    return container


def evictor_of(objects):
    (container,) = pod_of(objects)["initContainers"]
    return container


def environment(objects, container):
    """Returns the container's variables, expanded as Kubernetes does: by those before them in the list."""
    found = {}
    for entry in container["env"]:
        if "value" in entry:
            value = entry["value"]
        else:
            source = entry["valueFrom"]["configMapKeyRef"]
            value = kind(objects, "ConfigMap", source["name"])["data"][source["key"]]
        found[entry["name"]] = expand(value, found)
    return found


def expand(text, variables):
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


def transfer_of(objects):
    server = server_of(objects)
    variables = environment(objects, server)
    (argument,) = [each for each in server["args"] if each.startswith("--kv-transfer-config=")]
    return json.loads(expand(argument.partition("=")[2], variables))


def config_of(transfer):
    """Parses the configuration as the plugin does; no notes, no unknown keys."""
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("OffloadingConnector", "kv_both")
    config, notes = OffloadConfig.parse(transfer["kv_connector_extra_config"])
    assert not notes
    return config


def validate(document, version):
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_is_valid(objects, version):
    for each in objects:
        if each["kind"] not in CUSTOM:
            validate(each, version)


def misspelt_probe(document):
    container = document["spec"]["template"]["spec"]["containers"][0]
    container["readynessProbe"] = container.pop("readinessProbe")


def port_as_text(document):
    document["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"] = "8000"


def no_selector(document):
    del document["spec"]["selector"]


@pytest.mark.parametrize("plant", [misspelt_probe, port_as_text, no_selector])
def test_a_planted_mistake_is_detected(plain, plant):
    document = copy.deepcopy(kind(plain, "Deployment"))
    plant(document)
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(document, VERSIONS[0])


def test_the_plugin_accepts_the_configuration_of_the_server(objects):
    config = config_of(transfer_of(objects))
    (tier,) = config.secondary_tiers
    assert (tier.type, tier.max_bytes) == ("fs", 500 << 30)
    assert config.cpu_bytes_to_use == 32 << 30


def test_each_size_is_described_and_used(plain):
    lines = (EXAMPLES / "kubernetes" / "settings.env").read_text().splitlines()
    names = [line.partition("=")[0] for line in lines if line and not line.startswith("#")]
    for name in names:
        place = next(index for index, line in enumerate(lines) if line.startswith(f"{name}="))
        assert lines[place - 1].startswith("# "), name
    used = (EXAMPLES / "kubernetes" / "base" / "vllm.yaml").read_text()
    used += (EXAMPLES / "kubernetes" / "components" / "sizes" / "kustomization.yaml").read_text()
    assert [name for name in names if f"key: {name}" not in used and f"data.{name}" not in used] == []
    assert set(kind(plain, "ConfigMap")["data"]) == set(names)


def test_sizes_changed_in_an_overlay_change_everywhere(tmp_path):
    shutil.copytree(EXAMPLES / "kubernetes", tmp_path / "kubernetes")
    settings = tmp_path / "kubernetes" / "settings.env"
    changed = {
        "32Gi": "8Gi",
        "34Gi": "9Gi",
        "64Gi": "20Gi",
        "500Gi": "50Gi",
        "480Gi": "48Gi",
        "600Gi": "60Gi",
    }
    text = settings.read_text()
    for old, new in changed.items():
        assert text.count(f"={old}\n") == 1
        text = text.replace(f"={old}\n", f"={new}\n")
    settings.write_text(text)
    objects = render(tmp_path / "kubernetes")
    rest = [each for each in objects if each["kind"] != "ConfigMap"]
    assert not [old for old in changed if f'"{old}"' in json.dumps(rest)]
    sizes_fit(objects)
    assert config_of(transfer_of(objects)).cpu_bytes_to_use == 8 << 30


def memory_volume(pod, container):
    """Returns the size of the memory volume at /dev/shm."""
    (name,) = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (volume,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == name]
    assert volume["medium"] == "Memory"
    return parse_byte_size(volume["sizeLimit"])


def sizes_fit(objects):
    """Checks host memory < /dev/shm < memory limit, and evictor <= tier < volume."""
    server, evictor = server_of(objects), evictor_of(objects)
    config = config_of(transfer_of(objects))
    limit = parse_byte_size(server["resources"]["limits"]["memory"])
    assert config.cpu_bytes_to_use < memory_volume(pod_of(objects), server) < limit
    assert parse_byte_size(server["resources"]["requests"]["memory"]) == limit, (
        "a lower request lets the node reclaim memory"
    )
    (tier,) = config.secondary_tiers
    bound = expand(evictor["args"][evictor["args"].index("--max-bytes") + 1], environment(objects, evictor))
    volume = kind(objects, "PersistentVolumeClaim")["spec"]["resources"]["requests"]["storage"]
    assert parse_byte_size(bound) <= tier.max_bytes < parse_byte_size(volume)


def test_sizes_fit(objects):
    sizes_fit(objects)


def test_server_and_evictor_use_the_root_as_the_same_user(objects):
    pod, server, evictor = pod_of(objects), server_of(objects), evictor_of(objects)
    (tier,) = config_of(transfer_of(objects)).secondary_tiers
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


def test_the_pod_has_only_the_rights_that_it_needs(objects):
    assert restricted(pod_of(objects)) == []


@pytest.mark.parametrize(
    ("container", "key"),
    [
        ("evictor", "allowPrivilegeEscalation"),
        ("evictor", "capabilities"),
        ("vllm", "allowPrivilegeEscalation"),
        ("vllm", "capabilities"),
    ],
)
def test_an_extra_right_is_detected(plain, container, key):
    changed = copy.deepcopy(pod_of(plain))
    for found in (*changed["initContainers"], *changed["containers"]):
        if found["name"] == container:
            found["securityContext"] = {k: v for k, v in found["securityContext"].items() if k != key}
    assert restricted(changed) == [f"{container}: {key}"]


def test_the_evictor_is_a_sidecar_with_a_command_that_exists(plain, tmp_path):
    evictor = evictor_of(plain)
    assert evictor["restartPolicy"] == "Always"
    assert evictor["command"] == ["kv-offload"]
    variables = environment(plain, evictor)
    arguments = [expand(argument, variables) for argument in evictor["args"] if argument != "--watch"]
    arguments[1] = str(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert f"{tmp_path} is an empty directory" in result.stderr, "an option was not accepted"


def test_probes_and_service_name_the_port(plain):
    server = server_of(plain)
    names = {port["name"] for port in server["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"]["path"] == "/health"
        assert server[probe]["httpGet"]["port"] in names
    assert {port["targetPort"] for port in kind(plain, "Service")["spec"]["ports"]} <= names


def test_queued_chunks_are_written_before_the_end(plain):
    (timeout,) = [
        int(text.split("=")[1]) for text in server_of(plain)["args"] if "--shutdown-timeout" in text
    ]
    assert 0 < timeout < pod_of(plain)["terminationGracePeriodSeconds"]


# ---- components


def test_the_encryption_key_is_mounted_where_the_tier_reads_it(plain, complete):
    (tier,) = config_of(transfer_of(complete)).secondary_tiers
    (mount,) = [mount for mount in server_of(complete)["volumeMounts"] if mount["name"] == "kv-offload-key"]
    assert tier.encryption_key_file == (f"{mount['mountPath']}/key",)
    assert mount["readOnly"]
    (volume,) = [volume for volume in pod_of(complete)["volumes"] if volume["name"] == "kv-offload-key"]
    assert volume["secret"] == {"secretName": "kv-offload-key", "defaultMode": 0o400}
    assert "encryption_key_file" not in json.dumps(transfer_of(plain))


def test_the_service_monitor_scrapes_a_port_of_the_service(complete):
    service, monitor = kind(complete, "Service"), kind(complete, "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["path"] == "/metrics"


def test_the_alerts_are_those_of_the_rules_file_and_pass_promtool(complete, tmp_path):
    rule = kind(complete, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((EXAMPLES / "monitoring" / "rules.yml").read_text())
    promtool = shutil.which("promtool")
    assert promtool is not None, "promtool is missing: apt install prometheus"
    rules = tmp_path / "rules.yml"
    rules.write_text(yaml.safe_dump(rule["spec"]))
    done = subprocess.run([promtool, "check", "rules", rules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_rules_object_is_up_to_date():
    path = EXAMPLES / "monitoring" / "prometheus_rule.py"
    spec = importlib.util.spec_from_file_location("prometheus_rule", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert path.with_name("prometheus-rule.yaml").read_text() == module.prometheus_rule(), (
        "run examples/monitoring/prometheus_rule.py"
    )


def test_grafana_finds_the_dashboard(complete):
    found = kind(complete, "ConfigMap", "kv-offload-dashboard")
    assert found["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert json.loads(found["data"]["kv-offload.json"]) == json.loads(
        (EXAMPLES / "monitoring" / "dashboard.json").read_text()
    )


# ---- recipes


def fits(config, shm, limit):
    assert config.cpu_bytes_to_use < parse_byte_size(shm) < parse_byte_size(limit)


def option(arguments, name):
    """Returns the value of an option, given as one word or as two."""
    for index, argument in enumerate(arguments):
        if argument == name:
            return arguments[index + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    raise AssertionError(f"no {name} in {arguments}")


def test_the_llm_d_recipe_configures_the_plugin():
    patch = yaml.safe_load((RECIPES / "llm-d" / "patch-vllm.yaml").read_text())
    pod = patch["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (script,) = container["args"]
    config = config_of(json.loads(option(shlex.split(script), "--kv-transfer-config")))
    (volume,) = pod["volumes"]
    fits(config, volume["emptyDir"]["sizeLimit"], container["resources"]["limits"]["memory"])
    (tier,) = config.secondary_tiers
    assert Path(tier.root_dir).parent == Path("/mnt/files-storage")  # the guide's volume
    assert tier.max_bytes < 9000 << 30  # its size
    assert int(option(shlex.split(script), "--shutdown-timeout")) < 130  # the guide's grace period


def test_the_llm_d_recipe_changes_the_guides_deployment(tmp_path):
    guide, own = tmp_path / "native" / "fs" / "base", tmp_path / "kv-offload"
    shutil.copytree(RECIPES / "llm-d", own)
    guide.mkdir(parents=True)
    # What the recipe relies on in the guide, whose files are not here.
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "gpu-vllm-decode", "labels": {"llm-d.ai/guide": "tiered-prefix-cache"}},
        "spec": {
            "template": {
                "spec": {
                    "containers": [
                        {
                            "name": "modelserver",
                            "image": "vllm/vllm-openai:v0.23.0",
                            "args": ["exec vllm serve"],
                            "volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}],
                        }
                    ],
                    "volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "250Gi"}}],
                }
            }
        },
    }
    (guide / "deployment.yaml").write_text(yaml.safe_dump(deployment))
    (guide / "kustomization.yaml").write_text("resources: [deployment.yaml]\n")
    (rendered,) = render(own)
    pod = rendered["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "KVOffloadSpec" in container["args"][0]
    assert container["image"].startswith("registry.example.com/")
    assert memory_volume(pod, container) == 104 << 30


def test_the_kserve_recipe_configures_the_plugin():
    service = yaml.safe_load((RECIPES / "kserve.yaml").read_text())
    text = (RECIPES / "kserve.yaml").read_text()
    assert "{{" not in text, "KServe would evaluate it as a template"
    pod = service["spec"]["template"]
    (container,) = pod["containers"]
    (variable,) = container["env"]
    assert variable["name"] == "VLLM_ADDITIONAL_ARGS"
    # KServe's template passes the variable through eval.
    done = subprocess.run(
        ["bash", "-c", 'eval "printf %s\\\\\\\\n ${VLLM_ADDITIONAL_ARGS}"'],
        env={"VLLM_ADDITIONAL_ARGS": variable["value"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[0] == "--kv-transfer-config"
    config = config_of(json.loads("".join(done.stdout.splitlines()[1:])))
    assert "kvCacheOffloading" not in service["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    fits(config, volumes["dshm"]["emptyDir"]["sizeLimit"], container["resources"]["limits"]["memory"])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    (tier,) = config.secondary_tiers
    assert mounts[str(Path(tier.root_dir).parent)] in volumes
    assert pod["securityContext"]["runAsUser"] == 1000


def test_the_production_stack_recipe_configures_the_plugin():
    engines = yaml.safe_load((RECIPES / "production-stack.yaml").read_text())["servingEngineSpec"]
    (model,) = engines["modelSpec"]
    arguments = model["vllmConfig"]["extraArgs"]
    config = config_of(json.loads(option(arguments, "--kv-transfer-config")))
    assert "tensorParallelSize" in model["vllmConfig"], "else the chart mounts no volume at /dev/shm"
    assert model["vllmConfig"]["enablePrefixCaching"] is True
    assert "lmcacheConfig" not in model
    fits(config, model["shmSize"], model["limitMemory"])
    assert model["requestMemory"] == model["limitMemory"]
    assert int(option(arguments, "--shutdown-timeout")) < 30  # the chart sets no grace period
    volumes = {volume["name"] for volume in model["extraVolumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in model["extraVolumeMounts"]}
    assert set(mounts.values()) == volumes
    (tier,) = config.secondary_tiers
    assert str(Path(tier.root_dir).parent) in mounts
    assert engines["serviceMonitor"]["enabled"]
