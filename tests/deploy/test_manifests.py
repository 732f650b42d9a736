"""The manifests of deploy/kubernetes: valid for Kubernetes, and consistent with each other and with our options."""

import asyncio
import copy
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.manifests import FILES, FOLDER, NO_MANIFESTS, documents, manifests, validate
from gateway.stub_api_server import POOLS, stub_api_server
from server.harness import until

from headstart.config.options import EngineOptions, RouterOptions, ServerOptions, flag_fields, flag_name
from headstart.gateway.discovery.kubernetes_discovery import KubernetesDiscovery
from headstart.gateway.discovery.kubernetes_objects import parse_target
from headstart.http.logs import ServerLog

VERSIONS = ("1.32", "1.37")  # the oldest with all fields that are used (preStop.sleep), and the newest with schemas
ALL = manifests()
POD_OWNERS = [ALL["StatefulSet", "replica"], ALL["Deployment", "picker"]]
OPTIONS = {
    "serve": [*flag_fields(EngineOptions), *flag_fields(ServerOptions)],
    "route": [*flag_fields(ServerOptions), *flag_fields(RouterOptions)],
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_manifest_is_valid(path: Path, version: str) -> None:
    assert documents(path)
    for document in documents(path):
        validate(document, version)


def changed(key: tuple[str, str], path: str, value: Any) -> dict[str, Any]:
    """A manifest with one other value; None: without that field."""
    document = copy.deepcopy(ALL[key])
    *parents, last = path.split(".")
    part: Any = document
    for parent in parents:
        part = part[int(parent) if parent.isdigit() else parent]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return document


@pytest.mark.parametrize(
    ("key", "path", "value"),
    [
        (("StatefulSet", "replica"), "spec.template.spec.containers.0.prots", []),
        (("StatefulSet", "replica"), "spec.template.spec.containers.0.name", None),
        (("StatefulSet", "replica"), "spec.selector", None),
        (("PodDisruptionBudget", "replica"), "spec.maxUnavailable", [1]),
        (("PodDisruptionBudget", "replica"), "apiVersion", "policy/v1beta1"),
        (("Role", "picker"), "rules.0.verbs", "list"),
        (("HorizontalPodAutoscaler", "replica"), "spec.maxReplicas", "8"),
        (("InferencePool", "headstart"), "spec.targetPortNumber", 8000),
        (("InferencePool", "headstart"), "spec.targetPorts", []),
        (("InferencePool", "headstart"), "spec.endpointPickerRef.failureMode", "Open"),
        (("InferencePool", "headstart"), "apiVersion", "inference.networking.k8s.io/v1alpha2"),
        (("HTTPRoute", "headstart"), "spec.rules.0.timeouts.request", "forever"),
        (("Gateway", "headstart"), "spec.listeners.0.port", 0),
    ],
)
def test_what_kubernetes_would_refuse_is_found(key: tuple[str, str], path: str, value: Any) -> None:
    with pytest.raises(ValueError):
        validate(changed(key, path, value), VERSIONS[-1])


def test_the_kustomization_names_every_manifest_and_image() -> None:
    document = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
    assert sorted(document["resources"]) == [path.name for path in FILES]
    assert {path.name for path in FOLDER.iterdir()} == {*document["resources"], *NO_MANIFESTS}
    images = {container(owner)["image"] for owner in POD_OWNERS}
    assert {image["name"] for image in document["images"]} == images


def container(owner: dict[str, Any]) -> dict[str, Any]:
    [found] = owner["spec"]["template"]["spec"]["containers"]
    return found


def labels(owner: dict[str, Any]) -> dict[str, str]:
    return owner["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("owner", POD_OWNERS, ids=lambda owner: owner["metadata"]["name"])
def test_selectors_select_exactly_the_pods_they_are_meant_for(owner: dict[str, Any]) -> None:
    name, of_pods = owner["metadata"]["name"], labels(owner)
    assert owner["spec"]["selector"]["matchLabels"] == of_pods
    assert ALL["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"] == of_pods
    assert ALL["NetworkPolicy", name]["spec"]["podSelector"]["matchLabels"] == of_pods
    service = ALL["Service", owner["spec"].get("serviceName", name)]
    assert service["spec"]["selector"] == of_pods
    ports = {port["name"]: port["containerPort"] for port in container(owner)["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports)
    assert all(ports[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])
    for entry in ALL["NetworkPolicy", name]["spec"]["ingress"]:
        assert {port["port"] for port in entry["ports"]} <= set(ports)


def test_the_pool_selects_the_replicas_and_its_picker() -> None:
    pool, replica, picker = ALL["InferencePool", "headstart"]["spec"], *POD_OWNERS
    assert pool["selector"]["matchLabels"] == labels(replica) != labels(picker)
    assert [port["number"] for port in pool["targetPorts"]] == [8000]
    assert {port["containerPort"] for port in container(replica)["ports"]} == {8000}
    service = ALL["Service", pool["endpointPickerRef"]["name"]]
    assert pool["endpointPickerRef"]["port"]["number"] in {port["port"] for port in service["spec"]["ports"]}
    [rule] = ALL["HTTPRoute", "headstart"]["spec"]["rules"]
    assert [(ref["kind"], ref["name"]) for ref in rule["backendRefs"]] == [("InferencePool", "headstart")]
    [parent] = ALL["HTTPRoute", "headstart"]["spec"]["parentRefs"]
    listeners = [listener["name"] for listener in ALL["Gateway", parent["name"]]["spec"]["listeners"]]
    assert listeners == [parent["sectionName"]]


@pytest.mark.parametrize("owner", POD_OWNERS, ids=lambda owner: owner["metadata"]["name"])
def test_containers_are_started_with_options_that_exist(owner: dict[str, Any]) -> None:
    verb, *words = container(owner)["args"]
    flags = {flag_name(field.name) for field in OPTIONS[verb]}
    variables = {"HEADSTART_" + field.name.upper() for field in OPTIONS[verb]}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= flags
    env = {one["name"]: one.get("value") for one in container(owner)["env"]}
    assert {name for name in env if name.startswith("HEADSTART_")} <= variables
    assert env["HEADSTART_HOST"] == "0.0.0.0"
    assert int(env["HEADSTART_PORT"] or 0) in {port["containerPort"] for port in container(owner)["ports"]}


def test_the_pickers_port_without_a_key_is_bound_to_the_pod_and_reached_by_the_gateway_only() -> None:
    picker = POD_OWNERS[1]
    [address] = [word.partition("=")[2] for word in container(picker)["args"] if word.startswith("--ext-proc=")]
    [source] = [one["valueFrom"] for one in container(picker)["env"] if f"$({one['name']})" == address[: -len(":9002")]]
    assert source == {"fieldRef": {"fieldPath": "status.podIP"}}
    rules = ALL["NetworkPolicy", "picker"]["spec"]["ingress"]
    [senders] = [rule["from"] for rule in rules if {"protocol": "TCP", "port": "ext-proc"} in rule["ports"]]
    gateway = {"gateway.networking.k8s.io/gateway-name": "headstart"}
    assert senders == [{"podSelector": {"matchLabels": gateway}}]


@pytest.mark.parametrize("owner", POD_OWNERS, ids=lambda owner: owner["metadata"]["name"])
def test_a_pod_may_drain_before_it_is_killed(owner: dict[str, Any]) -> None:
    [drain] = [one["value"] for one in container(owner)["env"] if one["name"] == "HEADSTART_DRAIN_TIMEOUT"]
    sleep = container(owner)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert owner["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= sleep + int(drain) + 10


@pytest.mark.parametrize("owner", POD_OWNERS, ids=lambda owner: owner["metadata"]["name"])
def test_pods_keep_to_the_restricted_profile(owner: dict[str, Any]) -> None:
    spec, own = owner["spec"]["template"]["spec"], container(owner)["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not spec["enableServiceLinks"]
    assert spec.get("serviceAccountName") == "picker" or not spec["automountServiceAccountToken"]


@pytest.mark.parametrize("target", ["inferencepool/headstart", "service/headstart/replicas"])
def test_the_role_allows_what_discovery_asks_for_and_nothing_else(tmp_path: Path, target: str) -> None:
    rules = {
        (group, resource): set(rule["verbs"])
        for rule in ALL["Role", "picker"]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert set(map(tuple, rules.values())) <= {("list", "watch"), ("watch", "list")}

    async def requests() -> list[tuple[str, dict[str, str]]]:
        async with stub_api_server(tmp_path, namespace="headstart") as (stub, kubeconfig):
            await stub.put(stub.path(POOLS), "headstart", ALL["InferencePool", "headstart"])
            discovery = KubernetesDiscovery(parse_target(target), kubeconfig=kubeconfig, log=ServerLog(StringIO()))
            task = asyncio.create_task(discovery.watch_replicas(lambda _: None))
            await until(lambda: stub.num_watches == (2 if target.startswith("inference") else 1))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return stub.requests

    asked: set[tuple[str, str]] = set()
    for path, query in asyncio.run(requests()):
        parts = path.strip("/").split("/")
        group, namespace, resource = ("" if parts[0] == "api" else parts[1]), parts[-2], parts[-1]
        assert namespace == ALL["Role", "picker"]["metadata"]["namespace"]
        assert ("watch" if "watch" in query else "list") in rules[group, resource]
        asked.add((group, resource))
    assert asked == (
        {key for key in rules if key[1] != "endpointslices"}
        if "pool" in target
        else {("discovery.k8s.io", "endpointslices")}
    )
    binding = ALL["RoleBinding", "picker"]
    assert binding["roleRef"]["name"] == "picker" and binding["subjects"][0]["name"] == "picker"


def test_the_autoscaler_reads_a_metric_that_the_router_exports() -> None:
    hpa = ALL["HorizontalPodAutoscaler", "replica"]["spec"]
    target = hpa["scaleTargetRef"]
    assert (target["kind"], target["name"]) in ALL and "replicas" not in ALL["StatefulSet", "replica"]["spec"]
    adapter = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text(encoding="utf-8"))
    [rule] = adapter["rules"]["external"]
    [metric] = [metric["external"]["metric"]["name"] for metric in hpa["metrics"]]
    assert rule["name"]["as"] == metric
    page = (Path(FOLDER).parents[1] / "docs" / "routing.md").read_text(encoding="utf-8")
    name = rule["seriesQuery"].split('"')[1]
    assert f"| `{name}` | gauge |" in page  # docs/generate.py writes that list from a scrape


def test_the_discovery_of_the_picker_names_the_pool() -> None:
    [discover] = [word for word in container(POD_OWNERS[1])["args"] if word.startswith("--discover=")]
    target = parse_target(discover.removeprefix("--discover=kubernetes:"))
    assert ("InferencePool", target.name) in ALL and target.kind == "inferencepool" and target.namespace is None


def test_prometheus_scrapes_each_kind_of_pod_at_its_port_and_sets_the_namespace() -> None:
    found = yaml.safe_load((FOLDER / "prometheus-scrape.yaml").read_text(encoding="utf-8"))["scrape_configs"]
    for job, owner in zip(found, POD_OWNERS, strict=True):
        by_label = {rule["source_labels"][0]: rule for rule in job["relabel_configs"]}
        component = by_label["__meta_kubernetes_pod_label_app_kubernetes_io_component"]["regex"]
        assert component == labels(owner)["app.kubernetes.io/component"]
        port = by_label["__meta_kubernetes_pod_container_port_name"]["regex"]
        assert port in {port["name"] for port in container(owner)["ports"]}
        assert by_label["__meta_kubernetes_namespace"]["target_label"] == "namespace"
        [discovery] = job["kubernetes_sd_configs"]
        assert discovery["namespaces"]["names"] == [owner["metadata"]["namespace"]]
        assert ("authorization" in job) == any(env["name"].endswith("ADMIN_API_KEY") for env in container(owner)["env"])
