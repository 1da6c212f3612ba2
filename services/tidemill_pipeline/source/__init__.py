"""The data source `rocketmq`: datasets in batch and as streams, as Arrow batches."""
