"""The manifests of deploy/kubernetes, and their validation: Kubernetes' own schemas, and those of custom resources."""

import copy
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
CRDS = Path(__file__).parents[1] / "data" / "crds"
NO_MANIFESTS = ("kustomization.yaml", "prometheus-adapter.yaml", "prometheus-scrape.yaml")
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name not in NO_MANIFESTS)

Document = dict[str, Any]


def documents(path: Path) -> list[Document]:
    """The objects of one file."""
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def manifests() -> dict[tuple[str, str], Document]:
    """All objects, by kind and name."""
    found = [document for path in FILES for document in documents(path)]
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(by_name) == len(found)
    return by_name


def validate(document: Document, version: str) -> None:
    """Check an object against its schema, in which unknown fields are errors. Raises ValueError.

    Rules of custom resources in CEL (x-kubernetes-validations) are not evaluated.
    """
    group, _, api_version = document["apiVersion"].rpartition("/")
    for crd in _crds():
        if (crd["group"], crd["kind"]) == (group, document["kind"]):
            if crd["version"] != api_version:
                raise ValueError(f"{document['kind']} has version {api_version}, not {crd['version']}")
            errors = sorted(map(str, jsonschema.Draft202012Validator(crd["schema"]).iter_errors(document)))
            if errors:
                raise ValueError(errors[0])
            return
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        raise ValueError(str(error)) from error


@lru_cache
def _crds() -> tuple[Document, ...]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(CRDS.glob("*.json"))]
    for crd in found:
        crd["schema"] = _closed(crd["schema"])
        crd["schema"]["properties"]["metadata"] = {"type": "object"}
    return tuple(found)


def _closed(schema: Any) -> Any:
    """A schema in which objects have no fields but those it names, as strict validation of the API server has it."""
    schema = copy.deepcopy(schema)
    for part in _parts(schema):
        if "properties" in part and not part.get("x-kubernetes-preserve-unknown-fields"):
            part.setdefault("additionalProperties", False)
    return schema


def _parts(schema: Document) -> Iterator[Document]:
    yield schema
    for part in [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]:
        if isinstance(part, dict):
            yield from _parts(part)
