"""Versions of resources as ETags: `If-Match` and `If-None-Match` of a change (RFC 9110, 13.1).

An ETag is `"ID.VERSION"`: the id of the incarnation of the resource, and the number of its last
change. The broker, or the decision about a security item, compares it again in the round of the
change, so no other change comes between.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Annotated, Final, NamedTuple, final

from fastapi import Depends, Header, Request, Response

from tidemill.admin.http.rest_calls import CallProblem, Document, RestCalls
from tidemill.admin.http.route_templates import PREFIX
from tidemill.common.errors import BY_NAME, BadRequest, PreconditionFailed, from_wire
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

ETAG: Final = "ETag"
_ANY: Final = "*"
_SERVER_ERRORS: Final = HTTPStatus.INTERNAL_SERVER_ERROR  # and above
_TAG: Final = re.compile(r'"(0|[1-9][0-9]{0,9})\.(0|[1-9][0-9]{0,15})"')


class EntityTag(NamedTuple):
    """The id of an incarnation of a resource, and its version."""

    id: int
    version: int

    @property
    def text(self) -> str:
        """The ETag."""
        return f'"{self.id}.{self.version}"'


@final
class Preconditions:
    """The version that a change expects, and the ETag of its answer."""

    def __init__(
        self,
        response: Response | None = None,  # None: of a call without an ETag
        expected: EntityTag | None = None,
        *,
        is_new: bool = False,
        is_known: bool = False,
    ) -> None:
        self._response = response
        self.expected = expected  # None: every version
        self.is_new = is_new  # Whether the resource must be new.
        self._is_known = is_known  # Whether the resource must exist.

    @property
    def wire(self) -> pb.ExpectedVersion | None:
        """The expected version of a topic or consumer group, for its broker."""
        if self.expected is None:
            return None
        # The change is refused also if another one comes after the comparison here.
        return pb.ExpectedVersion(id=self.expected.id, version=self.expected.version)

    def check(self, found: EntityTag | None) -> None:
        """Check the present ETag; None: the resource does not exist. Raises PreconditionFailed."""
        if self.is_new and found is not None:
            raise PreconditionFailed("it exists, and If-None-Match: * may only create it")
        if self._is_known and found is None:
            raise PreconditionFailed("it does not exist, and If-Match changes only what exists")
        if self.expected is not None and found is not None and found != self.expected:
            raise PreconditionFailed(
                f"its ETag is {found.text}, and If-Match has {self.expected.text}; nothing was"
                " changed: look at `current`, and repeat the change with its ETag if you still want"
                " it"
            )

    def answer(self, tag: EntityTag) -> None:
        """Set the ETag of the answer."""
        assert self._response is not None, "a call with an ETag has a response"
        self._response.headers[ETAG] = tag.text


async def preconditions_of(
    request: Request,
    response: Response,
    if_match: Annotated[
        str | None,
        Header(
            alias="If-Match",
            description="ETag of the version to change, or `*`: the resource must exist. Otherwise"
            " the answer is 412, with the present document in `current`.",
            examples=['"7.3"'],
        ),
    ] = None,
    if_none_match: Annotated[
        str | None,
        Header(alias="If-None-Match", description="`*`: create only. 412 if the resource exists."),
    ] = None,
) -> Preconditions:
    """Return the preconditions of a change of the resource in the path.

    Raises ServiceError.
    """
    if if_none_match not in {None, _ANY}:
        raise BadRequest("If-None-Match of a change is *: create only")
    expected = None if if_match in {None, _ANY} else _tag_of(str(if_match))
    match = Preconditions(
        response, expected, is_new=if_none_match is not None, is_known=if_match is not None
    )
    if if_match is not None or if_none_match is not None:
        # The change itself refuses a resource that exists, also if the caller may not see it.
        match.check(await _find_tag(request, may_be_hidden=if_match is None))
    return match


def tagging_of(response: Response) -> Preconditions:
    """Return the setter of the ETag of a read."""
    return Preconditions(response)


def config_tag(config: pb.TopicConfig | pb.GroupConfig) -> EntityTag:
    """Return the ETag of a topic or consumer group."""
    return EntityTag(config.home_id or config.id, config.version)


Matching = Annotated[Preconditions, Depends(preconditions_of)]
Tagging = Annotated[Preconditions, Depends(tagging_of)]


async def current_of(request: Request) -> Document | None:
    """Return the present document of the resource in the path.

    None if it does not exist, or if the caller may not see it.
    """
    try:
        return await _calls_of(request).get(_resource_path(request))
    except CallProblem:
        return None


async def _find_tag(request: Request, *, may_be_hidden: bool) -> EntityTag | None:
    """Return the ETag of the resource; None if it does not exist, or may be hidden and is.

    Raises BadRequest. Raises the error of the read if the same request may succeed later.
    """
    try:
        answer = await _calls_of(request).call("GET", _resource_path(request))
    except CallProblem as refusal:
        is_hidden = refusal.status is HTTPStatus.FORBIDDEN and may_be_hidden
        if refusal.status is HTTPStatus.NOT_FOUND or is_hidden:
            return None
        if refusal.status >= _SERVER_ERRORS or refusal.status is HTTPStatus.TOO_MANY_REQUESTS:
            if refusal.title in BY_NAME:
                raise from_wire(refusal.title, refusal.detail) from None
            raise  # a defect
        raise BadRequest(
            f"the ETag to compare cannot be read ({refusal.detail}); nothing was changed"
        ) from None
    return _tag_of(answer.headers[ETAG.lower().encode()].decode())


def _resource_path(request: Request) -> str:
    """Return the path of the resource that a request changes: without the verb of an action."""
    path = str(request.scope["path"]).removeprefix(PREFIX)
    template = request.app.state.paths.find(request.scope["path"])
    verb = "" if template is None else str(template.path).rpartition("}")[2]
    return path.removesuffix(verb) if verb else path


def _calls_of(request: Request) -> RestCalls:
    return RestCalls(request.app.state.api or request.app, request.scope)


def _tag_of(text: str) -> EntityTag:
    found = _TAG.fullmatch(text)
    if found is None:
        raise BadRequest(
            f'If-Match {text[:64]!r} is no ETag of this API, such as "7.3"; read the resource first'
        )
    return EntityTag(int(found.group(1)), int(found.group(2)))
