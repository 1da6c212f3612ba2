"""The author of a change, which the admin process sends to the brokers with the change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from tidemill.admin.http.actor import Actor
from tidemill.message.client_key import NO_OWNER
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

CREATE: Final = "Create"
UPDATE: Final = "Update"
DELETE: Final = "Delete"
PUB: Final = "Pub"


@final
@dataclass(frozen=True, slots=True)
class Author:
    """The actor of a request, and the call that it makes."""

    actor: Actor
    process: str
    call: str  # method and template of the path: "PUT /topics/{topic}"
    user_id: int = NO_OWNER  # of the verified user

    def of(self, resource: str, action: str = UPDATE) -> pb.ChangeAuthor:
        """Return the author of an action on a resource, such as `Topic:orders`."""
        return pb.ChangeAuthor(
            user=self.actor.user,
            via=self.actor.via,
            claimed_user=self.actor.claimed_user,
            address=self.actor.address,
            process=self.process,
            call=self.call,
            resource=resource,
            action=action,
            user_id=self.user_id,
        )
