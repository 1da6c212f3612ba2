"""BrokerAdmin's calls about transactions: list, decide, check and recover half messages."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import structlog

from tidemill.broker.engine.layout.numbers import HalfId
from tidemill.broker.engine.layout.transaction import TransactionActor, TransactionState
from tidemill.broker.engine.transaction.inspection import (
    TransactionQuery,
    TransactionSearch,
    TransactionStatus,
)
from tidemill.broker.server.admin.lookup import find_topic
from tidemill.broker.server.round.rpc import in_round, read_in_round, slices_in_round
from tidemill.broker.server.wire.audit_facts import (
    audited,
    change_of,
    state_name,
    transaction_facts,
)
from tidemill.common.errors import BadRequest, ServiceError, TransactionNotFound
from tidemill.message.transaction_id import TransactionSigner, half_id_of
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn
    from tidemill.broker.server.transactions.producers import Producers

log = structlog.get_logger()

RECOVERED_A_SLICE: Final = 16  # half messages; each is read and appended again
RECOVERED_A_ROUND: Final = 128
HALF_ID_MAX: Final = 2**63 - 1
SHOWN_MAX: Final = 20  # of the transactions that a recovery of a topic finds

_OPEN: Final = frozenset({TransactionState.HALF})
_EXPIRED: Final = frozenset({TransactionState.EXPIRED, TransactionState.RECOVERED})
_LISTED: Final = {
    pb.TRANSACTION_STATE_UNSPECIFIED: _OPEN | _EXPIRED,
    pb.TRANSACTION_STATE_OPEN: _OPEN,
    pb.TRANSACTION_STATE_EXPIRED: _EXPIRED,
}
# The state in which a decision ends.
_DECISIONS: Final = {
    pb.TRANSACTION_ACTION_COMMIT: TransactionState.COMMITTED,
    pb.TRANSACTION_ACTION_ROLL_BACK: TransactionState.ROLLED_BACK,
}


class TransactionAdmin:
    """Lists and changes the engine's transactions."""

    def __init__(self, rounds: Rounds, producers: Producers) -> None:
        self._rounds = rounds
        self._producers = producers

    async def ListTransactions(
        self, request: pb.ListTransactionsRequest
    ) -> pb.ListTransactionsReply:
        """Return a page of transactions, the oldest first; each slice of it takes a round."""

        def begin(engine: Engine, turn: Turn) -> TransactionSearch:
            states = _LISTED.get(request.state)
            if states is None:
                raise BadRequest("list the transactions that are OPEN or EXPIRED, or both")
            query = TransactionQuery(
                states,
                request.page_size,
                find_topic(engine, request.topic).id if request.topic else None,
                request.topic,
                _sent_before(request.older_than_ms, turn),
                request.after_half_id if request.HasField("after_half_id") else -1,
            )
            return TransactionSearch(engine.transactions.inspection, query)

        search = await self._search(begin)
        return pb.ListTransactionsReply(
            transactions=self._rendered(search.found), has_more=search.has_more
        )

    async def GetTransaction(self, request: pb.GetTransactionRequest) -> pb.Transaction:
        """Return one transaction, also one that ended not long ago."""
        status = await read_in_round(
            self._rounds, lambda engine, _turn: _find(engine, request.transaction_id)
        )
        return self._rendered([status])[0]

    async def ChangeTransaction(
        self, request: pb.ChangeTransactionRequest
    ) -> pb.ChangeTransactionReply:
        """Commit, roll back, check or recover one transaction; a dry run only checks it."""

        def change(engine: Engine, turn: Turn) -> pb.ChangeTransactionReply:
            before = _find(engine, request.transaction_id)
            recovered_id = None
            if request.dry_run:
                _check(engine, before.half_id, request.action)
            else:
                recovered_id = _change(engine, turn, before, request)
            transactions = engine.transactions
            render = functools.partial(_transaction, signer=signer_of(engine))
            reply = pb.ChangeTransactionReply(
                before=render(before),
                after=render(transactions.status(before.half_id)),
                has_producer=before.topic in self._producers,
            )
            if recovered_id is not None:
                reply.recovered.CopyFrom(render(transactions.status(recovered_id)))
            return reply

        reply = await in_round(self._rounds, change)
        if not request.dry_run:
            log.info(
                "transaction changed",
                transaction_id=request.transaction_id,
                topic=reply.before.topic,
                action=pb.TransactionAction.Name(request.action).removeprefix(
                    "TRANSACTION_ACTION_"
                ),
                by=request.requested_by,
            )
        return reply

    async def RecoverTransactions(
        self, request: pb.RecoverTransactionsRequest
    ) -> pb.RecoverTransactionsReply:
        """Recover expired transactions of a topic; a dry run only finds them."""

        def begin(engine: Engine, turn: Turn) -> TransactionSearch:
            query = TransactionQuery(
                frozenset({TransactionState.EXPIRED}),
                request.limit,
                find_topic(engine, request.topic).id,
                request.topic,
                _sent_before(request.older_than_ms, turn),
            )
            return TransactionSearch(engine.transactions.inspection, query)

        search = await self._search(begin)
        found = search.found
        reply = pb.RecoverTransactionsReply(
            count=len(found),
            transactions=self._rendered(found[:SHOWN_MAX]),
            has_more=search.has_more,
        )
        if request.dry_run or not found:
            return reply
        reply.count = 0
        facts = {"topic": request.topic, "transactions": len(found)}
        audited_change = change_of(
            request,
            before={**facts, "state": state_name(TransactionState.EXPIRED)},
            after={**facts, "state": state_name(TransactionState.RECOVERED)},
        )

        def recover(
            engine: Engine, turn: Turn, part: Sequence[TransactionStatus]
        ) -> Generator[None, None, tuple[int, str]]:
            with engine.fold.audited(audited_change):
                return (yield from _recover(engine, turn, part))

        # Other work of the broker goes on between the rounds.
        for first in range(0, len(found), RECOVERED_A_ROUND):
            part = found[first : first + RECOVERED_A_ROUND]
            count, reply.stopped_by = await slices_in_round(
                self._rounds, functools.partial(recover, part=part)
            )
            reply.count += count
            if reply.stopped_by:
                break
        log.info(
            "transactions recovered",
            topic=request.topic,
            count=reply.count,
            stopped_by=reply.stopped_by,
            by=request.requested_by,
        )
        return reply

    async def _search(
        self, begin: Callable[[Engine, Turn], TransactionSearch]
    ) -> TransactionSearch:
        search = await read_in_round(self._rounds, begin)
        while await read_in_round(self._rounds, lambda _engine, _turn: search.step()):
            pass
        return search

    def _rendered(self, found: Iterable[TransactionStatus]) -> list[pb.Transaction]:
        signer = signer_of(self._rounds.engine)
        return [_transaction(status, signer) for status in found]


def signer_of(engine: Engine) -> TransactionSigner:
    """Return the signer of the transaction ids of a broker group."""
    return TransactionSigner(engine.catalog.handle_secret, engine.catalog.broker_name)


def _find(engine: Engine, transaction_id: str) -> TransactionStatus:
    """Return the transaction of an id, which is verified. Raises TransactionNotFound."""
    half_id = half_id_of(transaction_id)
    signer = signer_of(engine)
    if not transaction_id.startswith(signer.mark) or half_id > HALF_ID_MAX:
        raise TransactionNotFound("no broker group of this cluster issued the transaction id")
    status = engine.transactions.status(HalfId(half_id))
    signer.open(transaction_id, status.topic, status.message_id)
    return status


def _sent_before(older_than_ms: int, turn: Turn) -> int | None:
    return turn.now_ms - older_than_ms if older_than_ms else None


def _check(engine: Engine, half_id: HalfId, action: pb.TransactionAction.ValueType) -> None:
    """Check whether an action is allowed in the state of a transaction. Raises ServiceError."""
    transactions = engine.transactions
    match action:
        case pb.TRANSACTION_ACTION_COMMIT | pb.TRANSACTION_ACTION_ROLL_BACK:
            transactions.check_end(half_id, _DECISIONS[action])
        case pb.TRANSACTION_ACTION_CHECK:
            transactions.check_check(half_id)
        case pb.TRANSACTION_ACTION_RECOVER:
            transactions.check_recover(half_id)
        case _:
            raise BadRequest(f"unknown action {action} on a transaction")


def _change(
    engine: Engine, turn: Turn, before: TransactionStatus, request: pb.ChangeTransactionRequest
) -> HalfId | None:
    """Apply an action; return the half id of a recovered message. Raises ServiceError."""
    half_id, transactions = before.half_id, engine.transactions
    _check(engine, half_id, request.action)
    facts = transaction_facts(before)
    if request.action == pb.TRANSACTION_ACTION_CHECK:
        transactions.check_now(half_id)
        # The record of the check comes later, when a producer has got it.
        asked = change_of(request, before=facts, after={**facts, "checkRequested": True})
        if asked is not None:
            engine.fold.record_audit(asked, turn.now_ms)
        return None
    state = _DECISIONS.get(request.action, TransactionState.RECOVERED)
    after = {**facts, "state": state_name(state)}
    with audited(engine, request, before=facts, after=after):
        match request.action:
            case pb.TRANSACTION_ACTION_COMMIT:
                transactions.commit(half_id, now_ms=turn.now_ms, firing_ms=turn.firing_ms)
            case pb.TRANSACTION_ACTION_ROLL_BACK:
                transactions.roll_back(half_id, actor=TransactionActor.OPERATOR, now_ms=turn.now_ms)
            case _:
                return transactions.recover(half_id, now_ms=turn.now_ms)
    return None


def _recover(
    engine: Engine, turn: Turn, part: Sequence[TransactionStatus]
) -> Generator[None, None, tuple[int, str]]:
    """Recover those that are still expired; return their number and why it ended early."""
    count = 0
    for n, status in enumerate(part, 1):
        row = engine.transaction_table.find(status.half_id)
        if row is not None and row.state == TransactionState.EXPIRED:
            try:
                engine.transactions.recover(status.half_id, now_ms=turn.now_ms)
            except ServiceError as error:
                return count, error.message
            count += 1
        if n % RECOVERED_A_SLICE == 0:
            yield
    return count, ""


def _transaction(status: TransactionStatus, signer: TransactionSigner) -> pb.Transaction:
    is_known = status.topic and status.message_id
    return pb.Transaction(
        transaction_id=(
            signer.sign(status.half_id, status.topic, status.message_id) if is_known else ""
        ),
        half_id=status.half_id,
        state=pb.TransactionState.ValueType(status.state),
        topic=status.topic,
        is_topic_deleted=status.is_topic_deleted,
        message_id=status.message_id,
        client_id=status.client.client_id,
        sent_at_ms=status.sent_at_ms,
        checks=status.checks,
        checks_max=status.checks_max,
        time_ms=status.time_ms,
    )
