"""Support bundles: documents and log lines of a cluster in one file (ADR 0101)."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import secrets
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, final

from tidemill.admin.cluster.bundle_names import HiddenNames
from tidemill.admin.http.rest_calls import CallProblem, Document, RestCalls
from tidemill.common.clock import Clock
from tidemill.common.slices import run_in_turns

BUNDLE_BYTES_MAX: Final = 64 << 20
KEPT_MAX: Final = 2
# Of the kept bundles and the one that is being packed: the memory limit of the chart is 384 MiB.
KEPT_BYTES_MAX: Final = BUNDLE_BYTES_MAX
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


class BundledFile(NamedTuple):
    """A file of a bundle."""

    name: str
    text: str


class SupportBundle(NamedTuple):
    """A finished bundle."""

    content: bytes  # tar.gz
    user_id: int  # of the user that has started it; NO_OWNER: no verified user
    made_at_ms: int


# Collects the files of a bundle. None: its operation was cancelled.
CollectFiles = Callable[[], Awaitable[list[BundledFile] | None]]


@final
class SupportBundles:
    """The newest bundles, by the id of their operation."""

    def __init__(self, clock: Clock, *, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._clock = clock
        self._bytes_max = bytes_max
        self._kept: dict[str, SupportBundle] = {}  # the oldest first
        self._one_by_one = asyncio.Lock()  # The files of a bundle are in memory from the first on.

    def find(self, id_: str) -> SupportBundle | None:
        """Return a bundle that is not older than KEPT_MS."""
        self._forget()
        return self._kept.get(id_)

    async def make(
        self, id_: str, user_id: int, collect: CollectFiles, *, is_anonymous: bool
    ) -> None:
        """Collect, pack and keep a bundle, one at a time. Forget older ones for its memory."""
        async with self._one_by_one:
            files = await collect()
            if files is None:
                return
            text_bytes = sum(len(each.text) for each in files)
            self._make_room(min(text_bytes, BUNDLE_BYTES_MAX))
            content = await bundle_of(files, is_anonymous=is_anonymous)
            self._make_room(len(content))
            self._kept[id_] = SupportBundle(content, user_id, self._clock.wall_ms())

    def _make_room(self, size_bytes: int) -> None:
        """Forget the oldest bundles until one of this size fits."""
        self._forget()
        while self._kept and (
            len(self._kept) >= KEPT_MAX
            or sum(len(one.content) for one in self._kept.values()) + size_bytes > self._bytes_max
        ):
            del self._kept[next(iter(self._kept))]

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
        texts = await _anonymized(files)
    named = [BundledFile(each.name, text) for each, text in zip(files, texts, strict=True)]
    return await asyncio.to_thread(_packed, named)


async def _anonymized(files: list[BundledFile]) -> list[str]:
    """Return the texts of files without names."""
    names = HiddenNames(secrets.token_bytes(16))
    texts: list[str] = []

    def replacing() -> Iterator[None]:
        for file in files:
            names.add_processes(file.name, file.text)
        for is_last in (False, True):
            for file in files:
                text = yield from names.replaced(file.name, file.text)
                if is_last:
                    texts.append(text)

    await run_in_turns(replacing())
    return texts


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
