"""Contexts of the command line: named clusters, with their address and credentials (ADR 0097).

~/.config/tidemill/contexts.yaml

current: prod                          the context in use; missing: none
contexts:
prod:
address: https://prod:8080         of the admin API
caFile: /etc/tidemill/ca.pem       optional
credentialsFile: /etc/tidemill/ops  optional: as ~/.config/tidemill/credentials
protected: true                    changes ask for the name; default: false
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

import typer

from tidemill.cli.credentials import api_of, config_folder
from tidemill.common.exit_codes import EXIT_REFUSED, EXIT_USAGE
from tidemill.common.private_files import make_private_folder, read_private, replace_private
from tidemill.common.prompts import fail
from tidemill.common.rest_client import Json

FILE_BYTES_MAX: Final = 64 << 10  # several hundred contexts
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
NAME_TEXT: Final = "1 to 63 letters, digits, dots, hyphens and underscores; first a letter or digit"


class MalformedContexts(ValueError):
    """The file of contexts has wrong content; the message says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterContext:
    """A named cluster."""

    name: str
    address: str  # URL of the admin API
    ca_file: Path | None = None
    credentials_file: Path | None = None
    is_protected: bool = False  # changes ask for the name

    def is_for(self, address: str) -> bool:
        """Whether the admin API at an address is the one of this context."""
        is_same_scheme = self.address.partition("://")[0] == address.partition("://")[0]
        return is_same_scheme and api_of(self.address) == api_of(address)

    def as_json(self) -> dict[str, Json]:
        """Return the fields of the file."""
        fields: dict[str, Json] = {"address": self.address}
        if self.ca_file is not None:
            fields["caFile"] = str(self.ca_file)
        if self.credentials_file is not None:
            fields["credentialsFile"] = str(self.credentials_file)
        if self.is_protected:
            fields["protected"] = True
        return fields


@dataclass(frozen=True, slots=True)
class Contexts:
    """The content of the file."""

    by_name: Mapping[str, ClusterContext] = field(default_factory=dict)
    current: str = ""  # the context in use; "": none

    def get(self, name: str) -> ClusterContext:
        """Return a context. Ends the command if it is missing."""
        if name not in self.by_name:
            known = ", ".join(sorted(self.by_name)) or "none; see `tidemill context create --help`"
            fail(f"there is no context {name!r}; there are: {known}", EXIT_REFUSED)
        return self.by_name[name]


def contexts_file() -> Path:
    """Return the path of the file."""
    return config_folder() / "contexts.yaml"


def read_contexts() -> Contexts:
    """Return the contexts of the file; none without a file. Ends the command if it is malformed."""
    try:
        file = contexts_file()
        if not file.exists():
            return Contexts()
    except (OSError, RuntimeError):
        return Contexts()  # A container need not have a home folder.
    import yaml  # Most commands need no YAML.

    try:
        text = read_private(str(file), bytes_max=FILE_BYTES_MAX)
        if not text.isascii():
            raise ValueError("it has characters outside of ASCII")
        return _parsed(yaml.safe_load(text))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"cannot read the contexts in {file}: {error}") from error


def save_contexts(contexts: Contexts) -> None:
    """Replace the file in one step. Ends the command if it cannot be written."""
    import yaml

    content: dict[str, Json] = {"current": contexts.current} if contexts.current else {}
    content["contexts"] = {name: each.as_json() for name, each in sorted(contexts.by_name.items())}
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=False)
    if len(text) > FILE_BYTES_MAX:
        fail(f"the file of contexts would be longer than {FILE_BYTES_MAX} bytes", EXIT_USAGE)
    try:
        make_private_folder(contexts_file().parent)
        replace_private(contexts_file(), text)
    except (OSError, RuntimeError) as error:
        fail(f"cannot save the contexts: {error}", EXIT_USAGE)


def _parsed(content: object) -> Contexts:
    """Check the content of the file. Raises MalformedContexts."""
    fields = _fields(content if content is not None else {}, "the file", {"current", "contexts"})
    named = fields.get("contexts") or {}
    if not isinstance(named, dict):
        raise MalformedContexts("contexts is not a mapping of names")
    by_name = {str(name): _parsed_context(str(name), each) for name, each in named.items()}
    current = fields.get("current") or ""
    if current and current not in by_name:
        raise MalformedContexts(f"current is {current!r}, which is not a context")
    return Contexts(by_name, cast(str, current))


def _parsed_context(name: str, content: object) -> ClusterContext:
    what = f"context {name!r}"
    if not NAME.fullmatch(name):
        raise MalformedContexts(f"{what} is not a name: {NAME_TEXT}")
    known = {"address", "caFile", "credentialsFile", "protected"}
    fields = _fields(content, what, known)
    is_protected = fields.pop("protected", False)
    if not isinstance(is_protected, bool):
        raise MalformedContexts(f"{what}: protected is neither true nor false")
    texts = {key: value for key, value in fields.items() if isinstance(value, str) and value}
    if wrong := sorted(fields.keys() - texts.keys()):
        raise MalformedContexts(f"{what}: {wrong[0]} is not a text")
    if "address" not in texts:
        raise MalformedContexts(f"{what} has no address")
    ca_file, credentials_file = texts.get("caFile"), texts.get("credentialsFile")
    return ClusterContext(
        name=name,
        address=texts["address"],
        ca_file=None if ca_file is None else Path(ca_file),
        credentials_file=None if credentials_file is None else Path(credentials_file),
        is_protected=is_protected,
    )


def _fields(content: object, what: str, known: set[str]) -> dict[str, object]:
    if not isinstance(content, dict):
        raise MalformedContexts(f"{what} is not a mapping")
    if unknown := sorted(str(key) for key in content if key not in known):
        raise MalformedContexts(
            f"{what} has the unknown key {unknown[0]!r}; known: {sorted(known)}"
        )
    return dict(content)
