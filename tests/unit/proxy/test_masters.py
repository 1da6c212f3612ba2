"""Whom a link dials, by what controllers and replicas say and what has failed."""

from __future__ import annotations

from tests.support.worlds.replica_records import record_of_three
from tidemill.common.replica_group import ReplicaId, ReplicationView
from tidemill.controller.election.record import view_of
from tidemill.proxy.link.masters import LATE_MAX, Masters, UnreachableMaster
from tidemill.proxy.link.route_file import from_text, to_text

GROUP = "broker-0"
A, B, C = (f"10.0.0.{n}:10911" for n in range(3))


def view(*, master: int | None = 0, version: int = 7) -> ReplicationView:
    record = record_of_three(version=version)
    one = None if master is None else record.find_member(ReplicaId(master))
    return view_of(record._replace(master=one))


def test_without_any_word_the_address_itself_is_dialled() -> None:
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


def test_a_route_of_a_lower_version_does_not_count() -> None:
    masters = Masters()
    masters.learn(GROUP, view(master=1, version=9))
    assert masters.learn(GROUP, view(master=0, version=8)) == []
    assert masters.dial(A) == B


def test_a_group_that_was_made_anew_is_another_one() -> None:
    masters = Masters()
    masters.learn(GROUP, view(master=1, version=9)._replace(epoch=4))
    assert not masters.accept_master(A, A, epoch=1)
    masters.forget(GROUP)
    assert masters.routes == {}
    assert masters.accept_master(A, A, epoch=1)
    masters.learn(GROUP, view(master=2, version=2)._replace(epoch=2))
    assert masters.dial(A) == C
    masters.forget("broker-7")


def test_a_replica_that_is_not_the_master_says_who_is() -> None:
    masters = Masters()
    assert masters.dial(A) == A
    masters.note_rejection(A, A, version=4, master=C)
    assert masters.dial(A) == C
    # What another says that knows less is nothing new.
    masters.note_rejection(A, B, version=3, master=B)
    assert masters.dial(A) == C


def test_a_master_that_does_not_serve_is_looked_for_at_all_replicas() -> None:
    masters = Masters()
    masters.learn(GROUP, view())
    assert masters.dial(A) == A
    masters.note_failure(A, A)
    asked = {masters.dial(A) for _ in range(3)}
    assert asked == {A, B, C}
    masters.accept_master(A, B)
    assert masters.dial(A) == B


def test_a_master_that_says_it_is_none_is_doubted() -> None:
    masters = Masters()
    masters.learn(GROUP, view())
    masters.dial(A)
    masters.note_rejection(A, A, version=7, master=A)
    assert {masters.dial(A) for _ in range(3)} == {A, B, C}


def test_an_election_ends_doubt_and_is_told_once() -> None:
    masters = Masters()
    masters.learn(GROUP, view())
    masters.dial(A)
    masters.note_failure(A, A)
    assert masters.learn(GROUP, view(master=2, version=8)) == [A]
    assert masters.dial(A) == C
    assert masters.learn(GROUP, view(master=2, version=9)) == []


def test_where_a_replica_has_been_still_means_its_group() -> None:
    masters = Masters()
    masters.update_route(GROUP, 1, A, [A, B])
    masters.update_route(GROUP, 2, C, [C, B])
    assert masters.dial(A) == C


def test_routes_are_kept_for_a_start_without_controllers() -> None:
    masters, later = Masters(), Masters()
    masters.learn(GROUP, view(master=1))
    later.load(from_text("one", to_text("one", masters.routes)))
    assert later.dial(A) == B


def test_what_an_earlier_run_has_kept_counts_until_anybody_says_otherwise() -> None:
    kept = Masters()
    kept.learn(GROUP, view(master=2, version=900))
    # The records of the controllers were lost, or it was another cluster's.
    by_controller, by_replica = Masters(), Masters()
    for masters in (by_controller, by_replica):
        masters.load(kept.routes)
        assert masters.dial(A) == C
    assert by_controller.learn(GROUP, view(master=1, version=3)) == [A]
    assert by_controller.dial(A) == B
    by_replica.note_rejection(A, C, version=0, master=B)
    assert by_replica.dial(A) == B


def test_routes_of_another_cluster_and_what_makes_no_sense_are_not_there() -> None:
    masters = Masters()
    masters.learn(GROUP, view())
    text = to_text("one", masters.routes)
    # Without epochs: where records were lost since, nobody would be believed.
    kept = {name: route._replace(epoch=0) for name, route in masters.routes.items()}
    assert from_text("one", text) == kept
    assert from_text("other", text) == {}
    for torn in (
        "",
        "[]",
        "7",
        text[:-9],
        '{"cluster": "one"}',
        '{"cluster": "one", "groups": [1]}',
    ):
        assert from_text("one", torn) == {}


def test_a_master_that_cannot_be_reached_is_told_of_with_who_has_answered() -> None:
    masters = Masters()
    masters.learn(GROUP, view())
    assert masters.dial(A) == A
    masters.note_failure(A, A)
    assert masters.unreachable() == {GROUP: UnreachableMaster(A, frozenset())}
    masters.note_rejection(A, B, version=7, master=A)
    masters.note_failure(A, B)
    assert masters.unreachable() == {GROUP: UnreachableMaster(A, frozenset({B}))}
    masters.note_failure(A, A)
    assert masters.unreachable() == {GROUP: UnreachableMaster(A, frozenset({B}))}, "it lasts"
    masters.accept_master(A, A)
    assert masters.unreachable() == {}


def test_a_master_that_is_replaced_or_says_so_itself_is_not_told_of() -> None:
    masters = Masters()
    masters.learn(GROUP, view())
    masters.dial(A)
    masters.note_failure(A, A)
    masters.learn(GROUP, view(master=1, version=8))
    assert masters.unreachable() == {}
    masters.dial(B)
    # It answers: whoever is the master, the way to it is there.
    masters.note_rejection(B, B, version=8, master=B)
    masters.note_failure(B, B)
    assert masters.unreachable() == {}


def test_a_master_that_is_silent_is_told_of_and_not_left() -> None:
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
    assert masters.dial(A) == A, "it is the master still"
    masters.note_recovery(A, A)
    assert masters.unreachable() == {}
    masters.note_answer(A, C)
    masters.note_silence(A, B)
    assert masters.unreachable() == {}, "who is not the master may be silent"
    masters.note_silence(A, A)
    assert masters.unreachable() == {GROUP: UnreachableMaster(A, frozenset())}, (
        "what answered before is old"
    )


def test_a_master_that_was_just_elected_may_not_know_it_yet() -> None:
    """It is asked again, for a while, and nobody who was the master before is believed instead."""
    masters = Masters()
    masters.learn(GROUP, view(master=0, version=8))
    assert masters.dial(A) == A
    assert masters.learn(GROUP, view(master=1, version=9)) == [A]
    for _ in range(LATE_MAX):
        assert masters.dial(A) == B
        masters.note_rejection(A, B, version=8, master=A)
    assert masters.dial(A) == B
    masters.note_rejection(A, B, version=8, master=A)
    assert {masters.dial(A) for _ in range(3)} == {A, B, C}, "it may be that it never hears of it"


def test_who_was_deposed_and_has_not_heard_of_it_is_not_believed() -> None:
    masters = Masters()
    masters.learn(GROUP, view(master=1, version=9)._replace(epoch=4))
    masters.note_failure(A, B)
    assert masters.dial(A) != ""
    assert not masters.accept_master(A, A, epoch=3)
    assert masters.master_of(A) != A
    assert masters.accept_master(A, B, epoch=4)
    assert masters.dial(A) == B
    # One that was elected since is believed before a controller says so.
    assert masters.accept_master(A, C, epoch=5)
    assert not masters.accept_master(A, B, epoch=4)
    assert masters.dial(A) == C
