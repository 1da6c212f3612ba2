"""Coverage-guided fuzzing of the transport: `make fuzz` (FUZZ_MINUTES).

Inputs that cause errors are written to build/fuzz. In tests/fuzz/corpus, the ordinary tests replay
them. The options are those of libFuzzer.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["tidemill"]):
    from tests.fuzz.target import try_input

if __name__ == "__main__":
    atheris.Setup(sys.argv, try_input)
    atheris.Fuzz()
