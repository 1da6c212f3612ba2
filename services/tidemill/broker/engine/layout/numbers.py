"""Integer types that must not be mixed.

The type checker finds a wrong one. At run time they are plain integers without cost. The code that
decodes a number from the wire or a file assigns its type.
"""

from __future__ import annotations

from typing import NewType

# Byte position in the commit log; that of a CK is also the id of its delivery.
LogOffset = NewType("LogOffset", int)
QueueOffset = NewType("QueueOffset", int)  # number of an entry in a consume queue
TopicId = NewType("TopicId", int)  # of one incarnation of a topic
GroupId = NewType("GroupId", int)  # of one incarnation of a consumer group
QueueId = NewType("QueueId", int)  # number of a queue of a topic, from 0
# Of a delayed message: its queue offset on the hidden timer topic.
TimerId = NewType("TimerId", int)
HalfId = NewType("HalfId", int)  # of a half message: the log offset of its first record
DeliverySlot = NewType("DeliverySlot", int)  # row of the delivery table
