"""The JSON of support bundles."""

from __future__ import annotations

from pydantic import Field, StrictBool

from tidemill.admin.json.operations import OperationView
from tidemill.admin.json.schema import Schema


class SupportBundleRequest(Schema):
    """A new support bundle."""

    anonymize: StrictBool = Field(
        False,
        description="Replace names of topics, consumer groups, roles, users and clients, and IP"
        " addresses, by hashes, and hide reasons. Equal names stay equal.",
    )


class SupportBundleView(Schema):
    """A support bundle that is made."""

    operation: OperationView = Field(
        description="The operation that makes it. When it is DONE, `GET /support-bundles/{id}`"
        " returns the file for an hour."
    )
