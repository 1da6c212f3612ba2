"""Replication and controller: masters, lag of replicas, and duration of failovers."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, heatmap, panel, quantiles

_MASTERS = Row(
    "Masters",
    (
        panel(
            "Role",
            "1: this replica is the master of its broker group. Each group has one master. After a failover the old master may also show 1 for a moment; it cannot acknowledge messages.",
            Query(
                "max by (broker_group, node_id) (rocketmq_ha_role{HERE})",
                "{{broker_group}} {{node_id}}",
            ),
            look=Look.STATES,
            alerts=("NoMaster",),
        ),
        panel(
            "Epoch",
            "Increases by one with each new master.",
            Query("max by (broker_set) (rocketmq_controller_group_epoch{HERE})", "{{broker_set}}"),
        ),
        panel(
            "Failovers",
            "Changes of the master, by reason. transfer: a planned change.",
            Query(
                "sum by (broker_group, reason) "
                "(increase(rocketmq_ha_failover_seconds_count{HERE}[RATE]))",
                "{{broker_group}} {{reason}}",
            ),
            look=Look.STACKED,
        ),
        panel(
            "Time without a master",
            "Seconds from the loss of a master to the first commit of the next master.",
            *quantiles("rocketmq_ha_failover_seconds", by="reason", legend="{{reason}}"),
            unit="s",
        ),
        panel(
            "Time without a master, distribution",
            "Distribution over all reasons.",
            heatmap("rocketmq_ha_failover_seconds"),
            unit="s",
            look=Look.HEATMAP,
        ),
        panel(
            "Needs an operator",
            "1 if the broker group has no working master, or the controller cannot write the group record. `tidemill replica list` prints the reason.",
            Query("max by (broker_set) (rocketmq_controller_group_alarm{HERE})", "{{broker_set}}"),
            look=Look.STATES,
            alerts=("ReplicasNeedOperator",),
        ),
    ),
)

_REPLICAS = Row(
    "Replicas",
    (
        panel(
            "In sync",
            "Replicas that have all acknowledged messages, and the expected number of replicas.",
            Query(
                "min by (broker_set) (rocketmq_controller_in_sync_replicas{HERE})",
                "{{broker_set}} in sync",
            ),
            Query(
                "max by (broker_set) (rocketmq_controller_registered_replicas{HERE})",
                "{{broker_set}} expected",
            ),
            alerts=("InSyncSetShrunk",),
        ),
        panel(
            "Full disks",
            "Replicas whose disk is full. They cannot be master: a full master hands over to a replica with room.",
            Query(
                "max by (broker_set) (rocketmq_controller_full_replicas{HERE})", "{{broker_set}}"
            ),
            alerts=("ReplicaDiskFull",),
        ),
        panel(
            "Active",
            "Registered replicas that send heartbeats and have a running event loop.",
            Query(
                "max by (broker_set) (rocketmq_controller_active_broker_number{HERE})",
                "{{broker_set}}",
            ),
        ),
        panel(
            "Diverged",
            "Replicas with a log that differs from the log of the master and may not be cut. They follow no master until an operator decides.",
            Query(
                "max by (broker_set) (rocketmq_controller_diverged_replicas{HERE})",
                "{{broker_set}}",
            ),
            alerts=("ReplicaDiverged",),
        ),
        panel(
            "Partitioned",
            "Pairs of replicas that both send heartbeats to the controllers, but do not hear each other. The network between them fails in at least one direction.",
            Query(
                "max by (broker_set) (rocketmq_controller_unheard_replicas{HERE})", "{{broker_set}}"
            ),
            alerts=("ReplicasPartitioned",),
        ),
        panel(
            "Behind, bytes",
            "Bytes of the master's log that each replica has not acknowledged, reported by the master.",
            Query(
                "max by (node_id, replica) (rocketmq_ha_replica_behind_bytes{HERE})",
                "{{replica}}, reported by {{node_id}}",
            ),
            unit="bytes",
        ),
        panel(
            "Behind, seconds",
            "Seconds since each replica had acknowledged the complete log.",
            Query(
                "max by (node_id, replica) (rocketmq_ha_replica_behind_seconds{HERE})",
                "{{replica}}, reported by {{node_id}}",
            ),
            unit="s",
        ),
        panel(
            "Not confirmed",
            "Bytes at the end of the log that the replica does not know to be confirmed. Sends wait for these bytes at the master.",
            Query(
                "max by (broker_group, node_id) "
                "(rocketmq_ha_max_offset{HERE} - rocketmq_ha_confirm_offset{HERE})",
                "{{broker_group}} {{node_id}}",
            ),
            unit="bytes",
        ),
        panel(
            "Confirmed",
            "Confirmed bytes of the log per second, reported by each replica.",
            Query(
                "max by (broker_group, node_id) (deriv(rocketmq_ha_confirm_offset{HERE}[RATE]))",
                "{{broker_group}} {{node_id}}",
            ),
            unit="Bps",
        ),
        panel(
            "Sent to replicas",
            "Bytes of the log sent per second.",
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
            "3: this controller is the leader. 2: it is a deputy.",
            Query("max by (node_id) (rocketmq_controller_role{HERE})", "{{node_id}}"),
            look=Look.STATES,
            alerts=("ControllerNoLeader",),
        ),
        panel(
            "Elections",
            "Elections per second, by result.",
            Query(
                "sum by (broker_set, election_result) "
                "(rate(rocketmq_controller_election_total{HERE}[RATE]))",
                "{{broker_set}} {{election_result}}",
            ),
        ),
        panel(
            "Requests",
            "Requests per second from replicas, proxies and operators.",
            Query(
                "sum by (request_type) (rate(rocketmq_controller_request_total{HERE}[RATE]))",
                "{{request_type}}",
            ),
            unit="reqps",
            look=Look.STACKED,
        ),
        panel(
            "Failed requests",
            "Requests that were rejected or timed out. A late proposal is rejected and repeated.",
            Query(
                "sum by (request_type, request_handle_status) "
                '(rate(rocketmq_controller_request_total{HERE, request_handle_status!="success"}[RATE]))',
                "{{request_type}} {{request_handle_status}}",
            ),
            unit="reqps",
        ),
        panel(
            "Request P99",
            "Microseconds from a request to its reply.",
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
            "Calls per second to the store of group records, by result.",
            Query(
                "sum by (operation, operation_status) "
                "(rate(rocketmq_controller_log_op_total{HERE}[RATE]))",
                "{{operation}} {{operation_status}}",
            ),
            unit="ops",
        ),
        panel(
            "Store P99",
            "Microseconds per call to the store.",
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
    description="Masters of the broker groups, lag of replicas, and duration of failovers.",
    rows=(_MASTERS, _REPLICAS, _CONTROLLERS),
)
