"""Work on a data directory without its broker: check, copy, mend and rebuild.

The code here uses the layouts on disk and no objects of the engine. The directory may be damaged in
any way, and a broker may run on it.
"""
