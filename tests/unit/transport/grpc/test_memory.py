"""The account of memory: who is refused, and when."""

from __future__ import annotations

from random import Random

from tidemill.transport.grpc.memory import MemoryAccount, MemoryShare


def test_a_share_is_bounded_and_gives_back() -> None:
    share = MemoryShare(MemoryAccount(1_000), 100)
    assert share.take(60)
    assert not share.take(41), "over its own bound"
    assert share.take(40)
    share.give_back(100)
    assert (share.bytes, share.has_room(100)) == (0, True)


def test_nobody_holds_more_than_is_free_for_the_others() -> None:
    account = MemoryAccount(1_000)
    first, second = MemoryShare(account, 1_000), MemoryShare(account, 1_000)
    assert first.take(500)
    assert not first.take(1), "half is all that one may have"
    assert second.take(250)
    assert not second.take(1)
    assert not first.take(1), "whoever holds most is refused first"
    assert MemoryShare(account, 1_000).take(125), "and a newcomer finds room"


def test_many_shares_fill_the_account_and_never_overfill_it() -> None:
    random = Random(1)
    account = MemoryAccount(256 << 20)
    shares = [MemoryShare(account, 24 << 20) for _ in range(64)]
    for _ in range(5_000):
        share = random.choice(shares)
        if random.random() < 0.3 and share.bytes:
            share.give_back(4 << 20)
        else:
            share.take(4 << 20)
        assert account.bytes == sum(one.bytes for one in shares) <= account.bytes_max
    assert account.bytes > account.bytes_max * 9 // 10


def test_what_flow_control_grants_is_counted_for_all_and_bounds_itself() -> None:
    account = MemoryAccount(1_000)
    share = MemoryShare(account, 100)
    share.count_granted(300)
    assert account.bytes == 300
    assert share.take(100), "the bound of its own is for the rest"
    share.count_granted(0)
    assert account.bytes == 100
    assert not share.is_fair(850)
