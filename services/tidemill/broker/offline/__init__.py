"""Work on a data directory without its broker: check it, copy it, mend it.

Knows the layouts on disk and nothing of the engine's objects: what is looked at may be damaged in
any way, or belong to a broker that runs.
"""
