"""Support bundles: documents and log lines of a cluster in one file (ADR 0101)."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import re
import secrets
import tarfile
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Final, NamedTuple, final

from tidemill.admin.http.rest_calls import CallProblem, Document, RestCalls
from tidemill.common.clock import Clock
from tidemill.common.slices import run_in_turns

BUNDLE_BYTES_MAX: Final = 64 << 20
KEPT_MAX: Final = 2
KEPT_MS: Final = 3_600_000
AUDIT_MS: Final = 86_400_000
PAGES_MAX: Final = 50
PAGE_ITEMS: Final = 1_000
LEFT_OUT: Final = "left-out.txt"
# The documents without parameters, and the list of those with pages.
DOCUMENTS: Final = (
    "/overview",
    "/definitions",
    "/processes",
    "/slow-calls",
    "/broker-groups",
    "/replicas",
    "/storage",
    "/security",
    "/dead-letters/summary",
)
LISTS: Final = {
    "/topics": "topics",
    "/groups": "groups",
    "/operations": "operations",
    "/clients": "clients",
    "/audit": "records",
}
# A name of anything: of topics, consumer groups, users and clients, and an IPv4 address.
_WORD: Final = re.compile(r"[A-Za-z0-9_%|.@#+-]+")
_ADDRESS: Final = re.compile(r"(\d{1,3}\.){3}\d{1,3}")
_NAMED: Final = ("topics", "groups", "roles", "users")


class BundledFile(NamedTuple):
    """A file of a bundle."""

    name: str
    text: str


class SupportBundle(NamedTuple):
    """A finished bundle."""

    content: bytes  # tar.gz
    user: str  # that has started it; "": no verified user
    made_at_ms: int


@final
class SupportBundles:
    """The newest bundles, by the id of their operation."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: dict[str, SupportBundle] = {}

    def find(self, id_: str) -> SupportBundle | None:
        """Return a bundle that is not older than KEPT_MS."""
        self._forget()
        return self._kept.get(id_)

    def keep(self, id_: str, content: bytes, user: str) -> None:
        """Keep a bundle, and forget older ones."""
        self._forget()
        while len(self._kept) >= KEPT_MAX:
            del self._kept[next(iter(self._kept))]
        self._kept[id_] = SupportBundle(content, user, self._clock.wall_ms())

    def _forget(self) -> None:
        end_ms = self._clock.wall_ms() - KEPT_MS
        for id_ in [id_ for id_, one in self._kept.items() if one.made_at_ms < end_ms]:
            del self._kept[id_]


async def collected_files(
    calls: RestCalls, logs: Iterable[tuple[str, list[str]]], now_ms: int
) -> AsyncIterator[BundledFile]:
    """Yield all files of a bundle. A document that cannot be read is its error."""
    processes: Document = {}
    for path in DOCUMENTS:
        document = await _read(calls, path)
        if path == "/processes":
            processes = document
        yield _file(path, document)
    for path, field in LISTS.items():
        query: dict[str, Any] = {"fromMs": now_ms - AUDIT_MS} if path == "/audit" else {}
        yield _file(path, await _read_list(calls, path, field, query))
    for process in processes.get("items", ()):
        path = f"/processes/{process['name']}/settings"
        yield _file(path, await _read(calls, path))
    for name, lines in logs:
        yield BundledFile(f"logs/{name}.log", "".join(f"{line}\n" for line in lines))


async def _read(calls: RestCalls, path: str, query: dict[str, Any] | None = None) -> Document:
    try:
        return await calls.get(path, **(query or {}))
    except CallProblem as problem:
        return {"problem": f"{problem.status.value} {problem.title}: {problem.detail}"}


async def _read_list(calls: RestCalls, path: str, field: str, query: dict[str, Any]) -> Document:
    """Return a list with at most PAGES_MAX pages, or what was read before an error."""
    found: list[Any] = []
    asked = {**query, "pageSize": PAGE_ITEMS}
    for _ in range(PAGES_MAX):
        page = await _read(calls, path, asked)
        found += page.get(field, ())
        if "problem" in page:
            return {field: found, "problem": page["problem"]}
        if "nextPageToken" not in page:
            return {field: found}
        asked["pageToken"] = page["nextPageToken"]
    return {field: found, "problem": f"only the first {PAGES_MAX * PAGE_ITEMS} are listed"}


def _file(path: str, document: Document) -> BundledFile:
    return BundledFile(f"{path.strip('/')}.json", json.dumps(document, indent=1) + "\n")


async def bundle_of(files: list[BundledFile], *, is_anonymous: bool) -> bytes:
    """Return the tar.gz of files. It takes turns with other work, and compresses in a thread."""
    texts = [each.text for each in files]
    if is_anonymous:
        names = _names_of(files)
        key = secrets.token_bytes(16)
        for number, text in enumerate(texts):
            lines: list[str] = []
            await run_in_turns(_anonymized(text, names, key, lines))
            texts[number] = "".join(lines)
    named = [BundledFile(each.name, text) for each, text in zip(files, texts, strict=True)]
    return await asyncio.to_thread(_packed, named)


def _names_of(files: list[BundledFile]) -> frozenset[str]:
    """Return the names in the definitions and in the lists."""
    names: set[str] = set()
    for file in files:
        if not file.name.endswith(".json") or file.name.startswith("processes/"):
            continue
        document = json.loads(file.text)
        for kind in _NAMED:
            names |= {str(one["name"]) for one in document.get(kind) or () if "name" in one}
        rows = [*(document.get("clients") or ()), *(document.get("records") or ())]
        for row in rows:
            names |= {str(row[field]) for field in ("user", "clientId") if field in row}
    return frozenset(names - {"", "topics", "groups"})


def _anonymized(text: str, names: frozenset[str], key: bytes, lines: list[str]) -> Iterator[None]:
    """Fill `lines` with the lines of a text without names. The namespace of a name stays one."""

    def word(found: re.Match[str]) -> str:
        whole = found.group()
        bare = whole.rpartition("%")[2] if whole.startswith(("%RETRY%", "%DLQ%")) else whole
        if whole in names or bare in names or _ADDRESS.fullmatch(whole):
            return f"hidden-{hashlib.blake2s(bare.encode(), key=key, digest_size=5).hexdigest()}"
        return whole

    for line in text.splitlines(keepends=True):
        lines.append(_WORD.sub(word, line))
        yield


def _packed(files: list[BundledFile]) -> bytes:
    packed = io.BytesIO()
    left_out = []
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for file in files:
            # Text shrinks to a tenth, and at worst it does not shrink.
            if packed.tell() + len(file.text) > BUNDLE_BYTES_MAX:
                left_out.append(file.name)
                continue
            _add(archive, file)
        if left_out:
            _add(archive, BundledFile(LEFT_OUT, "".join(f"{name}\n" for name in left_out)))
    return packed.getvalue()


def _add(archive: tarfile.TarFile, file: BundledFile) -> None:
    content = file.text.encode(errors="replace")
    entry = tarfile.TarInfo(f"tidemill-support/{file.name}")
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
