"""The jobs: each reads, calls pure transforms, writes, and can run twice without harm."""
