"""Numbers that must not be mixed up: each is a whole number, and none is another.

A wrong one is found by the type checker; at run time they are plain integers and cost nothing.
Where numbers come from outside (the wire, a file) whoever decodes them says which they are.
"""

from __future__ import annotations

from typing import NewType

LogOffset = NewType("LogOffset", int)  # byte position in the commit log; of a CK: a delivery's id
QueueOffset = NewType("QueueOffset", int)  # number of an entry of a consume queue
TopicId = NewType("TopicId", int)  # of one incarnation of a topic
GroupId = NewType("GroupId", int)  # of one incarnation of a consumer group
QueueId = NewType("QueueId", int)  # number of a queue of a topic, from 0
TimerId = NewType("TimerId", int)  # of a delayed message: its queue offset on the timers' topic
DeliverySlot = NewType("DeliverySlot", int)  # row of the delivery table
