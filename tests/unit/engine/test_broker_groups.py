"""The home's list of broker groups, and how a follower applies the home's configuration."""

from __future__ import annotations

import pytest

from tests.support.worlds.dedup_world import WINDOW_MS, DedupWorld
from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tests.support.worlds.transaction_world import TransactionWorld
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.metadata.catalog import ConsumerGroup, TopicType
from tidemill.broker.engine.metadata.membership import Home, redistribute
from tidemill.broker.engine.queries.removal_check import ITEMS_MAX, Readers, RemovalBacklog
from tidemill.broker.server.members.home_service import _not_empty
from tidemill.common.errors import BadRequest, Conflict, Forbidden, GroupDraining
from tidemill.message.broker_names import natural_order

ADDRESSES = {"broker-0": "h0:1", "broker-1": "h1:1", "broker-2": "h2:1"}
HOME = Home(cluster_id="c", name="home", address="h:1")


def founded() -> World:
    world = World()
    world.engine.broker_groups.found(ADDRESSES, world.now_ms)
    world.commit()
    return world


def following() -> World:
    world = World()
    world.engine.following.accept_home(HOME, may_join=True, is_complete=True, now_ms=world.now_ms)
    return world


def send_configuration(follower: World, home: World) -> None:
    """Send all of the home's configuration to a follower."""
    catalog, following = home.engine.catalog, follower.engine.following
    deleted_topics, deleted_groups = following.find_deleted(catalog.topics, catalog.groups)
    for _ in following.follow(
        [topic for topic in catalog.topics.values() if not topic.is_system],
        list(catalog.groups.values()),
        deleted_topic_ids=deleted_topics,
        deleted_group_ids=deleted_groups,
        now_ms=follower.now_ms,
    ):
        pass
    follower.commit()


# ---------------------------------------------------------------- the home


def test_the_list_of_broker_groups_survives_a_restart() -> None:
    world = founded()
    world.engine.broker_groups.drain("broker-2", world.now_ms)
    world.commit()
    world.restart()
    groups = world.engine.catalog.membership
    assert groups.home is not None
    assert groups.home.name == "broker-0"
    assert [(g.name, g.address, g.state) for g in groups.in_order()] == [
        ("broker-0", "h0:1", "active"),
        ("broker-1", "h1:1", "active"),
        ("broker-2", "h2:1", "draining"),
    ]


def test_a_second_founding_changes_nothing() -> None:
    world = founded()
    end = world.engine.log.log_end
    world.engine.broker_groups.found(ADDRESSES, world.now_ms)
    assert world.engine.log.log_end == end


def test_a_disconnected_member_may_register_with_another_address() -> None:
    world = founded()
    world.engine.broker_groups.connected.add("broker-1")
    moved = {"broker-0": "h0:2", "broker-1": "h1:2", "broker-2": "h2:2"}
    world.engine.broker_groups.found(moved, world.now_ms)
    groups = world.engine.catalog.membership
    assert [g.address for g in groups.in_order()] == ["h0:2", "h1:1", "h2:2"]
    assert groups.home is not None
    assert groups.home.address == "h0:2"


def test_a_follower_cannot_become_the_home_of_others() -> None:
    with pytest.raises(Conflict, match="follows home"):
        following().engine.broker_groups.found(ADDRESSES, 0)
    with pytest.raises(BadRequest, match="not among"):
        World().engine.broker_groups.found({"broker-9": "h9:1"}, 0)


def test_a_loopback_address_does_not_replace_a_public_one() -> None:
    world = founded()
    end = world.engine.log.log_end
    for host in ("localhost", "127.0.0.1", "[::1]"):
        near = {name: f"{host}:{n}" for n, name in enumerate(ADDRESSES, 1)}
        world.engine.broker_groups.found(near, world.now_ms)
    assert world.engine.log.log_end == end


def test_a_broker_on_the_same_machine_may_change_its_port() -> None:
    world = World()
    world.engine.broker_groups.found({"broker-0": "127.0.0.1:1"}, world.now_ms)
    world.engine.broker_groups.found({"broker-0": "127.0.0.1:2"}, world.now_ms)
    (group,) = world.engine.catalog.membership.in_order()
    assert group.address == "127.0.0.1:2"
    world.engine.broker_groups.found({"broker-0": "h0:2"}, world.now_ms)
    (group,) = world.engine.catalog.membership.in_order()
    assert group.address == "h0:2"


def test_an_invalid_address_is_rejected() -> None:
    world = founded()
    end = world.engine.log.log_end
    for address in ("x" * 64 + ":1", "..:1", "h9:99999"):
        with pytest.raises(BadRequest, match="of '"):
            world.engine.broker_groups.add("broker-9", address, world.now_ms)
        moved = {**ADDRESSES, "broker-2": address}
        with pytest.raises(BadRequest, match="of '"):
            world.engine.broker_groups.found(moved, world.now_ms)
    assert world.engine.log.log_end == end


def test_a_new_topic_has_placements_in_all_active_groups() -> None:
    world = founded()
    world.engine.broker_groups.drain("broker-1", world.now_ms)
    topic = world.engine.administration.put_topic(
        "t", type_=TopicType.FIFO, queues=3, now_ms=world.now_ms
    )
    assert topic.placements == (("broker-0", 3), ("broker-2", 3))
    world.commit()
    world.restart()
    assert world.engine.catalog.find_topic("t") == topic


def test_placements_are_recomputed_when_a_normal_topic_gets_more_queues() -> None:
    world = founded()
    put = world.engine.administration.put_topic
    put("t", type_=TopicType.NORMAL, queues=1, now_ms=world.now_ms)
    grown = put("t", type_=None, queues=4, now_ms=world.now_ms)
    assert grown.placements == (("broker-0", 4), ("broker-1", 4), ("broker-2", 4))


def test_the_home_cannot_be_drained() -> None:
    world = founded()
    with pytest.raises(Conflict, match="cannot be drained or removed"):
        world.engine.broker_groups.drain("broker-0", world.now_ms)
    with pytest.raises(Conflict, match="cannot be drained or removed"):
        world.engine.broker_groups.find_removable("broker-0")


def test_only_a_draining_group_is_removed_and_its_placements_go_to_the_others() -> None:
    world = founded()
    put, groups = world.engine.administration.put_topic, world.engine.broker_groups
    put("t", type_=TopicType.FIFO, queues=3, now_ms=world.now_ms)
    with pytest.raises(Conflict, match="drain it first"):
        groups.find_removable("broker-1")
    groups.drain("broker-1", world.now_ms)
    for _ in groups.remove("broker-1", world.now_ms):
        pass
    world.commit()
    world.restart()
    topic = world.engine.catalog.find_topic("t")
    assert topic is not None
    assert topic.placements == (("broker-0", 3), ("broker-0", 2), ("broker-2", 1), ("broker-2", 3))
    assert list(world.engine.catalog.membership.groups) == ["broker-0", "broker-2"]


def test_only_the_placements_of_the_removed_group_move() -> None:
    before = (("a", 4), ("b", 4), ("c", 4))
    after = redistribute(before, "b", ["a", "c"])

    def spread(placements: tuple[tuple[str, int], ...]) -> list[str]:
        return [name for name, queues in placements for _ in range(queues)]

    assert len(spread(after)) == len(spread(before))
    for was, now in zip(spread(before), spread(after), strict=True):
        assert now == was or was == "b"
    assert "b" not in spread(after)


def test_broker_groups_are_in_natural_order() -> None:
    names = ["b-10", "b-2", "a", "b", "b-1"]
    assert sorted(names, key=natural_order) == ["a", "b", "b-1", "b-2", "b-10"]


def test_a_single_broker_explains_how_to_add_broker_groups() -> None:
    with pytest.raises(Conflict, match="setting brokers"):
        World().engine.broker_groups.add("broker-1", "h1:1", 0)


def test_a_single_broker_that_added_itself_can_add_others() -> None:
    world = World()
    groups = world.engine.broker_groups
    name = world.engine.catalog.broker_name
    assert groups.add(name, "h0:1", world.now_ms).address == "h0:1"
    assert groups.is_home
    groups.add("broker-1", "h1:1", world.now_ms)
    world.commit()
    world.restart()
    assert [group.name for group in world.engine.catalog.membership.in_order()] == [
        name,
        "broker-1",
    ]


def test_the_members_are_stated_again_before_retention_removes_their_records() -> None:
    world = founded()
    world.topic()
    while len(world.engine.log.segments) < 3:
        world.send("x" * 1_000)
    world.checkpoint()
    world.retire()
    world.commit()
    world.restart()
    assert list(world.engine.catalog.membership.groups) == list(ADDRESSES)
    assert world.engine.broker_groups.is_home


# ---------------------------------------------------------------- a follower


def test_a_follower_has_the_homes_topics_under_its_own_ids() -> None:
    home, follower = founded(), following()
    home.engine.administration.put_topic("other", type_=None, queues=2, now_ms=0)
    home.group()
    home.topic()
    send_configuration(follower, home)
    follower.commit()
    follower.restart()
    own, homes = follower.engine.catalog, home.engine.catalog
    for name in (TOPIC, "other"):
        mine, theirs = own.find_topic(name), homes.find_topic(name)
        assert mine is not None
        assert theirs is not None
        assert mine.home_id == theirs.id
        assert mine.placements == theirs.placements
    group = own.find_group(GROUP)
    assert group is not None
    assert group.home_id == homes.group_ids[GROUP]
    assert own.membership.home == HOME


def test_a_repeated_configuration_records_nothing() -> None:
    home, follower = founded(), following()
    home.topic()
    send_configuration(follower, home)
    end = follower.engine.log.log_end
    send_configuration(follower, home)
    assert follower.engine.log.log_end == end


def test_a_topic_that_was_created_again_is_a_different_topic() -> None:
    home, follower = founded(), following()
    home.topic()
    send_configuration(follower, home)
    follower.send("of before")
    before = follower.engine.catalog.topic_ids[TOPIC]
    home.engine.administration.delete_topic(TOPIC, home.now_ms)
    home.engine.administration.put_topic(TOPIC, type_=None, queues=1, now_ms=home.now_ms)
    send_configuration(follower, home)
    after = follower.engine.catalog.find_topic(TOPIC)
    assert after is not None
    assert after.id != before
    assert after.home_id == home.engine.catalog.topic_ids[TOPIC]
    assert follower.engine.inspection.use_of(after).message_count == 0


def test_a_returning_follower_deletes_removed_topics() -> None:
    home, follower = founded(), following()
    home.topic()
    home.group()
    send_configuration(follower, home)
    home.engine.administration.delete_topic(TOPIC, home.now_ms)
    home.engine.administration.delete_group(GROUP, home.now_ms)
    send_configuration(follower, home)
    assert follower.engine.catalog.find_topic(TOPIC) is None
    assert follower.engine.catalog.find_group(GROUP) is None
    assert not follower.engine.catalog.topic_ids_at_home


def test_a_follower_rejects_changes_and_names_the_home() -> None:
    administration = following().engine.administration
    for change in (
        lambda: administration.put_topic("t", type_=None, queues=1, now_ms=0),
        lambda: administration.put_group("g", now_ms=0),
        lambda: administration.ensure("t", "", 0),
        lambda: administration.ensure("", "g", 0),
    ):
        with pytest.raises(Forbidden, match="home at h:1"):
            change()


def test_joining_keeps_the_followers_own_topics() -> None:
    world = World()
    world.topic()
    with pytest.raises(Conflict, match="of its own"):
        world.engine.following.accept_home(HOME, may_join=True, is_complete=True, now_ms=0)


def test_a_broker_without_a_home_joins_only_with_the_complete_configuration() -> None:
    world = World()
    with pytest.raises(Conflict, match="needs the whole configuration"):
        world.engine.following.accept_home(HOME, may_join=True, is_complete=False, now_ms=0)
    assert world.engine.catalog.membership.home is None


def test_the_home_of_another_cluster_is_rejected() -> None:
    other = Home(cluster_id="d", name="home", address="h:1")
    with pytest.raises(Forbidden, match="belongs to home"):
        following().engine.following.accept_home(other, may_join=True, is_complete=True, now_ms=0)


def test_a_draining_group_rejects_messages_and_leaves_when_it_is_empty() -> None:
    home, follower = founded(), following()
    home.topic()
    home.group()
    send_configuration(follower, home)
    follower.send("m0")
    draining = Home(cluster_id="c", name="home", address="h:1", is_draining=True)
    with pytest.raises(Conflict, match="not draining"):
        leave(follower)
    follower.engine.following.accept_home(
        draining, may_join=False, is_complete=True, now_ms=follower.now_ms
    )
    follower.commit()
    follower.restart()
    with pytest.raises(GroupDraining):
        follower.send("m1")
    assert left(follower) == (1, 0, 0)
    popped = follower.pop(1)
    assert left(follower) == (0, 1, 0)
    follower.ack(*popped)
    assert left(follower) == (0, 0, 0)
    leave(follower)
    follower.commit()
    follower.restart()
    assert follower.engine.catalog.membership.home is None
    assert not follower.engine.catalog.is_draining
    # The next home has other topics under these ids.
    assert follower.engine.catalog.find_topic(TOPIC) is None
    assert follower.engine.catalog.find_group(GROUP) is None


def test_unread_messages_count_as_remaining() -> None:
    home, follower = founded(), following()
    home.topic()
    send_configuration(follower, home)
    follower.send("m0")
    assert left(follower) == (1, 0, 0)


def test_a_group_that_reads_nothing_may_begin_with_any_topic() -> None:
    home, follower = configured_follower(groups=("reader", "late"))
    follower.send("m0")
    follower.ack(*follower.pop(1, group="reader"))
    found = count(follower)
    assert found.items == [(TOPIC, "late", 1, 0, True, None)]
    assert found.ready_count == 1
    # At the home it has begun another topic, so it reads only that one.
    catalog = home.engine.catalog
    assert not count(follower, {catalog.group_ids["late"]: {catalog.topic_ids["other"]}})
    assert count(follower, {catalog.group_ids["late"]: {catalog.topic_ids[TOPIC]}})


def test_a_group_at_the_latest_gets_messages_of_a_member_since_its_begin_elsewhere() -> None:
    """A member was down, or was added.

    The group does not skip the messages that arrived there meanwhile.
    """
    home, follower = configured_follower(groups=("reader",))
    home.engine.administration.put_group("latest", start_from_latest=True, now_ms=0)
    send_configuration(follower, home)
    follower.send("before")
    follower.ack(*follower.pop(1, group="reader"))
    assert not count(follower)
    for world in (home, follower):
        world.advance(60_000)
    assert home.pop(1, group="latest") == []
    home.commit()
    home.advance(1)
    assert home.pop(1, group="latest") == []
    send_configuration(follower, home)
    unreported = [group.name for group in follower.engine.following.take_unreported_beginnings()]
    assert "latest" not in unreported  # The home knows the begin.
    assert not count(follower)
    follower.send("since")
    follower.ack(*follower.pop(1, group="reader"))
    assert count(follower).items == [(TOPIC, "latest", 1, 0, True, None)]
    follower.commit()
    follower.restart()
    assert [one.body for one in follower.pop(9, group="latest")] == ["since"]


def test_a_home_learns_the_begin_of_a_group_from_a_member() -> None:
    home, follower = configured_follower(groups=())
    home.engine.administration.put_group("latest", start_from_latest=True, now_ms=0)
    send_configuration(follower, home)
    follower.advance(1_000)
    follower.pop(1, group="latest")
    follower.commit()
    follower.restart()
    send_configuration(follower, home)
    (group,) = follower.engine.following.take_unreported_beginnings()
    topic_id = home.engine.catalog.topic_ids[TOPIC]
    assert group.begun == ((topic_id, follower.now_ms),)
    assert follower.engine.following.take_unreported_beginnings() == []
    note_begun(home, group)
    home.commit()
    home.restart()
    later = following()
    send_configuration(later, home)
    later.advance(60_000)
    later.send("since")
    later.advance(60_000)
    assert [one.body for one in later.pop(9, group="latest")] == ["since"]
    # A begin that the home knows is not recorded again.
    home.engine.take_config_changes()
    note_begun(home, group)
    assert not home.engine.take_config_changes()


def test_a_group_at_the_latest_that_began_before_the_cluster_gets_later_messages() -> None:
    home = World()
    home.topic()
    home.engine.administration.put_group("latest", start_from_latest=True, now_ms=0)
    home.pop(1, group="latest")
    home.commit()
    home.engine.broker_groups.found(ADDRESSES, home.now_ms)
    home.commit()
    follower = following()
    send_configuration(follower, home)
    follower.send("since")
    follower.advance(60_000)
    assert [one.body for one in follower.pop(9, group="latest")] == ["since"]


def test_a_deleted_topic_has_no_begins() -> None:
    home, follower = configured_follower(groups=())
    home.engine.administration.put_group("latest", start_from_latest=True, now_ms=0)
    home.pop(1, group="latest")
    home.engine.administration.delete_topic(TOPIC, home.now_ms)
    home.topic()
    home.commit()
    send_configuration(follower, home)
    follower.send("before")
    follower.advance(60_000)
    assert follower.pop(9, group="latest") == []


def test_remaining_queues_are_listed_up_to_a_limit_and_counted_beyond() -> None:
    _, follower = configured_follower(groups=tuple([f"late-{n}" for n in range(ITEMS_MAX + 3)]))
    follower.send("m0")
    found = count(follower)
    assert (len(found.items), found.unnamed_count) == (ITEMS_MAX, 3)
    assert found.ready_count == ITEMS_MAX + 3


def test_dead_letters_remain_without_a_consumer_group() -> None:
    home, follower = configured_follower(groups=())
    home.engine.administration.put_group("reader", max_attempts=1, now_ms=0)
    home.engine.administration.put_group("late", start_from_latest=True, now_ms=0)
    send_configuration(follower, home)
    follower.send("m0")
    follower.pop(1, group="reader", invisible_ms=1_000)
    follower.advance(2_000)
    follower.commit()
    assert count(follower).items == [("%DLQ%reader", "", 1, 0, True, None)]


def test_messages_that_a_group_has_not_pulled_remain() -> None:
    """It does not pop, so its pull offset decides."""
    home, follower = configured_follower(groups=("puller",))
    home.engine.administration.put_group("latest", start_from_latest=True, now_ms=0)
    send_configuration(follower, home)
    follower.send(*[f"m{n}" for n in range(5)])
    pulled(follower, "puller", 2)
    pulled(follower, "latest", 4)
    found = count(follower)
    assert [tuple(item) for item in found.items] == [
        (TOPIC, "puller", 3, 0, False, 0),
        (TOPIC, "latest", 1, 0, False, 0),
    ]
    assert left(follower) == (4, 0, 0)
    # When both groups have pulled everything, nothing remains: a group that pulls begins no other
    # topic, and the topic was read.
    pulled(follower, "puller", 5)
    pulled(follower, "latest", 5)
    assert left(follower) == (0, 0, 0)
    follower.send("m5")
    assert left(follower) == (2, 0, 0)


def test_a_queue_that_a_group_has_not_begun_to_pull_remains() -> None:
    """For example of a dashboard that has reported one queue."""
    home, follower = founded(), following()
    home.engine.administration.put_topic(TOPIC, type_=None, queues=2, now_ms=0)
    home.engine.administration.put_group("puller", start_from_latest=True, now_ms=0)
    send_configuration(follower, home)
    follower.send("m0", queue_id=0)
    follower.send("m1", "m2", queue_id=1)
    pulled(follower, "puller", 1)
    assert [tuple(item) for item in count(follower).items] == [(TOPIC, "puller", 2, 0, False, 1)]


def test_messages_in_an_archive_remain_for_the_groups_that_read_them() -> None:
    """The archive that retention waits for reports its own gaps, and reads for no group."""
    home, follower = founded(), World(archive_gate_group="archive")
    follower.engine.following.accept_home(
        HOME, may_join=True, is_complete=True, now_ms=follower.now_ms
    )
    home.topic()
    home.engine.administration.put_group("archive", now_ms=0)
    send_configuration(follower, home)
    follower.send("m0", "m1")
    unread = (TOPIC, "", 2, 0, True, None)
    assert count(follower).items == [unread], "the archive may begin with nothing"
    pulled(follower, "archive", 1)
    assert count(follower).items == [(TOPIC, "archive", 1, 0, False, 0), unread]
    pulled(follower, "archive", 2)
    assert count(follower).items == [unread]
    home.engine.administration.put_group("reader", now_ms=0)
    send_configuration(follower, home)
    for each in follower.pop(2, group="reader"):
        follower.ack(each)
    assert left(follower) == (0, 0, 0)


def pulled(world: World, group_name: str, offset: int) -> None:
    """Report a group's pull offset of the topic."""
    catalog = world.engine.catalog
    group, topic = catalog.find_group(group_name), catalog.find_topic(TOPIC)
    assert group is not None
    assert topic is not None
    world.engine.administration.update_pull_offset(
        group.id, topic.id, QueueId(0), offset, world.now_ms
    )
    world.commit()


def configured_follower(*, groups: tuple[str, ...]) -> tuple[World, World]:
    """Return a home with two topics and these groups, and a follower with its configuration."""
    home, follower = founded(), following()
    home.topic()
    home.engine.administration.put_topic("other", type_=None, queues=1, now_ms=0)
    for name in groups:
        home.engine.administration.put_group(name, now_ms=0)
    send_configuration(follower, home)
    return home, follower


def count(world: World, readers: Readers | None = None) -> RemovalBacklog:
    found = RemovalBacklog()
    for _ in world.engine.following.count_backlog(found, readers or {}):
        pass
    return found


def note_begun(home: World, group: ConsumerGroup) -> None:
    for _ in home.engine.following.note_begun([(group.home_id, group.begun)], home.now_ms):
        pass


def leave(world: World) -> None:
    for _ in world.engine.following.leave("c", world.now_ms):
        pass


def left(world: World) -> tuple[int, int, int]:
    found = count(world)
    return found.ready_count, found.in_flight_count, found.delayed_count


def test_a_broker_group_with_a_known_dedup_key_is_not_empty() -> None:
    follower = DedupWorld()
    follower.turn_on()
    sent = follower.store("a", key="k", due_at_ms=follower.now_ms + 60_000)
    follower.cancel(sent.queue_offset)
    assert not count(follower)
    follower.store("b", key="k")
    follower.purge(TOPIC)
    found = count(follower)
    assert (found.key_count, found.ready_count) == (1, 0)
    assert "and 1 dedup keys are known" in _not_empty("broker-1", found)
    follower.advance(WINDOW_MS)
    follower.advance(1_000)
    assert not count(follower)


def test_a_broker_group_with_an_open_half_message_is_not_empty() -> None:
    follower = TransactionWorld()
    half_id = follower.half("a")
    found = count(follower)
    assert found
    assert (found.half_count, found.ready_count) == (1, 0)
    assert "and 1 half messages are open" in _not_empty("broker-1", found)
    follower.roll_back(half_id)
    assert not count(follower)
