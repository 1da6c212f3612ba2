"""The memory account: limits of shares and addresses."""

from __future__ import annotations

from random import Random

from tidemill.transport.grpc.address_share import AddressShare
from tidemill.transport.grpc.memory import MemoryAccount, MemoryShare


def test_a_share_is_limited_and_released() -> None:
    share = MemoryShare(MemoryAccount(1_000), 100)
    assert share.take(60)
    assert not share.take(41), "over its fixed limit"
    assert share.take(40)
    share.release(100)
    assert (share.bytes, share.has_room(100)) == (0, True)


def test_a_share_is_never_larger_than_the_free_room() -> None:
    account = MemoryAccount(1_000)
    first, second = MemoryShare(account, 1_000), MemoryShare(account, 1_000)
    assert first.take(500)
    assert not first.take(1), "one share may have at most half"
    assert second.take(250)
    assert not second.take(1)
    assert not first.take(1), "the largest share is rejected first"
    assert MemoryShare(account, 1_000).take(125), "and a new client finds room"


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


def test_granted_bytes_count_for_all_and_not_for_the_fixed_limit() -> None:
    account = MemoryAccount(1_000)
    share = MemoryShare(account, 100)
    share.count_granted(300)
    assert account.bytes == 300
    assert share.take(100), "the fixed limit is for other bytes"
    share.count_granted(0)
    assert account.bytes == 100
    assert not share.is_fair(850)


def test_connections_of_one_address_stop_at_half_and_others_find_as_much() -> None:
    account = MemoryAccount(256 << 20)
    crowd, other = AddressShare(), AddressShare()
    shares = [MemoryShare(account, 24 << 20, crowd) for _ in range(400)]
    for _ in range(1_000):
        for share in shares:
            share.take(4_096)
    assert account.bytes == crowd.bytes
    assert 0.49 * account.bytes_max < crowd.bytes <= account.bytes_max // 2
    newcomer = MemoryShare(account, 24 << 20, other)
    assert newcomer.take(24 << 20), "independent of the number of connections"
    most = max(share.bytes for share in shares)
    assert not any(share.take(4_096) for share in shares), "and these have less room for it"
    newcomer.release(24 << 20)
    # Each byte that they took last reduced their room by two bytes.
    assert MemoryShare(account, 24 << 20, crowd).take(most - 2 * 4_096), (
        "as much as for one more connection of the address"
    )


def test_an_address_has_the_bytes_of_its_connections() -> None:
    account, address = MemoryAccount(1_000), AddressShare()
    first, second = (MemoryShare(account, 1_000, address) for _ in range(2))
    assert first.take(200)
    second.count_granted(50)
    assert (address.bytes, account.bytes) == (250, 250)
    assert not second.is_fair(451), "the free room without the bytes of the address"
    assert second.is_fair(450)
    second.count_granted(0)
    first.release(200)
    assert (address.bytes, account.bytes) == (0, 0)
