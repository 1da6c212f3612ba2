"""Mending before a start: damaged records come from other replicas (ADR 0047).

The start needs these records. Until they are mended, this replica serves nothing, and the others
see it as down. It has no view of its group, so it uses the addresses that it has saved.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, final

import structlog

from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.broker.engine.replica.opening import open_damaged_log
from tidemill.broker.engine.replica.replica_files import find_addresses
from tidemill.broker.engine.store.mending import ForeignBytes, mend, proven_prefix
from tidemill.broker.engine.store.segment import CorruptStore
from tidemill.broker.posix_disk import PosixDisk
from tidemill.broker.server.replicas.mending import FETCH_BYTES_MAX, RangeMissing, fetch_range
from tidemill.broker.store import config_of
from tidemill.common.replica_group import name_in_cluster
from tidemill.transport.grpc.status import RpcError

if TYPE_CHECKING:
    from tidemill.broker.engine.store.commit_log import CommitLog
    from tidemill.broker.settings import BrokerSettings
    from tidemill.broker.store import LogRejected
    from tidemill.common.replica_group import ReplicaId
    from tidemill.transport.aio.connect import Connector

log = structlog.get_logger()

# Time for other replicas, which may start, too. After it the start fails and is repeated.
WAIT_S: Final = 60.0
# The same for an unconfirmed tail. After it the replica starts as unclean.
WAIT_FOR_TAIL_S: Final = 10.0
AGAIN_S: Final = 1.0
# Damaged ranges of up to 1 MiB, mended one by one: each attempt repeats the start.
STARTS_MAX: Final = 256


@final
class StartupMender:
    """The attempts of one start to mend its log."""

    def __init__(
        self, settings: BrokerSettings, me: ReplicaId, *, connect: Connector, stop: asyncio.Event
    ) -> None:
        self._settings = settings
        self._group = name_in_cluster(settings.cluster, settings.name)
        self._me = me
        self._connect = connect
        self._stop = stop
        self._starts_left = STARTS_MAX
        # No replica has the damaged records, and they may be unconfirmed. The next open of the log
        # cuts them, and this replica is unclean.
        self.cuts_damage = False

    async def mend(self, rejection: LogRejected) -> None:
        """Mend the range that stopped the start. Raises `rejection` if no replica has it."""
        disk = PosixDisk(self._settings.data_dir)
        others = {n: at for n, at in find_addresses(disk).items() if n != self._me}
        begin, self._starts_left = rejection.damage.log_offset, self._starts_left - 1
        log.error(
            "log damaged, asking other replicas",
            log_offset=begin,
            replicas=sorted(others),
            reason=str(rejection.damage),
        )
        try:
            log_, confirmed = open_damaged_log(disk, config_of(self._settings))
        except CorruptStore:
            raise rejection from None
        if not self._starts_left:
            raise rejection
        is_confirmed = begin < confirmed
        requested = range(begin, max(rejection.damage.end, begin + FETCH_BYTES_MAX))
        if is_confirmed:
            # The others may not have the unconfirmed records after it.
            requested = range(begin, min(requested.stop, confirmed))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S if is_confirmed else WAIT_FOR_TAIL_S):
                while others and not self._stop.is_set():
                    for number, address in sorted(others.items()):
                        found = await self._fetch(address, requested)
                        if found is None:
                            continue
                        data = found if is_confirmed else proven_prefix(log_, begin, found)
                        if self._mend(log_, disk, requested, data):
                            log.warning(
                                "log mended from a replica", replica=number, log_offset=begin
                            )
                            return
                        del others[number]
                    await asyncio.sleep(AGAIN_S)
        if is_confirmed or self.cuts_damage or self._stop.is_set():
            raise rejection
        log.error("no replica has the damaged records, cutting the log there", log_offset=begin)
        self.cuts_damage = True

    async def _fetch(self, address: str, requested: range) -> bytes | None:
        """Return the records of a replica; None if it is unreachable."""
        try:
            return await fetch_range(
                self._connect, address, self._group, requested.start, requested.stop
            )
        except (RpcError, TimeoutError):
            return None
        except RangeMissing:
            return b""

    def _mend(self, log_: CommitLog, disk: PosixDisk, requested: range, data: bytes) -> bool:
        """Write the bytes of a replica; return False if the log already had them."""
        is_written = False
        with contextlib.suppress(ForeignBytes, UnknownRecord, LookupError):
            for files in mend(log_, disk, LogOffset(requested.start), data[: len(requested)]):
                for file in files:
                    file.sync()
                    is_written = True
        return is_written
