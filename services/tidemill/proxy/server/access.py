"""The rights of a call, by the current users and roles (ADR 0071).

No decision is cached: each check reads the current table.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Protocol, final

from tidemill.common.errors import (
    Banned,
    KeyMissing,
    Overloaded,
    RequestError,
    SecurityStale,
    ServiceError,
    TokenEnded,
    Unauthorized,
    WrongCredentials,
)
from tidemill.message.resource_names import BROKER_DEAD_LETTER_TOPICS, check_group, check_topic
from tidemill.proxy.metrics import request_code
from tidemill.proxy.server.access_metrics import access_metrics
from tidemill.proxy.server.credentials import CallCredentials
from tidemill.proxy.server.gated_call import Caller, GatedCall, StreamWatch
from tidemill.proxy.server.revoked_clients import RevokedClients
from tidemill.proxy.server.stream_watches import StreamWatches
from tidemill.security.acl import Action, Resource, ResourceType
from tidemill.security.secret_keys import SecretKeys
from tidemill.security.table import Mode, SecurityTable
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.proxy.server.service_accounts import ServiceAccounts

# C++ and Go clients repeat some refused calls at once.
REFUSAL_DELAY_S: Final = 1.0
DELAYED_MAX: Final = 1_000
# Time of the answer to wrong credentials, from the begin of the call.
WRONG_ANSWER_S: Final = 0.05

_CALLS: Final = [
    request_code(method.name)
    for method in service.DESCRIPTOR.services_by_name["MessagingService"].methods
]
_RESULTS: Final = ("allowed", "refused", "would_refuse")


class AccessReports(Protocol):
    """The receiver of refused calls and of accesses of super users."""

    def note_refusal(
        self,
        call: GatedCall,
        error: ServiceError,
        actions: tuple[Action, ...],
        resource: Resource | None,
        *,
        passes: bool,
    ) -> None:
        """Note a call without its rights; it `passes` in the mode permissive."""

    def note_access(self, call: GatedCall, action: Action, resource: Resource) -> None:
        """Note an access of a super user."""


@final
class AccessGate:
    """The checks of all calls of the process."""

    def __init__(
        self,
        table: SecurityTable,
        keys: Callable[[], SecretKeys | None],
        wall_ms: Callable[[], int],
        accounts: ServiceAccounts | None = None,
    ) -> None:
        """`keys` returns the keys of the secrets; None without a key file.

        `accounts` verifies tokens of service accounts; None: they are ignored.
        """
        if accounts is not None:
            accounts.keys.on_change = self._note_change
        self.credentials = CallCredentials(table, keys, wall_ms, accounts)
        self._table = table
        self._wall_ms = wall_ms
        self._set_mode(table.mode)
        self._bans = table.bans
        # Whether calls need checks: in the mode off only if clients are banned.
        self.is_checking = self._needs_checks()
        table.on_change = self._note_change
        self._delayed_count = 0
        self.streams = StreamWatches(self._check_stream, self._valid_ms)
        self.revoked = RevokedClients(wall_ms)
        # Raises SecurityStale if users and rights are too old; None: there is no limit.
        self.check_age: Callable[[], None] | None = None
        # Called with each refused or would-be-refused call, and with each access of a super user.
        self.reports: AccessReports | None = None
        # By call and result. Counters that begin at zero show their first increase.
        self.accesses = Counter({(call, result): 0 for call in _CALLS for result in _RESULTS})

    def _note_change(self) -> None:
        self.credentials.note_change()
        self._set_mode(self._table.mode)
        self.is_checking = self._needs_checks()
        self.streams.check_soon()

    def _set_mode(self, mode: Mode) -> None:
        self._mode = mode
        # Whether credentials count; in the mode off, only bans do.
        self.needs_credentials = mode is not Mode.OFF

    def _needs_checks(self) -> bool:
        return self.needs_credentials or self._bans.has_clients

    # ------------------------------------------------------------ checks

    def authenticate(self, call: GatedCall) -> None:
        """Check the credentials and the client id of a call.

        Raises Unauthorized, KeyMissing, SecurityStale.
        """
        if self.needs_credentials:
            self._find_caller(call)
        if self._bans.has_clients:
            ban = self._bans.find_client(call.client_id, self._wall_ms())
            if ban is not None:
                self._refuse(call, Banned(ban.text))

    def require(self, call: GatedCall, actions: tuple[Action, ...], resource: Resource) -> None:
        """Check that the user has one of the rights on a resource.

        Raises as `authenticate`; IllegalTopic or IllegalGroup for a malformed name.
        """
        if not self.needs_credentials:
            return
        if resource.name in BROKER_DEAD_LETTER_TOPICS and resource.type is ResourceType.TOPIC:
            # Their messages are of all topics.
            for action in actions:
                self.require_all(call, action, ResourceType.TOPIC)
            return
        if (caller := self._find_caller(call)) is None:
            return  # The missing credentials were counted, and the mode lets the call pass.
        known = caller.known
        for action in actions:
            if known.decide(action, resource, call.find_address):
                self.accesses[call.method, "allowed"] += 1
                if known.is_super and self.reports is not None:
                    self.reports.note_access(call, action, resource)
                return
        try:
            self._refuse(call, _missing_right(caller, call, actions, resource), actions, resource)
        except Unauthorized as error:
            if call.watch is None or call.watch.refused is None:
                raise
            call.watch.refused.append((resource, error))

    def require_all(self, call: GatedCall, action: Action, type_: ResourceType) -> None:
        """Check that the user has a right on each resource of a type. Raises as `require`."""
        if not self.needs_credentials or (caller := self._find_caller(call)) is None:
            return
        if caller.known.allows_all(action, type_, call.find_address):
            self.accesses[call.method, "allowed"] += 1
            return
        self._refuse(call, _missing_right(caller, call, (action,), f"{type_.text}:*"), (action,))

    def allows(self, call: GatedCall, action: Action, resource: Resource) -> bool:
        """Whether the mode lets a call use a right that it can do without.

        Note the call if the right is missing. Raises as `authenticate`.
        """
        if self._mode is Mode.OFF or (caller := self._find_caller(call)) is None:
            return True
        if caller.known.decide(action, resource, call.find_address):
            return True
        error = _missing_right(caller, call, (action,), resource)
        return self._note_refusal(call, error, (action,), resource)

    # ------------------------------------------------------------ streams

    def find_owner(self, user: str) -> int | None:
        """Return the id of a user; None if there is none."""
        known = self._table.user(user)
        return None if known is None else known.user.id

    def _check_stream(self, watch: StreamWatch) -> None:
        """End a stream whose user or client may not have it any longer."""
        call, before = watch.call, watch.call.caller
        client = call.client
        identity = "" if before is None else before.known.identity
        refused = watch.refused = []
        try:
            if self._mode is Mode.ON:
                _check_user(before, self._table)
            self.authenticate(call)
            if self._mode is Mode.ON:
                _check_same(before, call.caller)
            if watch.check_rights is not None:
                watch.check_rights()
        except (KeyMissing, SecurityStale, Overloaded):
            return  # Nothing is known about the user; the next call is refused.
        except TokenEnded as error:
            # The client opens the telemetry stream again, with its newer token, and keeps its
            # messages. Kubernetes renews a token before its end.
            watch.end(None if call.method == "telemetry" else error)
        except RequestError as error:
            # Without the right, a malformed name is reported instead. Without a user, the end is
            # that of the clients of all users with this id. Only a ban of the id may end all.
            is_own = before is not None or isinstance(error, Banned)
            self.revoked.end_stream(watch, client if is_own else None, error, identity=identity)
        else:
            if refused:
                own = client if before is not None else None
                lost = [resource for resource, _ in refused]
                self.revoked.end_stream(watch, own, refused[0][1], lost, identity=identity)
        finally:
            watch.refused = None

    def _valid_ms(self, call: GatedCall) -> int | None:
        """Return the time until the credential of a call ends; None without an end to come."""
        not_after_ms = 0 if call.caller is None else call.caller.not_after_ms
        remaining_ms = not_after_ms - self._wall_ms()
        return remaining_ms if not_after_ms and remaining_ms >= 0 else None

    def _refuse(
        self,
        call: GatedCall,
        error: ServiceError,
        actions: tuple[Action, ...] = (),
        resource: Resource | None = None,
    ) -> None:
        """Raise the error, unless the mode lets the call pass.

        A malformed name of the resource is reported first.
        """
        if self._note_refusal(call, error, actions, resource):
            return
        if resource is not None:
            _check_name(resource)
        raise self.revoked.answer(call, error)

    def _note_refusal(
        self,
        call: GatedCall,
        error: ServiceError,
        actions: tuple[Action, ...],
        resource: Resource | None,
    ) -> bool:
        """Count and report a call without its rights. Return whether the mode lets it pass."""
        # A ban is neither a credential nor a right, so it holds in each mode.
        is_let_through = self._mode is Mode.PERMISSIVE and not isinstance(error, Banned)
        if self.reports is not None:
            self.reports.note_refusal(call, error, actions, resource, passes=is_let_through)
        self.accesses[call.method, "would_refuse" if is_let_through else "refused"] += 1
        return is_let_through

    # ------------------------------------------------------------ credentials

    def _find_caller(self, call: GatedCall) -> Caller | None:
        """Return the user of a call; None if the mode lets a call without one pass."""
        if self.check_age is not None:
            try:
                self.check_age()
            except SecurityStale as error:
                self._refuse(call, error)
                return None
        caller = call.caller
        if caller is not None and self.credentials.is_current(caller):
            return caller
        failure, generation = call.failure, self.credentials.generation
        if failure is None or failure[0] != generation:
            try:
                call.caller = caller = self.credentials.find(call)
            except (Unauthorized, KeyMissing, Overloaded) as error:
                self.credentials.count_refused(call)
                failure = generation, error
            else:
                if caller is not None:
                    return caller
                failure = generation, Unauthorized("no credentials")
            call.failure = failure
        self._refuse(call, failure[1])
        return None

    # ------------------------------------------------------------ answers

    async def delay_refusal(self, call: GatedCall, error: Exception, *, repeats: bool) -> None:
        """Wait before the answer to a client that would repeat its call at once.

        Also wait before the answer to wrong credentials: the first check of an existing user takes
        longer than that of an unknown one.
        """
        if repeats:
            delay_s = REFUSAL_DELAY_S
        elif isinstance(error, WrongCredentials):
            delay_s = call.started_at + WRONG_ANSWER_S - time.monotonic()
        else:
            return
        if delay_s <= 0 or self._delayed_count >= DELAYED_MAX:
            return
        self._delayed_count += 1
        try:
            await asyncio.sleep(delay_s)
        finally:
            self._delayed_count -= 1

    def missing(self) -> str:
        """Return why this process cannot check calls; empty if it can, or needs not."""
        if self._mode is not Mode.OFF and not self.credentials.has_keys:
            return "security_key_file is not set, and the mode needs it"
        return ""

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of credentials and rights."""
        credentials = self.credentials
        return access_metrics(
            credentials.authentications, self.accesses, credentials.undecryptable_count, self._mode
        )


def _check_user(caller: Caller | None, table: SecurityTable) -> None:
    """Raise Unauthorized if the user of a stream was deleted or disabled.

    Its credentials may be too many to check at present.
    """
    if caller is None:
        return
    user = caller.known.user
    known = table.user(user.name)
    if known is None or known.user.id != user.id:
        raise Unauthorized(f"user {user.name} of this stream was deleted")
    if not known.user.is_enabled:
        raise known.name_in(Unauthorized(f"user {user.name} is disabled"))


def _check_same(before: Caller | None, after: Caller | None) -> None:
    """Raise Unauthorized if the credentials of a stream are those of another user now."""
    if before and after and before.known.user.id != after.known.user.id:
        raise Unauthorized("the credentials of this stream belong to another user now")


def _missing_right(
    caller: Caller, call: GatedCall, actions: tuple[Action, ...], resource: Resource | str
) -> Unauthorized:
    """Return the refusal of a call whose user has none of the rights."""
    wanted = " or ".join(action.text for action in actions)
    name = caller.known.user.name
    return Unauthorized(f"user {name} may not {wanted} on {resource} from {call.find_address()}")


def _check_name(resource: Resource) -> None:
    """Raise IllegalTopic or IllegalGroup for a malformed name, which is reported first."""
    if resource.type is ResourceType.TOPIC:
        check_topic(resource.name)
    elif resource.type is ResourceType.GROUP:
        check_group(resource.name)
