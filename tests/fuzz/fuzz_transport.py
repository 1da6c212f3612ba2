"""Fuzz the transport, led by coverage: `make fuzz` (FUZZ_MINUTES).

What does harm is written to build/fuzz; put into tests/fuzz/corpus it is replayed by the ordinary
tests. Options are those of libFuzzer.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["tidemill"]):
    from tests.fuzz.target import try_input

if __name__ == "__main__":
    atheris.Setup(sys.argv, try_input)
    atheris.Fuzz()
