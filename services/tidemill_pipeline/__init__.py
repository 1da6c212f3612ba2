"""The data pipeline on Spark: a data source, a sink, and the jobs that read and write with them.

Only this package of Tidemill imports Spark. The modules that plan (`options`, `offsets`,
`archive.manifest`, `transforms`) are pure. `client` is the only module that calls a cluster.
"""
