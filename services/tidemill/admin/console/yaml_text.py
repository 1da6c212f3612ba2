"""YAML that people paste into a form, as the JSON value that it means."""

from __future__ import annotations

import json
from typing import Any, Final

import yaml

VALUES_MAX: Final = 200_000


def json_of_yaml(text: str) -> Any:
    """Return the value of a YAML or JSON text. Raises ValueError, with the place of an error.

    An alias of YAML may repeat a large value very often, so the number of values is limited.
    """
    try:
        value = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    except yaml.YAMLError as error:
        raise ValueError(f"this is neither YAML nor JSON: {' '.join(str(error).split())}") from None
    left = [value]
    for _ in range(VALUES_MAX):
        if not left:
            break
        part = left.pop()
        left += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    if left:
        raise ValueError(f"it has more than {VALUES_MAX} values")
    # Dates and other values of YAML alone become their text.
    return json.loads(json.dumps(value, default=str))
