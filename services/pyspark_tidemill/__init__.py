"""Spark's entry point: Spark finds `.format("rocketmq")` here without a register call."""

from tidemill_pipeline.data_source import RocketMQDataSource

DefaultSource = RocketMQDataSource
