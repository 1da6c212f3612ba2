"""One module per record on disk: drawing, struct, encode, decode; nothing else."""
