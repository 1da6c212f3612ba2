"""What Spark looks for by itself: with it `.format("rocketmq")` needs no register call."""

from tidemill_pipeline.data_source import RocketMQDataSource

DefaultSource = RocketMQDataSource
