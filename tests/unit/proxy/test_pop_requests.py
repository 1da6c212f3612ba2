"""The request of a receive for one step of its poll."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.proxy.cluster.linked_group import LocalIds
from tidemill.proxy.polling.level_order import FAIR, NO_LEVEL, LevelChoice
from tidemill.proxy.polling.poll import PopStep
from tidemill.proxy.server.receive import put_step
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

IDS = LocalIds(3, 4)
BROKER: Any = object()  # the request does not name it


@pytest.mark.parametrize(
    ("step", "fields"),
    [
        (PopStep(BROKER, 0), {}),
        (PopStep(BROKER, 0, 5), {"level_min": 5}),
        (
            PopStep(BROKER, 0, 5, LevelChoice(100, 7, 2, 0)),
            {"level_min": 5, "priority_factor": 100},
        ),
        (
            PopStep(BROKER, 0, 0, LevelChoice(FAIR, 7, NO_LEVEL, 0)),
            {"level_below": 7, "priority_factor": 0},
        ),
        (PopStep(BROKER, 0, 0, LevelChoice(None, 7, NO_LEVEL, 0)), {}),
    ],
)
def test_a_pop_has_the_levels_and_the_factor_of_its_step_alone(
    step: PopStep, fields: dict[str, Any]
) -> None:
    pop = pb.PopRequest(max_messages=9, level_min=1, level_below=2, priority_factor=50)
    put_step(pop, IDS, step)
    assert pop == pb.PopRequest(max_messages=9, group_id=3, topic_id=4, **fields)
