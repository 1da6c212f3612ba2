"""The names of all settings, and the search for names that no process has.

All processes read one file and one environment, so an unknown name is probably a spelling error.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterable

# The settings of all processes. They are listed here because processes do not import each other; a
# test compares the list with the models.
KNOWN_KEYS = frozenset(
    [
        "admin_body_bytes_max",
        "admin_forwarded_from",
        "admin_grpc_port",
        "admin_host",
        "admin_hosts",
        "admin_open",
        "admin_plain",
        "admin_port",
        "admin_tls_certificate_file",
        "admin_tls_key_file",
        "admin_token_file",
        "advertised_address",
        "allow_unknown_settings",
        "archive_gate_group",
        "auto_create_groups",
        "auto_create_per_s",
        "auto_create_topics",
        "broker",
        "brokers",
        "checkpoint_log_bytes",
        "client_metrics",
        "clients_max",
        "cluster",
        "cluster_tls_ca_file",
        "cluster_tls_certificate_file",
        "cluster_tls_key_file",
        "config",
        "connection_max_age_ms",
        "connections_max",
        "connections_per_address_max",
        "controller_port",
        "controllers",
        "controllers_fd",
        "data_dir",
        "data_dir_wait_ms",
        "deadline_reserve_ms",
        "dedup_memory_bytes",
        "default_queues",
        "deliveries_max",
        "deputy_rank",
        "deputy_step_ms",
        "disk_full_policy",
        "disk_reserve_bytes",
        "drain_delay_ms",
        "drain_timeout_ms",
        "event_retention_ms",
        "feature_level_max",
        "flapping_guard_ms",
        "group_store",
        "groups",
        "groups_max",
        "grpc_client_consumer_min_long_polling_timeout_ms",
        "invisible_duration_min_ms",
        "grpc_host",
        "grpc_port",
        "grpc_reflection",
        "grpc_reuse_port",
        "host",
        "keeper_fd",
        "kubernetes_groups",
        "link_pending_max",
        "log_format",
        "log_level",
        "long_polling_max_ms",
        "makes_groups",
        "memory_bytes_max",
        "message_item_bytes_max",
        "metrics_host",
        "metrics_hosts",
        "metrics_port",
        "metrics_token_file",
        "min_in_sync",
        "name",
        "node_id",
        "pack_rate_bytes",
        "oidc_audience",
        "oidc_ca_file",
        "oidc_issuer",
        "oidc_keys",
        "oidc_token_file",
        "parked_max",
        "peer_silence_ms",
        "pending_bytes_max",
        "pipeline_source",
        "plain_links",
        "port",
        "proxies",
        "proxy_protocol_from",
        "recreate_block_ms",
        "replica_address",
        "replica_id",
        "replica_name",
        "replicas",
        "request_timeout_ms",
        "retention_bytes",
        "retention_ms",
        "reuse_port",
        "routes_file",
        "scaler_host",
        "scaler_open",
        "scaler_port",
        "scaler_tls_certificate_file",
        "scaler_tls_client_ca_file",
        "scaler_tls_key_file",
        "segment_bytes",
        "session_timeout_ms",
        "signature_age_max_ms",
        "security_bootstrap_file",
        "security_bootstrap_policy",
        "security_floor",
        "security_job_users_dir",
        "security_key_file",
        "security_stale_max_ms",
        "slow_call_ms",
        "stall_limit_ms",
        "stop_timeout_ms",
        "supervisor_fd",
        "timer_clock_hold_ms",
        "timer_evacuation_lead_ms",
        "timer_evacuation_rate_bytes",
        "timer_expire_backlog_after_ms",
        "timer_flush_period_ms",
        "timer_load_chunk_records",
        "timer_load_horizon_ms",
        "timer_max_delay_ms",
        "timer_max_pending",
        "timer_max_pinned_part",
        "timer_max_rate",
        "timer_overload_policy",
        "timer_soft_limit_per_second",
        "timer_spread_ms",
        "tls",
        "tls_certificate_file",
        "tls_client_ca_file",
        "tls_key_file",
        "transaction_checks_per_second",
        "transaction_open_max",
        "transaction_outcome_memory_ms",
        "transaction_outcomes_max",
        "topics_max",
        "transaction_checks_per_second",
        "transaction_open_max",
        "transaction_outcome_memory_ms",
        "transaction_outcomes_max",
        "unready_after_ms",
    ]
)
# Variables with our prefix that are not settings: those of the command line, which a test compares
# with it, and those that Kubernetes creates for a service with our name.
_OTHER_VARIABLES = re.compile(
    r"ADMIN|ADMIN_TOKEN|ADMIN_PLAIN_TOKEN|ADMIN_CA_FILE|CONTEXT|USER|SECRET_FILE|ENDPOINTS"
    r"|PIPELINE_PRIORITY|COMMIT|TEST_.*"
    r"|(.*_)?SERVICE_HOST|(.*_)?SERVICE_PORT(_.*)?|(.*_)?PORT_\d+_.*"
)
# Settings that other settings replaced.
_REPLACED = {"auto_create": ("auto_create_topics", "auto_create_groups")}
_SERVICE_ADDRESSES = "tcp://", "udp://", "sctp://"


def is_service_address(value: str) -> bool:
    """Return whether the value of a variable is an address that Kubernetes sets for a service."""
    return value.startswith(_SERVICE_ADDRESSES)


def unknown_keys(keys: Iterable[object], file: str, known: Collection[str]) -> list[str]:
    """Return a line for each key of `file` that no process has."""
    return [f"{key} in {file}{_suggestion(str(key), known)}" for key in keys if key not in known]


def unknown_variables(known: Collection[str]) -> list[str]:
    """Return a line for each variable with our prefix that no process has."""
    unknown = []
    for variable, value in os.environ.items():
        name = variable.removeprefix("TIDEMILL_")
        is_other = _OTHER_VARIABLES.fullmatch(name) or is_service_address(value)
        if name != variable and name.lower() not in known and not is_other:
            suggestion = _suggestion(name.lower(), known, is_variable=True)
            unknown.append(f"{variable} in the environment{suggestion}")
    return unknown


def replaced_flags(arguments: Iterable[str]) -> list[str]:
    """Return a line for each flag that other flags replaced."""
    found = []
    for argument in arguments:
        flag = argument.partition("=")[0]
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if flag.startswith("--") and name in _REPLACED:
            names = [f"--{each.replace('_', '-')}" for each in _REPLACED[name]]
            found.append(f"{flag} does not exist; use {' and '.join(names)} instead")
    return found


def _suggestion(name: str, known: Collection[str], *, is_variable: bool = False) -> str:
    """Return the names that replace a name, or the most similar one; "" if none is similar."""
    replaced = _REPLACED.get(name.replace("-", "_"))
    if replaced is not None:
        names = [f"TIDEMILL_{each.upper()}" if is_variable else each for each in replaced]
        return f"; use {' and '.join(names)} instead"
    # A name with hyphens is similar to the one with underscores.
    similar = difflib.get_close_matches(name.replace("-", "_"), sorted(known), n=1)
    if not similar:
        return ""
    return f"; did you mean {f'TIDEMILL_{similar[0].upper()}' if is_variable else similar[0]}?"
