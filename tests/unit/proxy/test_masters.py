"""The address that a link dials, by views of controllers, answers of replicas and failures."""

from __future__ import annotations

from zlib import crc32

from tests.support.worlds.replica_records import record_of_three
from tidemill.common.replica_group import ReplicaId, ReplicationView
from tidemill.controller.election.record import view_of
from tidemill.transport.routes.masters import LATE_MAX, UNKNOWN, Masters, UnreachableMaster
from tidemill.transport.routes.route_file import from_text, to_text

GROUP = "broker-0"
A, B, C = (f"10.0.0.{n}:10911" for n in range(3))


def view(*, master: int | None = 0, version: int = 7) -> ReplicationView:
    record = record_of_three(version=version)
    one = None if master is None else record.find_member(ReplicaId(master))
    return view_of(record._replace(master=one))


def test_an_unknown_broker_group_is_dialled_at_its_address() -> None:
    masters = Masters()
    assert masters.dial(A) == A
    masters.note_failure(A, A)
    assert masters.dial(A) == A


def test_a_link_to_any_replica_dials_the_master() -> None:
    masters = Masters()
    assert masters.dial(B) == B
    assert masters.learn(GROUP, view()) == [B]
    assert [masters.dial(each) for each in (A, B, C)] == [A, A, A]
    assert masters.dial("elsewhere:1") == "elsewhere:1"


def test_a_route_of_a_lower_version_is_ignored() -> None:
    masters = Masters()
    masters.learn(GROUP, view(master=1, version=9))
    assert masters.learn(GROUP, view(master=0, version=8)) == []
    assert masters.dial(A) == B


def test_a_broker_group_that_is_created_again_is_a_new_one() -> None:
    masters = Masters()
    masters.learn(GROUP, view(master=1, version=9)._replace(epoch=4))
    assert not masters.accept_master(A, A, epoch=1)
    masters.forget(GROUP)
    assert masters.routes == {}
    assert masters.accept_master(A, A, epoch=1)
    masters.learn(GROUP, view(master=2, version=2)._replace(epoch=2))
    assert masters.dial(A) == C
    masters.forget("broker-7")


def test_the_master_named_by_a_replica_is_dialled() -> None:
    masters = Masters()
    assert masters.dial(A) == A
    masters.note_rejection(A, A, version=4, master=C)
    assert masters.dial(A) == C
    # A replica with an older version changes nothing.
    masters.note_rejection(A, B, version=3, master=B)
    assert masters.dial(A) == C


def test_all_replicas_are_dialled_if_the_master_does_not_serve() -> None:
    masters = Masters()
    masters.learn(GROUP, view())
    assert masters.dial(A) == A
    masters.note_failure(A, A)
    asked = {masters.dial(A) for _ in range(3)}
    assert asked == {A, B, C}
    masters.accept_master(A, B)
    assert masters.dial(A) == B


def test_a_master_that_denies_its_role_is_doubtful() -> None:
    masters = Masters()
    masters.learn(GROUP, view())
    masters.dial(A)
    masters.note_rejection(A, A, version=7, master=A)
    assert {masters.dial(A) for _ in range(3)} == {A, B, C}


def test_an_election_ends_doubt_and_is_reported_once() -> None:
    masters = Masters()
    masters.learn(GROUP, view())
    masters.dial(A)
    masters.note_failure(A, A)
    assert masters.learn(GROUP, view(master=2, version=8)) == [A]
    assert masters.dial(A) == C
    assert masters.learn(GROUP, view(master=2, version=9)) == []


def test_a_former_address_of_a_replica_leads_to_its_broker_group() -> None:
    masters = Masters()
    masters.update_route(GROUP, 1, A, [A, B])
    masters.update_route(GROUP, 2, C, [C, B])
    assert masters.dial(A) == C


def test_a_name_leads_to_the_master_of_an_address_that_no_replica_has() -> None:
    masters = Masters()
    masters.bind("old:1", GROUP)
    assert masters.dial("old:1") == "old:1"
    assert masters.learn(GROUP, view(master=1)) == ["old:1"]
    assert masters.dial("old:1") == B
    masters.bind("older:1", GROUP)
    assert masters.dial("older:1") == B
    masters.unbind("old:1")
    assert masters.dial("old:1") == "old:1"


def test_saved_routes_serve_a_start_without_controllers() -> None:
    masters, later = Masters(), Masters()
    masters.learn(GROUP, view(master=1))
    later.load(from_text("one", to_text("one", masters.routes)))
    assert later.dial(A) == B


def test_any_source_replaces_saved_routes() -> None:
    kept = Masters()
    kept.learn(GROUP, view(master=2, version=900))
    # The records of the controllers were lost, or the file is of another cluster.
    by_controller, by_replica = Masters(), Masters()
    for masters in (by_controller, by_replica):
        masters.load(kept.routes)
        assert masters.dial(A) == C
    assert by_controller.learn(GROUP, view(master=1, version=3)) == [A]
    assert by_controller.dial(A) == B
    by_replica.note_rejection(A, C, version=0, master=B)
    assert by_replica.dial(A) == B


def test_invalid_and_foreign_routes_are_ignored() -> None:
    masters = Masters()
    masters.learn(GROUP, view())
    text = to_text("one", masters.routes)
    # Without epochs: if records were lost since, no master could reach them.
    kept = {name: route._replace(epoch=0) for name, route in masters.routes.items()}
    assert from_text("one", text) == kept
    assert from_text("other", text) == {}
    for line in ("", "[]", "7", '{"cluster": "one"}', '{"cluster": "one", "groups": [1]}'):
        assert from_text("one", f"{line}\n{crc32(line.encode())}\n") == {}


def test_routes_with_a_changed_or_missing_character_are_ignored() -> None:
    masters = Masters()
    masters.learn(GROUP, view())
    text = to_text("one", masters.routes)
    for at in range(len(text) - 1):  # the last one is the end of the line
        changed = chr(ord(text[at]) ^ 1)
        assert from_text("one", text[:at] + changed + text[at + 1 :]) == {}
        assert from_text("one", text[:at]) == {}


def test_an_unreachable_master_is_reported_with_the_replicas_that_answer() -> None:
    masters = Masters()
    masters.learn(GROUP, view())
    assert masters.dial(A) == A
    masters.note_failure(A, A)
    assert masters.unreachable() == {GROUP: UnreachableMaster(A, frozenset())}
    masters.note_rejection(A, B, version=7, master=A)
    masters.note_failure(A, B)
    assert masters.unreachable() == {GROUP: UnreachableMaster(A, frozenset({B}))}
    masters.note_failure(A, A)
    assert masters.unreachable() == {GROUP: UnreachableMaster(A, frozenset({B}))}, "A is still lost"
    masters.accept_master(A, A)
    assert masters.unreachable() == {}


def test_a_replaced_master_is_not_reported() -> None:
    masters = Masters()
    masters.learn(GROUP, view())
    masters.dial(A)
    masters.note_failure(A, A)
    masters.learn(GROUP, view(master=1, version=8))
    assert masters.unreachable() == {}
    masters.dial(B)
    # The replica answers, so the network is intact, whichever replica is the master.
    masters.note_rejection(B, B, version=8, master=B)
    masters.note_failure(B, B)
    assert masters.unreachable() == {}


def test_a_silent_master_is_reported_and_still_dialled() -> None:
    masters = Masters()
    masters.learn(GROUP, view())
    assert masters.dial(A) == A
    assert masters.unprobed(A) == []
    masters.note_silence(A, A)
    assert masters.unreachable() == {GROUP: UnreachableMaster(A, frozenset())}
    assert masters.unprobed(A) == [B, C]
    masters.note_answer(A, B)
    assert masters.unprobed(A) == [C]
    assert masters.unreachable() == {GROUP: UnreachableMaster(A, frozenset({B}))}
    assert masters.dial(A) == A, "A is still the master"
    masters.note_recovery(A, A)
    assert masters.unreachable() == {}
    masters.note_answer(A, C)
    masters.note_silence(A, B)
    assert masters.unreachable() == {}, "another replica may be silent"
    masters.note_silence(A, A)
    assert masters.unreachable() == {GROUP: UnreachableMaster(A, frozenset())}, (
        "what answered before is old"
    )


def test_a_new_master_may_learn_late_of_its_election() -> None:
    """The link dials it again for a while, and accepts no former master instead."""
    masters = Masters()
    masters.learn(GROUP, view(master=0, version=8))
    assert masters.dial(A) == A
    assert masters.learn(GROUP, view(master=1, version=9)) == [A]
    for _ in range(LATE_MAX):
        assert masters.dial(A) == B
        masters.note_rejection(A, B, version=8, master=A)
        masters.note_failure(A, B)
        assert masters.is_late(A)
    assert masters.dial(A) == B
    masters.note_rejection(A, B, version=8, master=A)
    masters.note_failure(A, B)
    assert not masters.is_late(A)
    assert {masters.dial(A) for _ in range(3)} == {A, B, C}, "it may never learn of its election"


def test_a_late_master_that_stops_answering_is_doubtful() -> None:
    masters = Masters()
    masters.learn(GROUP, view(master=0, version=8))
    assert masters.dial(A) == A
    masters.note_rejection(A, A, version=7, master=B)
    masters.note_failure(A, A)
    assert (masters.is_late(A), masters.master_of(A)) == (True, A)
    masters.note_failure(A, A)
    assert (masters.is_late(A), masters.master_of(A)) == (False, "")


def test_a_second_election_of_a_master_is_reported_once() -> None:
    masters = Masters()
    masters.learn(GROUP, view(version=7)._replace(epoch=3))
    assert masters.dial(A) == A
    assert masters.learn(GROUP, view(version=8)._replace(epoch=4)) == [A]
    assert masters.learn(GROUP, view(version=9)._replace(epoch=4)) == []


def test_a_former_master_is_not_accepted() -> None:
    masters = Masters()
    masters.learn(GROUP, view(master=1, version=9)._replace(epoch=4))
    masters.note_failure(A, B)
    assert masters.dial(A) != ""
    assert not masters.accept_master(A, A, epoch=3)
    assert masters.master_of(A) != A
    assert masters.accept_master(A, B, epoch=4)
    assert masters.dial(A) == B
    # A master of a later epoch is accepted before the view of a controller arrives.
    assert masters.accept_master(A, C, epoch=5)
    assert not masters.accept_master(A, B, epoch=4)
    assert masters.dial(A) == C


def test_a_master_that_answers_no_more_is_not_late() -> None:
    """A member's connection notes a rejection, and notes no failure with it."""
    masters = Masters()
    masters.learn(GROUP, view(master=0, version=8))
    assert masters.dial(A) == A
    masters.note_rejection(A, A, version=UNKNOWN, master="")
    assert masters.dial(A) == A
    masters.note_failure(A, A)
    assert not masters.is_late(A)
    assert masters.dial(A) != A
