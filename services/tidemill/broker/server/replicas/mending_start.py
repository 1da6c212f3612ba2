"""A replica whose log is damaged where its start needs it: the others are asked first (ADR 0047).

Nothing is served meanwhile and nobody hears of this replica: to the others it is away. It has no
view either, so it asks whom the last one named.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, final

import structlog

from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.broker.engine.replica.group_log import open_damaged_log
from tidemill.broker.engine.replication.store_log import find_addresses
from tidemill.broker.engine.store.mending import ForeignBytes, mend, proven_prefix
from tidemill.broker.engine.store.segment import CorruptStore
from tidemill.broker.posix_disk import PosixDisk
from tidemill.broker.server.replicas.mending import FETCH_BYTES_MAX, NothingThere, fetch_range
from tidemill.broker.store import config_of
from tidemill.common.replica_group import name_in_cluster
from tidemill.transport.grpc.status import RpcError

if TYPE_CHECKING:
    from tidemill.broker.engine.store.commit_log import CommitLog
    from tidemill.broker.settings import BrokerSettings
    from tidemill.broker.store import LogRefused
    from tidemill.common.replica_group import ReplicaId
    from tidemill.transport.aio.connect import Connector

log = structlog.get_logger()

# For others that start too. Then the start is refused, and whoever started it does so again.
WAIT_S: Final = 60.0
# Where the start goes on all the same, as an unclean replica.
WAIT_FOR_TAIL_S: Final = 10.0
AGAIN_S: Final = 1.0
# Megabytes with damage, one after the other: each costs the start as far as it had come.
STARTS_MAX: Final = 256


@final
class StartMending:
    """What one start asks for."""

    def __init__(
        self, settings: BrokerSettings, me: ReplicaId, *, connect: Connector, stop: asyncio.Event
    ) -> None:
        self._settings = settings
        self._group = name_in_cluster(settings.cluster, settings.name)
        self._me = me
        self._connect = connect
        self._stop = stop
        self._starts_left = STARTS_MAX
        # Nobody has what is damaged, and nobody can say that it was confirmed: the log is cut there
        # when it is opened again, and this replica is unclean.
        self.cuts_damage = False

    async def mend(self, refused: LogRefused) -> None:
        """Mend what the start was refused for. Raises `refused` where nobody has it."""
        disk = PosixDisk(self._settings.data_dir)
        others = {n: at for n, at in find_addresses(disk).items() if n != self._me}
        begin, self._starts_left = refused.damage.log_offset, self._starts_left - 1
        log.error(
            "the log is damaged: other replicas are asked",
            log_offset=begin,
            replicas=sorted(others),
            reason=str(refused.damage),
        )
        try:
            log_, confirmed = open_damaged_log(disk, config_of(self._settings))
        except CorruptStore:
            raise refused from None
        if not self._starts_left:
            raise refused
        is_confirmed = begin < confirmed
        wanted = range(begin, max(refused.damage.end, begin + FETCH_BYTES_MAX))
        if is_confirmed:
            # What is behind may be no part of what the others have.
            wanted = range(begin, min(wanted.stop, confirmed))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S if is_confirmed else WAIT_FOR_TAIL_S):
                while others and not self._stop.is_set():
                    for number, address in sorted(others.items()):
                        found = await self._ask(address, wanted)
                        if found is None:
                            continue
                        data = found if is_confirmed else proven_prefix(log_, wanted.start, found)
                        if self._mend(log_, disk, wanted, data):
                            log.warning(
                                "the log was damaged, and is mended from a replica",
                                replica=number,
                                log_offset=begin,
                            )
                            return
                        del others[number]
                    await asyncio.sleep(AGAIN_S)
        if is_confirmed or self.cuts_damage or self._stop.is_set():
            raise refused
        log.error("no replica has it: the log is cut there, and copied again", log_offset=begin)
        self.cuts_damage = True

    async def _ask(self, address: str, wanted: range) -> bytes | None:
        """Return what a replica has; None: it cannot be asked now."""
        try:
            return await fetch_range(self._connect, address, self._group, wanted.start, wanted.stop)
        except (RpcError, TimeoutError):
            return None
        except NothingThere:
            return b""

    def _mend(self, log_: CommitLog, disk: PosixDisk, wanted: range, data: bytes) -> bool:
        """Write what a replica has sent; whether anything differed."""
        is_written = False
        with contextlib.suppress(ForeignBytes, UnknownRecord, LookupError):
            for files in mend(log_, disk, LogOffset(wanted.start), data[: len(wanted)]):
                for file in files:
                    file.sync()
                    is_written = True
        return is_written
