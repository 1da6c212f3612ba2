"""The data pipeline on Spark: a data source, a sink, and the jobs that read and write with them.

Everything that runs in Spark is below here, and nothing else of Tidemill imports Spark. What plans
(`options`, `offsets`, `archive.manifest`, `transforms`) is pure; what asks a cluster is `client`.
"""
