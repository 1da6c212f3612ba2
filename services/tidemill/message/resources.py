"""Resources of the public protocol: the one place where they become names, and names become them.

The rules of names and namespaces are in `namespaces.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from tidemill.message.namespaces import full_name, without_namespace
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2


class ResourceName(NamedTuple):
    """The name of a topic or consumer group, and the namespace of the client that used it."""

    full: str
    namespace: str

    @property
    def bare(self) -> str:
        """The name in answers to the client."""
        return without_namespace(self.namespace, self.full)

    def resource(self) -> v2.Resource:
        """Return the name as answers to the client have it."""
        return v2.Resource(resource_namespace=self.namespace, name=self.bare)


def resource_name(resource: v2.Resource, default: str = "") -> ResourceName:
    """Return the name of a resource; `default` is the namespace if the resource has none."""
    namespace = resource.resource_namespace or default
    return ResourceName(full_name(namespace, resource.name), namespace)
