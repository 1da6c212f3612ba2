"""Transactions: list, show, commit, roll back, check and recover half messages."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Final, NamedTuple

from fastapi import APIRouter, Path, Query

from tidemill.admin.audit.author import Author
from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import BrokerGroupClient, Brokers
from tidemill.admin.http.paging import PAGE_SIZE, PageSize
from tidemill.admin.http.request_access import READS, RequestAccess
from tidemill.admin.json.schema import EXACT_MAX
from tidemill.admin.json.transactions import (
    ListedTransactionState,
    TransactionChangeView,
    TransactionPageView,
    TransactionRecoveryRequest,
    TransactionRecoveryView,
    TransactionStateView,
    TransactionView,
)
from tidemill.admin.messages.transaction_pages import (
    Token,
    decode_token,
    encode_token,
    merged,
    request_after,
)
from tidemill.admin.messages.views import transaction_of
from tidemill.admin.routes import Access, Caller, ChangeAuthor, Cluster, DryRun
from tidemill.common.errors import BrokerGroupUnreachable, TransactionNotFound
from tidemill.security.acl import Action, topic_resource
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["transactions"])

CALLS_MAX: Final = 32  # to each broker group, for a page of the transactions that a user may see
RECOVERED_MAX: Final = 1_000  # transactions of one call
SHOWN_MAX: Final = 20  # of the recovered ones

TransactionId = Annotated[
    str,
    Path(
        description="Id of the transaction, as the send of the half message returned it.",
        json_schema_extra={"pattern": "^[A-Za-z0-9_-]{26}$"},
    ),
]
Topic = Annotated[str, Query(description="Only of this topic.")]
State = Annotated[
    ListedTransactionState | None,
    Query(
        description="OPEN: without a decision. EXPIRED: those that expired in the last 72 hours,"
        " with the recovered ones. Default: both."
    ),
]
OlderThan = Annotated[
    int,
    Query(
        alias="olderThanMs",
        ge=0,
        le=EXACT_MAX,
        description="Only transactions that were sent longer ago, in ms.",
    ),
]


class FoundTransaction(NamedTuple):
    """A transaction that the caller may read, and its broker group."""

    member: BrokerGroupClient
    transaction: pb.Transaction


@router.get("/transactions", response_model_exclude_none=True)
async def list_transactions(
    cluster: Cluster,
    access: Access,
    topic: Topic = "",
    state: State = None,
    older_than_ms: OlderThan = 0,
    page_size: PageSize = PAGE_SIZE,
    page_token: Token = None,
) -> TransactionPageView:
    """List open and expired transactions of all broker groups, the oldest first.

    Committed and rolled-back transactions are in no list; they are known by their id for an hour.
    """
    request = pb.ListTransactionsRequest(
        topic=topic,
        state=pb.TransactionState.Value(
            f"TRANSACTION_STATE_{state.value if state else 'UNSPECIFIED'}"
        ),
        older_than_ms=older_than_ms,
        page_size=page_size,
    )
    begin = decode_token(request, page_token)
    if topic and not access.allows_topic(READS, topic):
        return TransactionPageView(transactions=[])  # As for a topic without transactions.
    cursors = begin

    def ask(member: BrokerGroupClient) -> Awaitable[pb.ListTransactionsReply]:
        return member.client.call(
            calls.LIST_TRANSACTIONS, request_after(request, cursors, member.name)
        )

    shown: list[tuple[str, pb.Transaction]] = []
    unreachable: set[str] = set()
    # A page that ends at a hidden transaction would tell its half id.
    for _ in range(CALLS_MAX):
        found = await cluster.ask_all(ask)
        unreachable.update(found.unreachable)
        rows, cursors, has_more = merged(found.answers, cursors, page_size)
        shown += [each for each in rows if _may_see(access, each[1])]
        if not has_more or len(shown) > page_size or not access.is_limited:
            break
    if len(shown) > page_size:
        shown, has_more = shown[:page_size], True
        cursors = {**begin, **{broker: one.half_id for broker, one in shown}}
    return TransactionPageView(
        transactions=[transaction_of(one, broker=broker) for broker, one in shown],
        next_page_token=encode_token(request, cursors) if has_more else None,
        unreachable=sorted(unreachable) or None,
    )


def _may_see(access: RequestAccess, transaction: pb.Transaction) -> bool:
    """Whether a list has a transaction. Only super users see those of deleted topics."""
    if transaction.is_topic_deleted:
        return not access.is_limited
    return access.allows_topic(READS, transaction.topic)


@router.get("/transactions/{transaction_id}", response_model_exclude_none=True)
async def get_transaction(
    transaction_id: TransactionId, cluster: Cluster, access: Access
) -> TransactionView:
    """Show a transaction. Its final state is known for an hour, and an expiry for 72 hours."""
    member, transaction = await _find(cluster, access, transaction_id, Action.GET)
    return transaction_of(transaction, broker=member.name)


@router.post("/transactions/{transaction_id}:commit", response_model_exclude_none=True)
async def commit_transaction(
    transaction_id: TransactionId,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> TransactionChangeView:
    """Commit an open transaction: its message is delivered. Repeating the call is allowed.

    Ask the application first: only its data tells whether the local transaction is done.
    """
    request = _request(transaction_id, pb.TRANSACTION_ACTION_COMMIT, author, caller, is_dry=dry_run)
    return await _change(cluster, access, request, caller)


@router.post("/transactions/{transaction_id}:rollback", response_model_exclude_none=True)
async def roll_back_transaction(
    transaction_id: TransactionId,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> TransactionChangeView:
    """Roll an open transaction back: its message is never delivered. Repeating it is allowed."""
    request = _request(
        transaction_id, pb.TRANSACTION_ACTION_ROLL_BACK, author, caller, is_dry=dry_run
    )
    return await _change(cluster, access, request, caller)


@router.post("/transactions/{transaction_id}:check", response_model_exclude_none=True)
async def check_transaction(
    transaction_id: TransactionId,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> TransactionChangeView:
    """Ask a producer of the topic for the decision now. The check counts as one of its attempts."""
    request = _request(transaction_id, pb.TRANSACTION_ACTION_CHECK, author, caller, is_dry=dry_run)
    return await _change(cluster, access, request, caller)


@router.post("/transactions/{transaction_id}:recover", response_model_exclude_none=True)
async def recover_transaction(
    transaction_id: TransactionId,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> TransactionChangeView:
    """Open an expired transaction again, under a new id and without counted checks."""
    request = _request(
        transaction_id, pb.TRANSACTION_ACTION_RECOVER, author, caller, is_dry=dry_run
    )
    return await _change(cluster, access, request, caller)


def _request(
    transaction_id: str,
    action: pb.TransactionAction.ValueType,
    author: Author,
    caller: str,
    *,
    is_dry: bool,
) -> pb.ChangeTransactionRequest:
    return pb.ChangeTransactionRequest(
        transaction_id=transaction_id,
        action=action,
        dry_run=is_dry,
        requested_by=caller,
        audit=author.of(f"Transaction:{transaction_id}"),
    )


async def _change(
    cluster: Brokers, access: RequestAccess, request: pb.ChangeTransactionRequest, caller: str
) -> TransactionChangeView:
    member, _ = await _find(cluster, access, request.transaction_id, Action.UPDATE)
    reply = await member.client.call(calls.CHANGE_TRANSACTION, request)
    is_check = request.action == pb.TRANSACTION_ACTION_CHECK
    return TransactionChangeView(
        dry_run=request.dry_run,
        by=caller,
        state_before=TransactionStateView(
            pb.TransactionState.Name(reply.before.state).removeprefix("TRANSACTION_STATE_")
        ),
        transaction=transaction_of(reply.after, broker=member.name),
        recovered=(
            transaction_of(reply.recovered, broker=member.name)
            if reply.HasField("recovered")
            else None
        ),
        has_producer=reply.has_producer if is_check else None,
    )


@router.post("/transactions:recover", response_model_exclude_none=True)
async def recover_transactions(
    wanted: TransactionRecoveryRequest,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> TransactionRecoveryView:
    """Open up to 1,000 expired transactions of a topic again, the oldest of each broker group.

    A broker group that is unreachable recovers nothing. Repeat the call later.
    """
    access.require(Action.UPDATE, topic_resource(wanted.topic))
    view = TransactionRecoveryView(
        dry_run=dry_run, by=caller, topic=wanted.topic, count=0, transactions=[], has_more=False
    )

    def request(limit: int, *, is_dry: bool) -> pb.RecoverTransactionsRequest:
        return pb.RecoverTransactionsRequest(
            topic=wanted.topic,
            older_than_ms=wanted.older_than_ms,
            limit=limit,
            dry_run=is_dry,
            requested_by=caller,
            audit=author.of(f"Topic:{wanted.topic}"),
        )

    planned = await cluster.call_all(
        calls.RECOVER_TRANSACTIONS, request(RECOVERED_MAX, is_dry=True)
    )
    for broker, reply in planned.answers:
        limit = min(RECOVERED_MAX - view.count, reply.count)
        view.has_more |= reply.has_more or reply.count > limit
        if limit and not dry_run:
            member = await cluster.member(broker)
            reply = await member.client.call(  # noqa: PLW2901  # the change of the plan
                calls.RECOVER_TRANSACTIONS, request(limit, is_dry=False)
            )
        view.count += min(reply.count, limit)
        room = min(SHOWN_MAX - len(view.transactions), limit)
        view.transactions += [
            transaction_of(one, broker=broker) for one in reply.transactions[:room]
        ]
        if reply.stopped_by:
            view.stopped_by, view.has_more = f"{broker}: {reply.stopped_by}", True
    view.unreachable = planned.unreachable or None
    return view


async def _find(
    cluster: Brokers, access: RequestAccess, transaction_id: str, action: Action
) -> FoundTransaction:
    """Return a transaction and its broker group.

    A transaction of a topic without any right looks like a missing one. Raises TransactionNotFound;
    Forbidden without the right.
    """
    request = pb.GetTransactionRequest(transaction_id=transaction_id)
    try:
        answers, unreachable = await cluster.call_all(calls.GET_TRANSACTION, request)
    except TransactionNotFound:
        if access.is_limited:  # The text of the broker tells more about a former transaction.
            raise _unknown() from None
        raise
    if not answers:
        raise BrokerGroupUnreachable(f"{', '.join(unreachable)} cannot be reached")
    [(broker, transaction), *_] = answers
    topic = transaction.topic
    if not access.allows_topic((Action.GET, Action.UPDATE), topic):
        raise _unknown()
    if transaction.is_topic_deleted:
        if access.is_limited:
            raise _unknown()
        access.require_super()
    else:
        access.require(action, topic_resource(topic))
    return FoundTransaction(await cluster.member(broker), transaction)


def _unknown() -> TransactionNotFound:
    return TransactionNotFound(
        "the transaction is unknown: check its id; a decision is remembered for an hour, and an"
        " expiry for 72 hours"
    )
