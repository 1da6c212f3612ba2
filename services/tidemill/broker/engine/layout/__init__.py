"""One module a record on disk: drawing, struct, encode, decode; nothing else."""
