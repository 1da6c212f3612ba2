"""The dashboards, in the order of the list in Grafana."""

from __future__ import annotations

from tools.monitoring.pages import (
    admin,
    broker_and_store,
    consumer_group,
    delay_and_timer,
    kubernetes,
    overview,
    pipeline,
    pop_and_long_polling,
    proxy,
    replication_and_controller,
)
from tools.monitoring.vocabulary import Page

PAGES: tuple[Page, ...] = (
    overview.PAGE,
    delay_and_timer.PAGE,
    pop_and_long_polling.PAGE,
    consumer_group.PAGE,
    broker_and_store.PAGE,
    replication_and_controller.PAGE,
    proxy.PAGE,
    admin.PAGE,
    pipeline.PAGE,
    kubernetes.PAGE,
)
