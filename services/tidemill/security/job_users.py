"""The users of release jobs: one user for each job, with the rights of its calls alone (ADR 0083).

A folder has a file with one secret per job. The admin process keeps these users up to date. The
name of a user follows from its job, so a file changes no other user.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from tidemill.common.errors import BadRequest
from tidemill.common.private_files import read_private
from tidemill.security.acl import AccessEntry, parse_entry
from tidemill.security.identities import check_entries, check_secret

USER_PREFIX: Final = "tidemill-job-"
TRIAL: Final = "tidemill-trial"  # topic and consumer group of the trial
FILE_BYTES_MAX: Final = 1_024  # a larger file is not a secret


class Job(StrEnum):
    """A job that calls the REST API. The value is the name of its file."""

    CHECK = "check"
    PROVISION = "provision"
    ROLL = "roll"
    VOLUMES = "volumes"
    TRIAL = "trial"

    @property
    def user(self) -> str:
        """The name of its user."""
        return f"{USER_PREFIX}{self.value}"


def _rights(*texts: str) -> tuple[AccessEntry, ...]:
    """Return entries from texts of the form `Get Update Cluster:AREA`."""
    entries = []
    for text in texts:
        *actions, resource = text.split()
        entries.append(parse_entry(resource, actions))
    return check_entries(tuple(entries))


# The calls of each job are in services/tidemill/release.
RIGHTS: Final[Mapping[Job, tuple[AccessEntry, ...]]] = {
    # GET /broker-groups
    Job.CHECK: _rights("Get Cluster:broker-groups"),
    # GET and PUT /broker-groups, PUT /topics, PUT /groups
    Job.PROVISION: _rights(
        "Get Create Update Cluster:broker-groups", "Create Update Topic:*", "Create Update Group:*"
    ),
    # GET /broker-groups
    Job.ROLL: _rights("Get Cluster:broker-groups"),
    # GET /replicas/GROUP, POST /replicas/GROUP:transfer
    Job.VOLUMES: _rights("Get Update Cluster:replicas"),
    # PUT /topics and /groups, and then a producer and a consumer at the proxies
    Job.TRIAL: _rights(f"Create Update Pub Sub Topic:{TRIAL}", f"Create Update Sub Group:{TRIAL}"),
}


class JobSecrets(dict[Job, str]):
    """Secrets by job. Their text has no secret."""

    def __repr__(self) -> str:
        return f"JobSecrets({', '.join(self)})"

    def is_same(self, other: JobSecrets) -> bool:
        """Whether both have the same secrets."""
        return self.keys() == other.keys() and all(
            hmac.compare_digest(secret, other[job]) for job, secret in self.items()
        )


def files_of(folder: str) -> list[str]:
    """Return the paths of the files of all jobs."""
    return [str(Path(folder) / job) for job in Job]


class JobFiles(NamedTuple):
    """The content of a folder."""

    secrets: JobSecrets
    unusable: dict[Job, str]  # the reason by job; no reason has the content of a file


def read_job_files(folder: str) -> JobFiles:
    """Read the secrets of a folder. A job without a file has none.

    One malformed, unreadable or too open file has no effect on the other jobs. Raises ValueError
    if the folder is missing.
    """
    if not Path(folder).is_dir():
        raise ValueError("it is not a folder")
    found = JobFiles(JobSecrets(), {})
    for job in Job:
        try:
            text = read_private(str(Path(folder) / job), bytes_max=FILE_BYTES_MAX)
            found.secrets[job] = check_secret(text.strip())
        except FileNotFoundError:
            continue
        except OSError as error:
            found.unusable[job] = error.strerror or str(error)
        except (ValueError, BadRequest) as error:
            found.unusable[job] = str(error)
    return found
