"""YAML that people paste into a form, as the JSON value that it means."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Final

import yaml

from tidemill.common.yaml_loader import load_yaml

VALUES_MAX: Final = 200_000
YAML_CHARS_MAX: Final = 1 << 17  # some 0.1 s, in which the process does nothing else; JSON is fast


def json_of_yaml(text: str) -> Any:
    """Return the value of a YAML or JSON text. Raises ValueError, with the place of an error.

    An alias of YAML may repeat a large value very often, so the number of values is limited.
    """
    with contextlib.suppress(ValueError):
        return json.loads(text)
    if len(text) > YAML_CHARS_MAX:
        raise ValueError(f"YAML has at most {YAML_CHARS_MAX} characters here; send JSON")
    try:
        value = load_yaml(text)
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
