"""The chart's values.schema.json and the default values for its templates.

The schema is a hand-written shape, schema.in.yaml, with the settings of the processes inserted.
Templates cannot read values.yaml, so its content is a second generated file.

The schema omits the settings that the chart sets itself. Helm then rejects such a value before a
process can fail at its start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tidemill.admin.settings import AdminSettings
from tidemill.broker.settings import BrokerSettings
from tidemill.common.settings import ProcessSettings
from tidemill.controller.settings import ControllerSettings
from tidemill.proxy.settings import ProxySettings

CHART = Path(__file__).resolve().parent.parent / "charts" / "tidemill"
MODELS: dict[str, type[ProcessSettings]] = {
    "broker": BrokerSettings,
    "proxy": ProxySettings,
    "admin": AdminSettings,
    "controller": ControllerSettings,
}
# Settings that follow from other values: addresses, names, files of certificates.
CHARTS_OWN = frozenset(
    [
        "admin_hosts",
        "admin_tls_certificate_file",
        "admin_tls_key_file",
        "admin_token_file",
        "advertised_address",
        "broker",
        "brokers",
        "cluster_tls_ca_file",
        "cluster_tls_certificate_file",
        "cluster_tls_key_file",
        "config",
        "controllers",
        "controllers_fd",
        "data_dir",
        "group_store",
        "grpc_host",
        "grpc_port",
        "grpc_reuse_port",
        "host",
        "keeper_fd",
        "kubernetes_groups",
        "makes_groups",
        "metrics_host",
        "metrics_port",
        "min_in_sync",
        "name",
        "node_id",
        "plain_links",
        "port",
        "replica_address",
        "replica_id",
        "replica_name",
        "reuse_port",
        "routes_file",
        "security_bootstrap_file",
        "security_floor",
        "security_key_file",
        "supervisor_fd",
        "tls",
        "tls_certificate_file",
        "tls_client_ca_file",
        "tls_key_file",
    ]
)

Schema = dict[str, Any]


def chart_schema() -> str:
    """Return the text of values.schema.json."""
    shape: Schema = yaml.safe_load((CHART / "schema.in.yaml").read_text("utf-8"))
    definitions: Schema = shape["definitions"]
    whole = _filled(shape, definitions)
    # A definition without a type only lends its properties; the schema does not need it.
    for name in [name for name in definitions if "type" not in definitions[name]]:
        del whole["definitions"][name]
    _add_permitted_names(whole)
    return json.dumps(whole, indent=2, sort_keys=True) + "\n"


def chart_defaults() -> str:
    """Return the text of files/defaults.yaml: values.yaml without its comments and anchors."""
    values = json.loads(json.dumps(yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))))
    head = "# Made of values.yaml by `make docs`; do not edit.\n"
    return head + yaml.safe_dump(values, sort_keys=False, width=100)


def settings(names: list[str], *, only_common: bool) -> Schema:
    """Return the schema of the settings of these processes that the chart does not set itself."""
    properties: Schema = {}
    for name in names:
        model = MODELS[name].model_json_schema()
        for key, described in model["properties"].items():
            is_common = key in ProcessSettings.model_fields
            if key not in CHARTS_OWN and (is_common or not only_common):
                properties[key] = _plain(described, model.get("$defs", {}))
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _plain(described: Schema, definitions: Schema) -> Schema:
    """Return the schema of one setting, without the parts that only pydantic reads."""
    if "$ref" in described:
        referred = definitions[described["$ref"].rpartition("/")[2]]
        described = {
            **referred,
            **{key: value for key, value in described.items() if key[0] != "$"},
        }
    kept = {key: value for key, value in described.items() if key not in {"title", "default"}}
    bounds = {"exclusiveMinimum", "exclusiveMaximum", "minimum", "maximum"}
    return {key: value for key, value in kept.items() if value is not None or key not in bounds}


def _add_permitted_names(node: Any) -> None:
    """Let the error for a misspelt name list the permitted names of its place.

    `additionalProperties` alone names only the misspelt one, and Helm checks the schema before any
    template runs.
    """
    if isinstance(node, dict):
        if node.get("additionalProperties") is False:
            node["propertyNames"] = {"enum": sorted(node["properties"])}
        for key, value in node.items():
            if key != "propertyNames":
                _add_permitted_names(value)
    elif isinstance(node, list):
        for item in node:
            _add_permitted_names(item)


def _filled(node: Any, definitions: Schema) -> Any:
    """Return a part of the shape with its `x-` keys replaced by the settings they name."""
    if isinstance(node, list):
        return [_filled(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "x-settings" in node:
        return settings(node["x-settings"], only_common=node.get("x-only-common", False))
    filled = {key: _filled(value, definitions) for key, value in node.items() if key != "x-extends"}
    for name in node.get("x-extends", []):
        lent = _filled(definitions[name], definitions)["properties"]
        filled["properties"] = {**lent, **filled.get("properties", {})}
    return filled
