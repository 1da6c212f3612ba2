"""The archive: Parquet files, and the manifest that alone says which of them count (ADR 0050)."""
