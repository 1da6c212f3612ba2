"""Replication and controller: who is master, who keeps up, and what a failover takes."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, heatmap, panel, quantiles

_MASTERS = Row(
    "Masters",
    (
        panel(
            "Role",
            "1: this replica is the master of its broker group. There is one of each group, but for a moment in "
            "which an old one has not heard yet that it is replaced: it can acknowledge nothing.",
            Query(
                "max by (broker_group, node_id) (rocketmq_ha_role{HERE})",
                "{{broker_group}} {{node_id}}",
            ),
            look=Look.STATES,
            alerts=("NoMaster",),
        ),
        panel(
            "Epoch",
            "One more with each change of a master.",
            Query("max by (broker_set) (rocketmq_controller_group_epoch{HERE})", "{{broker_set}}"),
        ),
        panel(
            "Failovers",
            "Changes of masters, by reason: transfer is one that was planned.",
            Query(
                "sum by (broker_group, reason) "
                "(increase(rocketmq_ha_failover_seconds_count{HERE}[RATE]))",
                "{{broker_group}} {{reason}}",
            ),
            look=Look.STACKED,
        ),
        panel(
            "Sends away",
            "Seconds from the loss of a master to the first commit of the next one.",
            *quantiles("rocketmq_ha_failover_seconds", by="reason", legend="{{reason}}"),
            unit="s",
        ),
        panel(
            "Sends away, spread",
            "The same, of all reasons.",
            heatmap("rocketmq_ha_failover_seconds"),
            unit="s",
            look=Look.HEATMAP,
        ),
        panel(
            "Needs somebody",
            "1 while a broker group has no master that works, or the controller cannot write what it should: "
            "`tidemill cluster status` says why.",
            Query("max by (broker_set) (rocketmq_controller_group_alarm{HERE})", "{{broker_set}}"),
            look=Look.STATES,
            alerts=("ReplicasNeedSomebody",),
        ),
    ),
)

_REPLICAS = Row(
    "Replicas",
    (
        panel(
            "In sync",
            "Replicas that have all that is acknowledged, and those that should.",
            Query(
                "min by (broker_set) (rocketmq_controller_in_sync_replicas{HERE})",
                "{{broker_set}} in sync",
            ),
            Query(
                "max by (broker_set) (rocketmq_controller_registered_replicas{HERE})",
                "{{broker_set}} should be",
            ),
            alerts=("InSyncSetShrunk",),
        ),
        panel(
            "Heard of",
            "Replicas that are registered, that the controllers hear, and that turn.",
            Query(
                "max by (broker_set) (rocketmq_controller_active_broker_number{HERE})",
                "{{broker_set}}",
            ),
        ),
        panel(
            "Diverged",
            "Replicas whose log is not their master's and may not be cut: they follow nobody until somebody looks.",
            Query(
                "max by (broker_set) (rocketmq_controller_diverged_replicas{HERE})",
                "{{broker_set}}",
            ),
            alerts=("ReplicaDiverged",),
        ),
        panel(
            "Not heard",
            "Pairs of replicas that the controllers hear, of which one does not hear the other: "
            "a part of the network does not pass, in one direction at least.",
            Query(
                "max by (broker_set) (rocketmq_controller_unheard_replicas{HERE})", "{{broker_set}}"
            ),
            alerts=("ReplicasPartitioned",),
        ),
        panel(
            "Behind, bytes",
            "Of the master's log, what each replica has not acknowledged; the master says it.",
            Query(
                "max by (node_id, replica) (rocketmq_ha_replica_behind_bytes{HERE})",
                "{{replica}}, says {{node_id}}",
            ),
            unit="bytes",
        ),
        panel(
            "Behind, seconds",
            "Since each replica was last seen to have acknowledged all.",
            Query(
                "max by (node_id, replica) (rocketmq_ha_replica_behind_seconds{HERE})",
                "{{replica}}, says {{node_id}}",
            ),
            unit="s",
        ),
        panel(
            "Not confirmed",
            "Bytes at the end of each replica's log that it does not know to be confirmed. At a master sends wait for them.",
            Query(
                "max by (broker_group, node_id) "
                "(rocketmq_ha_max_offset{HERE} - rocketmq_ha_confirm_offset{HERE})",
                "{{broker_group}} {{node_id}}",
            ),
            unit="bytes",
        ),
        panel(
            "Confirmed",
            "Bytes of the log that are confirmed a second, as each replica knows it.",
            Query(
                "max by (broker_group, node_id) (deriv(rocketmq_ha_confirm_offset{HERE}[RATE]))",
                "{{broker_group}} {{node_id}}",
            ),
            unit="Bps",
        ),
        panel(
            "Sent to replicas",
            "Bytes of the log a second.",
            Query(
                "sum by (node_id) (rate(rocketmq_ha_sent_bytes_total{HERE}[RATE]))", "{{node_id}}"
            ),
            unit="Bps",
            look=Look.STACKED,
        ),
    ),
)

_CONTROLLERS = Row(
    "Controllers",
    (
        panel(
            "Role",
            "3: this controller leads. 2: it is a deputy.",
            Query("max by (node_id) (rocketmq_controller_role{HERE})", "{{node_id}}"),
            look=Look.STATES,
            alerts=("ControllerNoLeader",),
        ),
        panel(
            "Elections",
            "Decisions a second about masters, by what came of them.",
            Query(
                "sum by (broker_set, election_result) "
                "(rate(rocketmq_controller_election_total{HERE}[RATE]))",
                "{{broker_set}} {{election_result}}",
            ),
        ),
        panel(
            "Requests",
            "Requests a second of replicas, proxies and operators.",
            Query(
                "sum by (request_type) (rate(rocketmq_controller_request_total{HERE}[RATE]))",
                "{{request_type}}",
            ),
            unit="reqps",
            look=Look.STACKED,
        ),
        panel(
            "Requests that failed",
            "Refused, or not done in time. A proposal that comes late is refused, and made again.",
            Query(
                "sum by (request_type, request_handle_status) "
                '(rate(rocketmq_controller_request_total{HERE, request_handle_status!="success"}[RATE]))',
                "{{request_type}} {{request_handle_status}}",
            ),
            unit="reqps",
        ),
        panel(
            "Request P99",
            "Microseconds from a request to its answer.",
            *quantiles(
                "rocketmq_controller_request_latency",
                by="request_type",
                legend="{{request_type}}",
                of=(0.99,),
            ),
            unit="µs",
        ),
        panel(
            "Store",
            "Calls a second of the store of group records, by what came of them.",
            Query(
                "sum by (operation, operation_status) "
                "(rate(rocketmq_controller_log_op_total{HERE}[RATE]))",
                "{{operation}} {{operation_status}}",
            ),
            unit="ops",
        ),
        panel(
            "Store P99",
            "Microseconds of a call of the store.",
            *quantiles(
                "rocketmq_controller_log_op_latency",
                by="operation",
                legend="{{operation}}",
                of=(0.99,),
            ),
            unit="µs",
        ),
    ),
)

PAGE: Final = Page(
    name="replication-and-controller",
    title="Tidemill / Replication and controller",
    description="Who is master of each broker group, which replicas keep up, and what a failover takes.",
    rows=(_MASTERS, _REPLICAS, _CONTROLLERS),
)
