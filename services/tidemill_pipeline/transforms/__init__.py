"""Pure transforms, DataFrame to DataFrame: no cluster, no clock, no files."""
