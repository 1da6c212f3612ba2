"""`tidemill release ...`: the jobs of the Helm chart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tidemill.cli.rest import client_of, find_sendable, options_of
from tidemill.common.exit_codes import EXIT_REFUSED, EXIT_UNREACHABLE, EXIT_USAGE
from tidemill.common.prompts import fail, warn
from tidemill.common.rest_client import Json, RestOptionError, RestRejection
from tidemill.release.invalid_input import InvalidInput
from tidemill.release.patient_rest import (
    TIMEOUT_S,
    TOKEN_EXCHANGE_S,
    ForeignAnswer,
    PatientRestClient,
    WaitTimeout,
)

if TYPE_CHECKING:
    import grpc
    from kubernetes.client import ApiClient

    from tidemill.release.certificates import CertificatePlan
    from tidemill.release.kubernetes_secrets import Secrets
    from tidemill.release.trial import TrialUser

app = typer.Typer(
    no_args_is_help=True,
    help="""Run the jobs of the Helm chart.

They make certificates, check upgrades, create the broker groups, topics and consumer groups of the
values, and try the release. Operators rarely need them.
""",
)

WRITES_MAX = 3  # tries if another process changes a Secret at the same time

Patience = Annotated[
    float, typer.Option("--patience-s", min=0, help="Seconds to wait for processes that start.")
]

Endpoint = Annotated[str, typer.Option(help="host:port of the proxies.")]
HasTls = Annotated[bool, typer.Option("--tls", help="Clients are served with TLS.")]
CaFile = Annotated[
    Path | None,
    typer.Option(
        help="Authorities (PEM) of the certificate of the proxies. Default: public authorities."
    ),
]
CertificateFile = Annotated[
    Path | None, typer.Option(help="Client certificate (PEM), if the proxies require one.")
]
KeyFile = Annotated[Path | None, typer.Option(help="Its key, PEM.")]


@app.command("certificates")
def make_certificates(
    plan: Annotated[str, typer.Option(help="Secrets to create, as JSON.")],
) -> None:
    """Make and renew the Secrets of a release, in the namespace of this pod.

    These are certificates, the token of the REST API, the key that encrypts the secrets of users,
    the first administrator, and the secrets of the users of jobs.
    """
    from tidemill.release.certificates import CertificatePlan
    from tidemill.release.kubernetes_secrets import Secrets

    try:
        given = json.loads(plan)
        labels = dict(given["labels"])
        wanted = CertificatePlan(
            authority=given["authority"],
            certificates={name: tuple(names) for name, names in given["certificates"].items()},
            tokens=given["tokens"],
            key_files={name: int(newest) for name, newest in given["keyFiles"].items()},
            administrators=given["administrators"],
            job_users={name: tuple(jobs) for name, jobs in given["jobUsers"].items()},
            days=given["days"],
            authority_days=given["authorityDays"],
        )
    except KeyError as error:
        fail(f"--plan lacks {error}", EXIT_USAGE)
    except (ValueError, TypeError, AttributeError) as error:
        fail(f"--plan is not an object as the chart writes it: {error}", EXIT_USAGE)
    secrets = Secrets(*_kubernetes())
    with _explained():
        _write_secrets(secrets, wanted, labels)


def _write_secrets(secrets: Secrets, wanted: CertificatePlan, labels: dict[str, str]) -> None:
    """Write the Secrets that are missing or expire soon; report each."""
    from tidemill.release.certificates import ForeignSecret, secrets_to_write
    from tidemill.release.kubernetes_secrets import SecretChanged

    names = [wanted.authority, *wanted.certificates, *wanted.tokens]
    names += [*wanted.key_files, *wanted.administrators, *wanted.job_users]
    for _ in range(WRITES_MAX):
        found = {name: data for name in names if (data := secrets.find(name)) is not None}
        try:
            written = secrets_to_write(wanted, found, datetime.now(UTC))
            for name, data in written.items():
                secrets.write(name, data, labels)
                typer.echo(f"wrote the Secret {name}")
        except SecretChanged:
            continue
        except ForeignSecret as error:
            fail(str(error), EXIT_REFUSED)
        typer.echo(f"{len(names) - len(written)} of {len(names)} Secrets are as they should be")
        return
    fail(
        f"another process changed the Secrets {WRITES_MAX} times; stop it and run the job again",
        EXIT_REFUSED,
    )


@app.command("provision")
def provide_what_is_wanted(
    context: typer.Context,
    file: Annotated[Path, typer.Option(help="File with the values, written by the chart.")],
    patience_s: Patience = 300.0,
) -> None:
    """Add the broker groups, topics and consumer groups of the values; delete nothing."""
    from tidemill.release.provisioning import ReleaseValues, provide

    with _explained():
        try:
            values = ReleaseValues.parse(_read(file))
        except InvalidInput as error:
            fail(f"{file}: {error}", EXIT_USAGE)
        provide(_rest(context, patience_s), values, typer.echo)


@app.command("roll")
def roll_broker_groups(
    context: typer.Context,
    stateful_sets: Annotated[
        str, typer.Option(help="StatefulSets of the broker groups, separated by commas.")
    ],
    patience_s: Patience = 300.0,
) -> None:
    """Replace outdated pods of broker groups one by one.

    The next pod is replaced when the broker group of the previous one is reachable again.
    """
    from tidemill.release.rolling import roll

    names = [name.strip() for name in stateful_sets.split(",")]
    if not all(names):
        fail(
            f"--stateful-sets: a name is empty in {stateful_sets!r}; name the StatefulSets of the"
            " broker groups, separated by commas",
            EXIT_USAGE,
        )
    client, namespace = _kubernetes()
    with _explained():
        rest = _rest(context, patience_s)
        roll(client, namespace, names, rest, typer.echo)


Plan = Annotated[str, typer.Option(help="Broker groups and the size of their volumes, as JSON.")]


@app.command("grow")
def grow_volumes(
    context: typer.Context,
    plan: Plan,
    installed: Annotated[
        str, typer.Option(help="ConfigMap with the state of the installed release.")
    ],
    patience_s: Patience = 60.0,
) -> None:
    """Enlarge the volumes of running brokers, before an upgrade with a larger size.

    It expands the claims and replaces the StatefulSets, whose pods run on.
    """
    from tidemill.release.growing import GroupVolumes, grow
    from tidemill.release.volume_calls import GrowthRefused

    with _explained():
        wanted = GroupVolumes.parse(plan)
        client, namespace = _kubernetes()
        try:
            pause = _rest(context, patience_s).pause
            grow(client, namespace, wanted, installed, pause, typer.echo)
        except GrowthRefused as error:
            fail(str(error), EXIT_REFUSED)


@app.command("replace-volumes")
def replace_small_volumes(
    context: typer.Context, plan: Plan, patience_s: Patience = 24 * 3600.0
) -> None:
    """Replace volumes that cannot grow, one replica after the other.

    Each replica gets an empty volume and copies the log before the next one is replaced.
    """
    from tidemill.release.growing import GroupVolumes, replace_volumes
    from tidemill.release.volume_calls import GrowthRefused

    with _explained():
        wanted = GroupVolumes.parse(plan)
        client, namespace = _kubernetes()
        rest = _rest(context, patience_s)
        try:
            replace_volumes(client, namespace, wanted, rest, typer.echo)
        except GrowthRefused as error:
            fail(str(error), EXIT_REFUSED)


@app.command("check")
def check_before_an_upgrade(
    context: typer.Context,
    kept: Annotated[str, typer.Option(help="Broker groups of the values, separated by commas.")],
    gone: Annotated[
        str, typer.Option(help="Installed broker groups that are not in the values.")
    ] = "",
    replicated: Annotated[
        str, typer.Option(help="Broker groups of the values with several replicas.")
    ] = "",
    volumes: Annotated[
        str, typer.Option(help="Claims of the values: GROUP=SIZE/CLASS/MODES, with spaces between.")
    ] = "",
    store_format: Annotated[
        int | None, typer.Option(help="Newest store format that the new brokers can read.")
    ] = None,
    installed: Annotated[
        Path | None, typer.Option(help="Folder with the state of the installed release.")
    ] = None,
    release: Annotated[
        str, typer.Option(help="NAMESPACE/NAME of the release. Helm locks it at a failed rollback.")
    ] = "",
    default_security: Annotated[
        bool, typer.Option("--default-security", help="The values leave the security mode open.")
    ] = False,
    without_rest_api: Annotated[
        bool,
        typer.Option(
            "--without-rest-api", help="Do not call the REST API, because the release has none."
        ),
    ] = False,
    patience_s: Patience = 10.0,
) -> None:
    """Reject an upgrade or a rollback after which messages would be lost or brokers not start.

    It would remove a member of the cluster, make a single broker of a broker group of several
    replicas, change claims in a way that Kubernetes refuses, start brokers that cannot read the
    stores, or refuse clients that have no user yet.

    The templates of the chart check an upgrade, too. They do not check a rollback, because its jobs
    belong to the old revision. These jobs know the installed release only from the folder.
    """
    from tidemill.release.provisioning import (
        InstalledRelease,
        find_members_to_remove,
        names_in,
        volumes_in,
    )

    def reject(why: str, status: int = EXIT_REFUSED) -> NoReturn:
        namespace, _, name = release.partition("/")
        locked = f"owner=helm,name={name},status=pending-rollback"
        unlock = f"kubectl delete secret --namespace={namespace} --selector={locked}"
        fail(
            f"{why}. If this was a rollback, unlock the release: {unlock}" if name else why, status
        )

    try:
        wanted = volumes_in(volumes)
    except InvalidInput as error:
        fail(f"--volumes: {error}", EXIT_USAGE)
    try:
        stands = InstalledRelease.read(installed)
    except InvalidInput as error:
        reject(
            f"the recorded state of the installed release cannot be read: {error}. Correct that in"
            " the ConfigMap whose name ends with claims-stay",
            EXIT_USAGE,
        )
    if store_format is not None and stands.store_format > store_format:
        reject(
            f"the new brokers read stores up to format {store_format}, but this release has format"
            f" {stands.store_format}, so they would not start. Keep this release, or restore an"
            f" older backup into a new release (docs/kubernetes/backup-and-restore.md)"
        )
    is_installed = bool(stands.store_format or stands.broker_groups)
    if default_security and is_installed and stands.security_mode != "on":
        reject(
            "security.mode is not set, and its default is on: clients of this release without a"
            " user would be refused. Set security.mode to off; or to permissive, create users, and"
            " then to on (docs/operations/security.md)"
        )
    alone = (stands.replicated & names_in(kept)) - names_in(replicated)
    if alone:
        reject(
            f"{', '.join(sorted(alone))}: a broker group of several replicas cannot become a single"
            " broker, because it would acknowledge messages that only one broker has. Choose a"
            " revision with several replicas (helm history), or change the other values by an"
            " upgrade that keeps brokerGroups[].replicas"
        )
    for group in sorted(stands.volumes.keys() & wanted.keys()):
        if why := stands.volumes[group].why_not(wanted[group]):
            reject(
                f"{group}: {why}, and Kubernetes would refuse that after other changes. Use an"
                " upgrade with the older values and the present brokerGroups and persistence"
            )
    gone = ", ".join(sorted((names_in(gone) | stands.broker_groups) - names_in(kept)))
    if without_rest_api:
        if gone:
            reject(f"{gone}: without a REST API the backlog is unknown")
        typer.echo("no broker group is removed")
        return
    try:
        # Without an answer, a removal is rejected. So the job waits until its new secret is known.
        rest = _rest(context, patience_s, login_patience_s=TOKEN_EXCHANGE_S if gone else None)
        shown = rest.list_items("/broker-groups", "name", "isHome", "state")
    except (RestRejection, RestOptionError, ForeignAnswer, WaitTimeout) as error:
        if gone:
            reject(f"{gone}: the backlog is unknown: {error}", EXIT_UNREACHABLE)
        warn(f"{error}; no broker group is removed, so the upgrade continues")
        return
    if reasons := list(find_members_to_remove(shown, kept.split(","))):
        reject("; ".join(reasons))
    typer.echo("no broker group is lost")


@app.command("trial")
def try_it(
    context: typer.Context,
    endpoint: Endpoint,
    has_tls: HasTls = False,
    ca_file: CaFile = None,
    certificate_file: CertificateFile = None,
    key_file: KeyFile = None,
    patience_s: Patience = TOKEN_EXCHANGE_S,
) -> None:
    """Send, delay, pop and ack through the proxies, with a topic of its own.

    The calls are signed by the user of the command line. Without a secret of a user, the trial
    creates its own user and deletes it at the end, unless the security mode is off.
    """
    from tidemill.release import trial

    credentials = channel_credentials(ca_file, certificate_file, key_file) if has_tls else None
    with _explained():
        rest = _rest(context, patience_s)
        rest.call("PUT", "/topics", trial.TOPIC, body={"messageType": "MIXED", "queues": 1})
        rest.call("PUT", "/groups", trial.GROUP, body={})
        with _trial_user(context, rest) as user, _proxies(endpoint, credentials) as channel:
            trial.run(channel, user, typer.echo)


@contextmanager
def _trial_user(context: typer.Context, rest: PatientRestClient) -> Iterator[TrialUser]:
    """Return the user of the command line, or a new one."""
    from tidemill.release.trial import TrialUser, own_user

    options = options_of(context)
    known = None if options.token else find_sendable(options)
    if known is not None and not known.is_token:
        yield TrialUser(*known.pair)
    else:
        with own_user(rest) as user:
            yield user


@app.command("receive")
def receive_and_ack(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="The topic.")],
    group: Annotated[str, typer.Option(help="The consumer group.")],
    endpoint: Endpoint = "127.0.0.1:8081",
    has_tls: HasTls = False,
    ca_file: CaFile = None,
    certificate_file: CertificateFile = None,
    key_file: KeyFile = None,
) -> None:
    """Receive messages like a consumer, print and ack them.

    The calls are signed by the user of the command line, if it has one.

    Example: tidemill release receive orders --group billing
    """
    from tidemill.release import trial
    from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc

    credentials = channel_credentials(ca_file, certificate_file, key_file) if has_tls else None
    with _proxies(endpoint, credentials) as channel:
        stub = service_pb2_grpc.MessagingServiceStub(channel)
        known = options_of(context).credentials
        user = trial.ANYONE if known is None or known.is_token else trial.TrialUser(*known.pair)
        received = trial.receive(stub, user, topic, group)
        for message in received:
            typer.echo(message.body.decode("utf-8", "replace"))
            trial.ack(stub, user, topic, group, message)
    if not received:
        warn(f"no messages of {topic} are ready for {group}")


@contextmanager
def _proxies(endpoint: str, credentials: grpc.ChannelCredentials | None) -> Iterator[grpc.Channel]:
    """Connect to the proxies, and report errors."""
    import grpc

    from tidemill.release.trial import TrialFailed

    if credentials is not None:
        channel = grpc.secure_channel(endpoint, credentials)
    else:
        channel = grpc.insecure_channel(endpoint)
    with channel:
        try:
            yield channel
        except TrialFailed as error:
            fail(str(error), EXIT_REFUSED)
        except grpc.RpcError as error:
            fail(f"{endpoint} does not answer as a proxy does: {error}", EXIT_UNREACHABLE)


def channel_credentials(
    ca_file: Path | None, certificate_file: Path | None, key_file: Path | None
) -> grpc.ChannelCredentials:
    """Return the trusted authorities and the client certificate for the proxies."""
    import grpc

    if (certificate_file is None) != (key_file is None):
        raise typer.BadParameter("--certificate-file and --key-file belong together")
    if ca_file is not None and not ca_file.exists():
        warn(f"{ca_file} does not exist; using the public authorities")
        ca_file = None
    files = (ca_file, key_file, certificate_file)
    try:
        roots, key, chain = (file.read_bytes() if file else None for file in files)
    except OSError as error:
        raise typer.BadParameter(f"{error.filename}: {error.strerror}") from error
    return grpc.ssl_channel_credentials(roots, key, chain)


def _kubernetes() -> tuple[ApiClient, str]:
    """Return a client of the Kubernetes API, and the namespace of this pod."""
    from tidemill.common.kubernetes_access import NoKubernetesAccess, find_access, open_client

    try:
        access = find_access()
    except NoKubernetesAccess as error:
        fail(str(error), EXIT_UNREACHABLE)
    return open_client(access), access.namespace


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RestRejection as error:
        fail(str(error), EXIT_REFUSED)
    except RestOptionError as error:
        raise typer.BadParameter(str(error)) from error
    except InvalidInput as error:
        fail(str(error), EXIT_USAGE)
    except (ForeignAnswer, WaitTimeout) as error:
        fail(str(error), EXIT_UNREACHABLE)
    except Exception as error:
        # The client of the Kubernetes API is imported only by the commands that use it.
        from tidemill.release.kubernetes_errors import explain_failure

        if why := explain_failure(error):
            fail(why, EXIT_UNREACHABLE)
        raise


def _rest(
    context: typer.Context, patience_s: float, *, login_patience_s: float | None = None
) -> PatientRestClient:
    options = options_of(context)
    # A job sends its token inside the cluster, also over plain HTTP.
    known = None if options.token else find_sendable(options)
    client = client_of(options, known, user="helm", timeout_s=TIMEOUT_S)
    return PatientRestClient(client, patience_s=patience_s, login_patience_s=login_patience_s)


def _read(file: Path) -> Json:
    try:
        read: Any = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        fail(f"{file}: {error}", EXIT_USAGE)
    return read
