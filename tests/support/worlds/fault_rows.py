"""The tests for each row of the replication fault matrix.

A test has its module, its name, and the parameter of its row if it has several. A test on a cluster
has the name of its fault in `tests/chaos/faults.py`. `MISSING` lists rows without a suitable means.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Row(NamedTuple):
    """One row: the fault with its tests."""

    fault: str
    tests: tuple[str, ...]
    on_cluster: tuple[str, ...] = ()


_CLIENTS = "tests/e2e/test_clients_through_failovers.py::"
_CONTROLLERS = "tests/e2e/test_failover_by_controllers.py::"
_STANDALONE = (
    "tests/e2e/test_standalone_replicas.py::test_no_promise_is_broken_by_a_fault_of_replicas"
)
_PARTITIONS = "tests/e2e/test_partitions.py::"
_KILLED = "tests/e2e/test_killed_replicas.py::"
_REPLICAS = "tests/e2e/test_replicas.py::"
_ON_DISK = "tests/unit/engine/test_replica_files.py::"
_LOG = "tests/unit/engine/test_replica_engine.py::"
_CLAIMS = "tests/unit/engine/test_start_verdicts.py::"
_ELECTION = "tests/unit/controller/test_election.py::"
_MACHINES = "tests/unit/engine/replication/test_machines.py::"
_GROUP = "tests/component/controller/test_group.py::"
_SIMULATED = "tests/property/test_replica_simulation.py::"
_SIMULATION = _SIMULATED + "test_no_reply_is_taken_back"
_SLOW = _SIMULATED + "test_a_replica_with_a_slow_or_full_disk_is_removed_and_comes_back"

ROWS: Final[dict[int, Row]] = {
    1: Row(
        "the master's pod is deleted",
        (
            _CONTROLLERS + "test_a_master_that_is_stopped_hands_over_first",
            _CLIENTS + "test_a_planned_transfer_causes_no_client_errors",
            _STANDALONE + "[master moved]",
        ),
        ("master-deleted",),
    ),
    2: Row(
        "the master's broker is killed",
        (
            _CLIENTS + "test_masters_that_are_killed_under_load_take_nothing_with_them",
            _STANDALONE + "[broker of the master killed]",
        ),
        ("broker-killed",),
    ),
    3: Row("the master's pod is killed", (_STANDALONE + "[master killed]",), ("broker-killed",)),
    4: Row("a replica is killed", (_STANDALONE + "[replica killed]",)),
    5: Row(
        "two of three are killed",
        (_KILLED + "test_one_of_three_replicas_confirms_nothing_until_another_returns",),
    ),
    6: Row(
        "all are killed",
        (_KILLED + "test_all_that_were_killed_elect_one_of_them_without_an_operator", _SIMULATION),
    ),
    7: Row("power loss of all, sync-fsync", (_SIMULATION,)),
    8: Row(
        "power loss of all, sync-memory",
        (_ELECTION + "test_the_longest_suspect_is_elected_when_all_suspects_are_live", _SIMULATION),
    ),
    9: Row(
        "power loss of one in sync-memory, then the master dies",
        (_ELECTION + "test_a_run_that_may_lack_messages_leaves_both_sets", _SIMULATION),
    ),
    10: Row(
        "the master stands still, and goes on",
        (
            _STANDALONE + "[broker of the master frozen]",
            _STANDALONE + "[master frozen]",
            _REPLICAS + "test_a_master_that_was_frozen_steps_down_and_follows",
        ),
        ("broker-frozen",),
    ),
    11: Row(
        "a replica stands still",
        (_KILLED + "test_a_replica_that_stands_still_leaves_the_set_and_comes_back",),
    ),
    12: Row(
        "the leading controller stands still",
        (_PARTITIONS + "test_a_leading_controller_that_stands_still_is_followed_by_another",),
    ),
    13: Row(
        "no replica reaches the master, and controllers hear all",
        (_PARTITIONS + "test_a_master_that_no_replica_reaches_gives_way", _SIMULATION),
    ),
    14: Row(
        "controllers do not hear the master",
        (_PARTITIONS + "test_a_master_unreachable_for_controllers_keeps_its_role",),
    ),
    15: Row(
        "the master is cut off from all",
        (_PARTITIONS + "test_a_master_that_is_cut_off_from_all_is_replaced_and_cuts_its_tail",),
        ("node-cut",),
    ),
    16: Row(
        "controllers do not hear a replica",
        (_PARTITIONS + "test_a_replica_unreachable_for_controllers_acks_and_is_not_elected",),
    ),
    17: Row(
        "a proxy does not reach the master",
        (
            (_PARTITIONS + "test_a_master_that_proxies_do_not_reach_hands_over_when_they_are_most"),
            (
                "tests/unit/controller/test_reports.py::"
                "test_a_master_that_proxies_cannot_reach_is_asked_to_hand_over"
            ),
            (
                "tests/unit/proxy/test_masters.py::"
                "test_an_unreachable_master_is_reported_with_the_replicas_that_answer"
            ),
        ),
    ),
    18: Row(
        "nothing passes in one direction",
        (_PARTITIONS + "test_a_link_cut_in_one_direction_causes_a_failover", _SIMULATION),
    ),
    19: Row(
        "a slow network, and connections that are reset",
        (_PARTITIONS + "test_a_slow_network_causes_no_election",),
    ),
    20: Row(
        "a slow disk at the master",
        (
            (
                "tests/unit/broker/test_sync_pace.py::"
                "test_a_disk_without_a_fast_sync_for_five_seconds_is_slow"
            ),
            _ELECTION + "test_a_slow_master_is_asked_to_hand_over_to_a_fast_replica",
            _SLOW,
        ),
    ),
    21: Row("a slow disk at a replica", (_SLOW, _SIMULATION)),
    22: Row(
        "a full disk",
        (
            "tests/e2e/test_full_disks.py",
            _ELECTION + "test_a_full_master_is_asked_to_hand_over_to_a_replica_with_room",
            "tests/property/test_full_disk.py",
            _LOG + "test_a_full_replica_deletes_the_segments_that_its_master_deleted",
        ),
        ("volume-full",),
    ),
    23: Row(
        "a write or a sync fails",
        (
            "tests/e2e/test_failing_disks.py::test_a_replica_with_a_failed_disk_is_replaced",
            "tests/property/test_crash_upon_crash.py",
        ),
    ),
    24: Row(
        "a torn tail",
        (
            _ON_DISK + "test_a_torn_tail_of_the_masters_records_is_cut_and_not_damage",
            _CLAIMS + "test_a_broken_last_record_without_a_power_cut_is_doubtful",
        ),
    ),
    25: Row(
        "a bit flips in confirmed records",
        (
            "tests/unit/engine/test_mending.py",
            "tests/e2e/test_mended_logs.py",
            "tests/property/test_replica_simulation.py::test_a_flipped_bit_is_mended",
        ),
    ),
    26: Row(
        "a segment, or the state of a replica, is missing or damaged",
        (
            _ON_DISK + "test_a_replica_with_a_missing_log_does_not_start_as_a_new_one",
            _ON_DISK + "test_a_store_with_a_damaged_state_does_not_open",
        ),
    ),
    27: Row(
        "an empty volume in the place of one",
        (_REPLICAS + "test_a_replica_whose_volume_is_empty_is_copied", _SIMULATION),
        ("claim-deleted",),
    ),
    28: Row(
        "two processes with one identity",
        (
            (
                "tests/unit/broker/test_data_dir.py::"
                "test_a_data_directory_in_use_is_rejected_at_once"
            ),
            (
                "tests/component/controller/test_sessions.py::"
                "test_a_replaced_run_is_fenced_at_its_next_heartbeat"
            ),
        ),
    ),
    29: Row(
        "clocks jump", ("tests/e2e/test_jumping_clocks.py", "tests/unit/engine/test_clocks.py")
    ),
    32: Row(
        "the API server is slow, or refuses",
        (
            (
                "tests/component/controller/test_kubernetes_store.py::"
                "test_a_failed_write_is_unknown_only_after_a_server_error"
            ),
            _GROUP + "test_a_failed_store_raises_an_alarm_until_the_election_is_done",
            _SIMULATION,
        ),
        ("api-server-away",),
    ),
    33: Row(
        "a write succeeds and its answer is lost",
        (_GROUP + "test_an_election_with_a_lost_answer_is_found_by_its_id", _SIMULATION),
    ),
    34: Row(
        "a record restored from a backup",
        (
            _ELECTION + "test_no_decision_is_made_from_a_record_older_than_the_replicas",
            _MACHINES + "test_a_view_with_an_epoch_below_the_seen_one_is_ignored",
        ),
    ),
    35: Row(
        "two controllers elect at once",
        (
            _GROUP + "test_two_concurrent_elections_make_one_epoch",
            (
                "tests/property/test_replication_exploration.py::"
                "test_the_smallest_scope_has_no_violation"
            ),
        ),
    ),
    36: Row(
        "an old word arrives late",
        (
            "tests/unit/proxy/test_masters.py::test_a_route_of_a_lower_version_is_ignored",
            _MACHINES + "test_a_welcome_of_an_ended_epoch_is_ignored",
        ),
    ),
    37: Row(
        "failovers upon failovers",
        (
            (
                "tests/property/test_replicated_engines.py::"
                "test_failovers_lose_no_message_and_deliver_none_again"
            ),
            "tests/property/test_replication_exploration.py::test_long_walks_have_no_violation",
            _SIMULATION,
        ),
    ),
    38: Row(
        "epochs without a record",
        (
            (
                "tests/unit/engine/replication/test_epoch_journal.py::"
                "test_an_epoch_without_a_record_is_replaced_by_the_next"
            ),
        ),
    ),
    39: Row(
        "a crash at each step of a cut", (_ON_DISK + "test_a_cut_is_complete_or_has_not_begun",)
    ),
    40: Row(
        "an upgrade under load",
        (
            (
                "tests/component/controller/test_kubernetes_scale.py::"
                "test_an_upgrade_goes_from_pod_to_pod_and_moves_the_master"
            ),
        ),
        ("broker-rolled",),
    ),
    41: Row(
        "more replicas, and fewer",
        (
            "tests/unit/controller/test_pods.py::test_a_group_gets_more_and_fewer_replicas",
            _SIMULATION,
        ),
    ),
    42: Row("a node is drained", (), ("node-drained", "master-drained")),
    43: Row(
        "all proxies, and controllers, start again",
        (
            _CONTROLLERS + "test_replicas_serve_without_controllers_and_register_with_the_next_one",
            _STANDALONE + "[controller killed]",
        ),
        ("proxies-rolled",),
    ),
    44: Row(
        "the master's event loop stands still",
        (
            _CONTROLLERS + "test_a_frozen_master_is_replaced_although_its_supervisor_reports",
            _STANDALONE + "[broker of the master frozen]",
        ),
    ),
    45: Row(
        "retention has left a replica behind",
        ("tests/e2e/test_seeded_replicas.py::test_a_replica_behind_retention_catches_up",),
    ),
}

# Missing means of the matrix for rows that have a test. Rows 30 and 31 have no test.
MISSING: Final[dict[int, str]] = {
    20: "no process with a disk that takes seconds: the simulation has one",
    21: "no process with a disk that takes seconds: the simulation has one",
    30: "a clock that runs faster changes nothing in sync modes, and there is no other mode",
    31: "on a cluster alone (api-server-away)",
    42: "on a cluster alone",
}
