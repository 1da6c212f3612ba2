"""The keys of the secrets of users: show them, add one, and encrypt under it (ADR 0080)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Request

from tidemill.admin.audit.author import CREATE
from tidemill.admin.audit.controller_actions import recorded
from tidemill.admin.cluster.key_rotation import count_secrets, encrypt_page, plan_page
from tidemill.admin.cluster.security_client import FoundItem, Item, SecurityClient
from tidemill.admin.cluster.security_states import SecurityStates, find_states
from tidemill.admin.json.security import (
    AddedKeyView,
    EncryptedSecretsView,
    EncryptionSettings,
    KeysView,
    KeyView,
)
from tidemill.admin.routes import Caller, ChangeAuthor, Cluster, DryRun, SecurityItems
from tidemill.admin.routes.security import Keys, mode_of
from tidemill.common.errors import Conflict
from tidemill.security.key_file import add_first_key, read_keys
from tidemill.security.secret_keys import KEYS_MAX, SecretKeys, new_key_id
from tidemill.security.table import MODE, SealingKey, mode_item, sealing_key_of
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["security"])


def key_file_of(request: Request) -> str:
    """Return the path of the key file; "" without one."""
    file: str = request.app.state.key_file
    return file


KeyFilePath = Annotated[str, Depends(key_file_of)]


@router.get("/security/keys")
async def list_keys(items: SecurityItems, cluster: Cluster, keys: Keys) -> KeysView:
    """Show how many secrets each key encrypts, and the processes without the first key."""
    held = _held(keys)
    counts = await count_secrets(items)
    states = await find_states(cluster)
    first_key_id = held.first
    return KeysView(
        first_key_id=first_key_id,
        keys=[
            KeyView(id=key_id, secrets=counts[key_id], held=key_id in held.ids)
            for key_id in dict.fromkeys([*held.ids, *sorted(counts)])
        ],
        lacking=_lacking(states, held),
    )


@router.post("/security:addKey")
async def add_key(
    items: SecurityItems,
    cluster: Cluster,
    author: ChangeAuthor,
    keys: Keys,
    file: KeyFilePath,
    dry_run: DryRun = False,
) -> AddedKeyView:
    """Add a new first key to the key file of this process.

    If another key still encrypts a secret, the last rotation is unfinished. Its key is the new one.
    """
    _held(keys)
    try:
        # The process may not have read its last change yet.
        held = await asyncio.to_thread(read_keys, file)
    except (OSError, ValueError) as error:
        raise Conflict(f"security_key_file {file} cannot be read: {error}") from None
    counts = await count_secrets(items)
    if not counts[held.first] or any(counts[key_id] for key_id in held.ids[1:]):
        return AddedKeyView(key_id=held.first, is_new=False, dry_run=dry_run)
    if len(held.ids) >= KEYS_MAX:
        unused = " ".join(each for each in held.ids if not counts[each])
        raise Conflict(
            f"security_key_file has {len(held.ids)} keys; at most {KEYS_MAX} are allowed. Remove"
            " lines of keys that encrypt no secret from the files of all proxies and admin"
            f" processes, then repeat this: {unused}. A backup of the log needs its keys"
        )
    key_id = new_key_id()
    if not dry_run:

        async def act() -> str:
            try:
                return await asyncio.to_thread(add_first_key, file, key_id, after=held.first)
            except (OSError, ValueError) as error:
                raise Conflict(
                    f"this admin process cannot add a key to its security_key_file: {error}. Add a"
                    " first line `KEYID HEX64` to the file of all proxies and admin processes (in"
                    " Kubernetes: raise security.keyRotation and upgrade the release), then run"
                    " `tidemill security rotate-key --await-key`"
                ) from None

        author_of_key = author.of("Cluster:security", CREATE)
        first = await recorded(cluster, author_of_key, act, after={"keyId": key_id})
        return AddedKeyView(key_id=first, is_new=first == key_id, dry_run=dry_run)
    return AddedKeyView(key_id=key_id, is_new=True, dry_run=dry_run)


@router.post("/security:encryptSecrets", response_model_exclude_none=True)
async def encrypt_secrets(
    settings: EncryptionSettings,
    items: SecurityItems,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    keys: Keys,
    dry_run: DryRun = False,
) -> EncryptedSecretsView:
    """Encrypt the secrets of the next 100 users under the first key. Clients do not notice it.

    A dry run counts these secrets. A proxy without the key could not verify them, so all proxies
    must have reported it.
    """
    held = _held(keys)
    if held.first != settings.key_id:
        raise Conflict(
            f"the first key of this admin process is {held.first}, not {settings.key_id}; it reads"
            " a changed file within 5 s"
        )
    lacking = _lacking(await find_states(cluster), held)
    if lacking and not settings.force:
        raise Conflict(
            f"{', '.join(lacking)}: the key {held.first} is not reported; wait until their key"
            " files have it, or use force if these processes are gone"
        )
    if dry_run:
        page = await plan_page(items, held, settings.page_token or "")
        return EncryptedSecretsView(
            dry_run=True,
            encrypted=page.encrypted,
            undecryptable=page.undecryptable,
            next_page_token=page.last_name,
        )
    audit = author.of("Cluster:security")
    await _name_sealing_key(items, held, caller=caller, audit=audit)
    page = await encrypt_page(items, held, settings.page_token or "", caller=caller, audit=audit)
    return EncryptedSecretsView(
        dry_run=False,
        encrypted=page.encrypted,
        undecryptable=page.undecryptable,
        next_page_token=page.last_name,
    )


async def _name_sealing_key(
    items: SecurityClient, keys: SecretKeys, *, caller: str, audit: pb.ChangeAuthor
) -> None:
    """Let all admin processes encrypt new secrets under the first key of this one, or none."""
    key = SealingKey(keys.first, keys.checks[0])

    def decide(found: FoundItem) -> list[Item]:
        is_named = sealing_key_of(found.encoded) == key
        return [] if is_named else [mode_item(mode_of(found), key)]

    await items.change(MODE, "", decide, caller=caller, audit=audit)


def _held(keys: Callable[[], SecretKeys | None]) -> SecretKeys:
    """Return the keys of this process. Raises Conflict without a key file."""
    held = keys()
    if held is None:
        raise Conflict("this admin process has no security_key_file; set it first")
    return held


def _lacking(states: SecurityStates, keys: SecretKeys) -> list[str]:
    """Return the proxies that have not reported the first key, and the unreachable processes."""
    found = []
    for name, state in states.states:
        checks = dict(zip(state.key_ids, state.key_checks, strict=True))
        if keys.first not in checks:
            found.append(name)
        elif checks[keys.first] != keys.checks[0]:
            found.append(f"{name} with another key of the same id")
    return [*found, *states.unreachable]
