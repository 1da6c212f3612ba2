"""Checksums of many rows at once."""

from __future__ import annotations

from random import Random
from zlib import crc32

import numpy as np
import pytest

from tidemill.broker.engine.layout.array_crc import crc32_of_rows


@pytest.mark.parametrize("width", [1, 28, 60])
def test_each_row_gets_the_checksum_of_zlib(width: int) -> None:
    raw = Random(width).randbytes(500 * width) + bytes(width) + b"\xff" * width
    rows = np.frombuffer(raw, dtype=np.uint8).reshape(-1, width)
    expected = [crc32(raw[at : at + width]) for at in range(0, len(raw), width)]
    assert crc32_of_rows(rows).tolist() == expected
