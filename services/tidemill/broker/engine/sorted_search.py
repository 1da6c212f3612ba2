"""Search in sorted arrays.

`np.isin` and `np.unique` without further results import `numpy.ma`, which costs every start 30 ms.
"""

from __future__ import annotations

import numpy as np


def is_among(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return which of `values` are in the sorted array `ordered`."""
    if not len(ordered):
        return np.zeros(len(values), np.bool_)
    indexes = np.searchsorted(ordered, values.astype(ordered.dtype))
    found: np.ndarray = ordered[np.minimum(indexes, len(ordered) - 1)] == values
    return found
