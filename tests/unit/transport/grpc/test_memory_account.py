"""The account of memory: who is refused, and when."""

from __future__ import annotations

from random import Random

from tidemill.transport.grpc.address_share import AddressShare
from tidemill.transport.grpc.memory import MemoryAccount, MemoryShare


def test_a_share_is_bounded_and_gives_back() -> None:
    share = MemoryShare(MemoryAccount(1_000), 100)
    assert share.take(60)
    assert not share.take(41), "over its own bound"
    assert share.take(40)
    share.release(100)
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
            share.release(4 << 20)
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


def test_the_connections_of_one_address_stop_at_half_and_others_find_as_much() -> None:
    account = MemoryAccount(256 << 20)
    crowd, other = AddressShare(), AddressShare()
    shares = [MemoryShare(account, 24 << 20, crowd) for _ in range(400)]
    for _ in range(1_000):
        for share in shares:
            share.take(4_096)
    assert account.bytes == crowd.bytes
    assert 0.49 * account.bytes_max < crowd.bytes <= account.bytes_max // 2
    newcomer = MemoryShare(account, 24 << 20, other)
    assert newcomer.take(24 << 20), "however many they are"
    most = max(share.bytes for share in shares)
    assert not any(share.take(4_096) for share in shares), "and they have less room for it"
    newcomer.release(24 << 20)
    # Each that they took last made their room smaller by twice as much.
    assert MemoryShare(account, 24 << 20, crowd).take(most - 2 * 4_096), "as for one more of them"


def test_an_address_has_what_its_connections_have() -> None:
    account, address = MemoryAccount(1_000), AddressShare()
    first, second = (MemoryShare(account, 1_000, address) for _ in range(2))
    assert first.take(200)
    second.count_granted(50)
    assert (address.bytes, account.bytes) == (250, 250)
    assert not second.is_fair(451), "what is free, without as much as the address has already"
    assert second.is_fair(450)
    second.count_granted(0)
    first.release(200)
    assert (address.bytes, account.bytes) == (0, 0)
