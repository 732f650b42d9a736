"""Objects of Kubernetes: what of them is a replica, and what --discover kubernetes:... takes."""

import json
from typing import Any

import msgspec
import pytest
from gateway.stub_api_server import endpoint_slice, pod, pool
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.errors import ConfigError
from headstart.gateway.discovery.kubernetes_objects import (
    EndpointSlice,
    InferencePool,
    Pod,
    replicas_of_pool,
    replicas_of_slices,
)
from headstart.gateway.run_gateway import parse_discovery


def decoded(kind: Any, body: dict[str, Any], name: str = "x") -> Any:
    body = {**body, "metadata": {"managedFields": [{}], **body.get("metadata", {}), "name": name}}
    return msgspec.json.decode(json.dumps(body), type=kind)


def of_pool(pool_body: dict[str, Any], *pods: dict[str, Any]) -> list[str]:
    found = replicas_of_pool(decoded(InferencePool, pool_body), [decoded(Pod, one) for one in pods])
    return [address.url for address in found.addresses]


def of_slices(port: str, *slices: dict[str, Any]) -> list[str]:
    found = replicas_of_slices([decoded(EndpointSlice, part) for part in slices], port)
    return [one.url for one in found.addresses]


def test_each_port_of_each_pod_is_a_replica() -> None:
    found = of_pool(pool(8001, 8000, 8000, app="m"), pod("10.0.0.2"), pod("10.0.0.1"))
    assert found == [f"http://10.0.0.{host}:{port}" for host in (1, 2) for port in (8000, 8001)]


@pytest.mark.parametrize(
    "one",
    [
        pod(""),
        pod("10.0.0.1", terminating=True),
        pod("10.0.0.1", phase="Succeeded"),
        pod("10.0.0.1", phase="Failed"),
        pod("10.0.0.1\n"),
        pod("evil.example/"),
        pod("fe80::1%eth0"),
    ],
)
def test_a_pod_without_an_address_or_near_its_end_is_not_listed(one: dict[str, Any]) -> None:
    assert of_pool(pool(8000, app="m"), one, pod("fd00::7")) == ["http://[fd00::7]:8000"]


def test_a_pod_that_is_not_ready_is_listed_because_the_router_probes_it_itself() -> None:
    one = pod("10.0.0.1", phase="Pending")
    one["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    assert of_pool(pool(8000, app="m"), one) == ["http://10.0.0.1:8000"]


def test_endpoints_are_listed_until_they_terminate() -> None:
    ready = {"addresses": ["10.0.0.1"], "conditions": {"ready": True}}
    starting = {"addresses": ["10.0.0.2"], "conditions": {"ready": False, "serving": False, "terminating": False}}
    ending = {"addresses": ["10.0.0.3"], "conditions": {"ready": False, "serving": True, "terminating": True}}
    unknown = {"addresses": ["10.0.0.4"]}
    part = endpoint_slice(ready, starting, ending, unknown, http=8000)
    assert of_slices("", part) == [f"http://10.0.0.{host}:8000" for host in (1, 2, 4)]


def test_the_port_is_the_named_one_or_the_only_one() -> None:
    one = {"addresses": ["10.0.0.1"]}
    both = endpoint_slice(one, http=8000, metrics=9000)
    assert of_slices("metrics", both) == of_slices("9000", both) == ["http://10.0.0.1:9000"]
    assert of_slices("", both) == of_slices("other", both) == of_slices("", endpoint_slice(one)) == []


def test_a_pod_of_both_families_is_one_replica() -> None:
    target = {"kind": "Pod", "name": "m-0"}
    six = endpoint_slice({"addresses": ["fd00::1"], "targetRef": target}, family="IPv6", http=8000)
    four = endpoint_slice({"addresses": ["10.0.0.1"], "targetRef": target}, http=8000)
    assert of_slices("", six, four) == ["http://10.0.0.1:8000"]
    assert of_slices("", six) == ["http://[fd00::1]:8000"]


def test_slices_of_names_or_without_endpoints_list_nothing() -> None:
    empty: dict[str, Any] = {"addressType": "IPv4", "endpoints": None, "ports": None}
    names = endpoint_slice({"addresses": ["example.org"]}, {"addresses": ["10.0.0.9"]}, family="FQDN", http=8000)
    assert of_slices("", empty, names, endpoint_slice({"addresses": []}, http=8000)) == []


BAD_PORTS = [0, -5, 65_536, 2**31, 2**63]
BAD_HOSTS = ["127.0.0.1", "127.8.8.8", "::1", "169.254.169.254", "fe80::1", "0.0.0.0", "::", "224.0.0.1", "ff02::1"]
BAD_HOSTS += ["::ffff:127.0.0.1", "::ffff:169.254.169.254", "255.255.255.255"]


@pytest.mark.parametrize("port", BAD_PORTS)
def test_a_port_that_is_none_is_refused_and_counted(port: int) -> None:
    found = replicas_of_pool(decoded(InferencePool, pool(port, 8000, app="m")), [decoded(Pod, pod("10.0.0.1"))])
    assert [one.url for one in found.addresses] == ["http://10.0.0.1:8000"] and found.refused == (f"10.0.0.1:{port}",)
    part = decoded(EndpointSlice, endpoint_slice({"addresses": ["10.0.0.1"]}, http=port))
    assert replicas_of_slices([part], "") == ((), (f"10.0.0.1:{port}",))


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_an_address_of_the_machine_itself_is_refused_and_counted(host: str) -> None:
    pods = [decoded(Pod, pod(host)), decoded(Pod, pod("10.0.0.1"))]
    found = replicas_of_pool(decoded(InferencePool, pool(8000, app="m")), pods)
    assert [one.url for one in found.addresses] == ["http://10.0.0.1:8000"] and len(found.refused) == 1
    family = "IPv6" if ":" in host else "IPv4"
    part = decoded(EndpointSlice, endpoint_slice({"addresses": [host]}, family=family, http=8000))
    assert not replicas_of_slices([part], "").addresses
    is_loopback = host in ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1")
    assert bool(replicas_of_slices([part], "", allow_loopback=True).addresses) == is_loopback


@given(st.permutations([pod(f"10.0.{n}.1") for n in range(5)]), st.lists(st.integers(1, 65535), min_size=1, max_size=8))
def test_the_list_depends_on_no_order(pods: list[dict[str, Any]], ports: list[int]) -> None:
    found = of_pool(pool(*ports, app="m"), *pods)
    assert found == sorted(found) and len(found) == 5 * len(set(ports))
    assert found == of_pool(pool(*reversed(ports), app="m"), *reversed(pods))


@pytest.mark.parametrize(
    "text",
    ["inferencepool/p", "inferencepool/ns/p.q", "service/s", "service/s:8000", "service/ns/s:http"],
)
def test_a_target_describes_itself_as_it_was_asked_for(text: str) -> None:
    assert parse_discovery(f"kubernetes:{text}").describe() == f"kubernetes:{text}"


@pytest.mark.parametrize(
    "text",
    [
        *("p", "pool/p", "inferencepool/", "inferencepool//p", "inferencepool/a/b/c", "inferencepool/p:8000"),
        *("service/s:", "service/S", "service/a b", "service/s:..", "inferencepool/p?watch=x", "service/../s"),
    ],
)
def test_any_other_target_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="write it like kubernetes:inferencepool/NAME"):
        parse_discovery(f"kubernetes:{text}")
