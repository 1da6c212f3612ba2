"""A repair of the generator of schemathesis 4.32, loaded by its variable SCHEMATHESIS_HOOKS.

It decodes each generated value of a path before it encodes it. A name such as `a%EFb` is valid for
the API, and becomes another, invalid one. Later it decodes what this function has encoded.
"""

from typing import Any
from urllib.parse import quote

from schemathesis.specs.openapi.adapter import parameters


def _encode(value: dict[str, Any]) -> dict[str, Any]:
    try:
        return {
            name: quote(each, safe="") if isinstance(each, str) else each
            for name, each in value.items()
        }
    except UnicodeEncodeError:
        return value  # A later filter drops them.


assert callable(parameters._quote_all_safe), "schemathesis has changed: is the repair needed still?"
parameters._quote_all_safe = _encode
