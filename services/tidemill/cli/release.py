"""`tidemill release ...`: what the jobs of the Helm chart run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.rest import options_of
from tidemill.common.prompts import EXIT_REFUSED, EXIT_UNREACHABLE, EXIT_USAGE, fail, warn
from tidemill.common.rest_client import Json, RestClient, RestOptionError, RestRejection
from tidemill.release.patient_rest import TIMEOUT_S, PatientRestClient, WaitTimeout

if TYPE_CHECKING:
    import grpc
    from kubernetes.client import ApiClient

app = typer.Typer(
    no_args_is_help=True,
    help="""What the jobs of the Helm chart run.

Certificates between the processes, the look before an upgrade, the broker groups, topics and
consumer groups that values name, and a trial. People rarely need them.
""",
)

WRITES_MAX = 3  # times that all is looked at again because somebody has changed a Secret meanwhile

Patience = Annotated[
    float, typer.Option("--patience-s", min=0, help="Seconds to wait for processes that start.")
]

Endpoint = Annotated[str, typer.Option(help="host:port of the proxies.")]
HasTls = Annotated[bool, typer.Option("--tls", help="Clients are served with TLS.")]
CaFile = Annotated[
    Path | None,
    typer.Option(
        help="Who has signed the proxies' certificate, PEM; without the file public authorities."
    ),
]
CertificateFile = Annotated[
    Path | None, typer.Option(help="The certificate to show, PEM, where proxies ask for one.")
]
KeyFile = Annotated[Path | None, typer.Option(help="Its key, PEM.")]


@app.command("certificates")
def make_certificates(
    plan: Annotated[str, typer.Option(help="Which Secrets there shall be, as JSON.")],
) -> None:
    """Make and renew the certificates of a release, in Secrets of the namespace of this pod."""
    from tidemill.release.certificates import CertificatePlan, ForeignSecret, secrets_to_write
    from tidemill.release.kubernetes_secrets import SecretChanged, Secrets

    given = json.loads(plan)
    wanted = CertificatePlan(
        authority=given["authority"],
        certificates={name: tuple(names) for name, names in given["certificates"].items()},
        tokens=given["tokens"],
        days=given["days"],
        authority_days=given["authorityDays"],
    )
    secrets = Secrets(*_kubernetes())
    names = [wanted.authority, *wanted.certificates, *wanted.tokens]
    for _ in range(WRITES_MAX):
        found = {name: data for name in names if (data := secrets.find(name)) is not None}
        try:
            written = secrets_to_write(wanted, found, datetime.now(UTC))
            for name, data in written.items():
                secrets.write(name, data, given["labels"])
                typer.echo(f"wrote the Secret {name}")
        except SecretChanged:
            continue
        except ForeignSecret as error:
            fail(str(error), EXIT_REFUSED)
        typer.echo(f"{len(names) - len(written)} of {len(names)} Secrets are as they should be")
        return
    fail("the Secrets are changed by somebody else all the time", EXIT_REFUSED)


@app.command("provision")
def provide_what_is_wanted(
    context: typer.Context,
    file: Annotated[Path, typer.Option(help="What there shall be, as the chart writes it.")],
    patience_s: Patience = 300.0,
) -> None:
    """Add broker groups, topics and consumer groups that values name; delete nothing."""
    from tidemill.release.provisioning import ReleaseValues, provide

    with _explained():
        provide(_rest(context, patience_s), ReleaseValues.parse(_read(file)), typer.echo)


@app.command("roll")
def roll_broker_groups(
    context: typer.Context,
    stateful_sets: Annotated[str, typer.Option(help="Those of the broker groups, with commas.")],
    patience_s: Patience = 300.0,
) -> None:
    """Replace pods of broker groups that are not as their StatefulSets say, one after the other.

    The next one goes when the one before is a member that can be reached again.
    """
    from tidemill.release.rolling import roll

    client, namespace = _kubernetes()
    with _explained():
        rest = _rest(context, patience_s)
        roll(client, namespace, stateful_sets.split(","), rest, typer.echo)


@app.command("check")
def check_before_an_upgrade(
    context: typer.Context,
    kept: Annotated[str, typer.Option(help="The broker groups that values name, with commas.")],
    gone: Annotated[str, typer.Option(help="Those that stand and that values do not name.")] = "",
    store_format: Annotated[
        int | None, typer.Option(help="The format of stores that the brokers to come can read.")
    ] = None,
    installed: Annotated[
        Path | None, typer.Option(help="The folder in which the release says what it has been.")
    ] = None,
    is_unanswerable: Annotated[
        bool, typer.Option("--nobody-to-ask", help="There will be no REST API, so none is asked.")
    ] = False,
    patience_s: Patience = 10.0,
) -> None:
    """Refuse what would take a broker group away that is a member still, or a store's reader.

    An upgrade is looked at by its templates too. A rollback is not rendered: its jobs are those of
    the revision that comes back, and know of what stands by the folder alone.
    """
    from tidemill.release.provisioning import InstalledRelease, find_members_to_remove

    stands = InstalledRelease.read(installed)
    if store_format is not None and stands.store_format > store_format:
        fail(
            f"these brokers read stores up to format {store_format}, and those of this release"
            f" write format {stands.store_format}: they would not start. Stay, or restore a backup"
            f" of before into a new release (docs/kubernetes/backup-and-restore.md)",
            EXIT_REFUSED,
        )
    names = {name for name in gone.split(",") if name} | stands.broker_groups
    gone = ", ".join(sorted(names - set(kept.split(","))))
    if is_unanswerable:
        if gone:
            fail(f"{gone}: without a REST API nobody says what is left there", EXIT_REFUSED)
        typer.echo("no broker group goes")
        return
    try:
        shown = _rest(context, patience_s).call("GET", "/broker-groups")["items"]
    except (RestRejection, RestOptionError, WaitTimeout) as error:
        if gone:
            fail(f"{gone}: nobody says what is left there: {error}", EXIT_UNREACHABLE)
        warn(f"{error}; no broker group goes, so the upgrade may")
        return
    if reasons := list(find_members_to_remove(shown, kept.split(","))):
        fail("; ".join(reasons), EXIT_REFUSED)
    typer.echo("no broker group is lost")


@app.command("trial")
def try_it(
    context: typer.Context,
    endpoint: Endpoint,
    has_tls: HasTls = False,
    ca_file: CaFile = None,
    certificate_file: CertificateFile = None,
    key_file: KeyFile = None,
    patience_s: Patience = 60.0,
) -> None:
    """Send, delay, pop and ack through the proxies, with a topic of its own."""
    from tidemill.release import trial

    with _explained():
        rest = _rest(context, patience_s)
        rest.call("PUT", "/topics", trial.TOPIC, body={"messageType": "MIXED", "queues": 1})
        rest.call("PUT", "/groups", trial.GROUP, body={})
    credentials = _credentials(ca_file, certificate_file, key_file) if has_tls else None
    with _proxies(endpoint, credentials) as channel:
        trial.run(channel, typer.echo)


@app.command("receive")
def receive_and_ack(
    topic: Annotated[str, typer.Argument(help="The topic.")],
    group: Annotated[str, typer.Option(help="The consumer group whose messages these are.")],
    endpoint: Endpoint = "127.0.0.1:8081",
    has_tls: HasTls = False,
    ca_file: CaFile = None,
    certificate_file: CertificateFile = None,
    key_file: KeyFile = None,
) -> None:
    """Receive messages as a consumer does, print and ack them: the group does not get them again.

    Example: tidemill release receive orders --group billing
    """
    from tidemill.release import trial
    from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc

    credentials = _credentials(ca_file, certificate_file, key_file) if has_tls else None
    with _proxies(endpoint, credentials) as channel:
        stub = service_pb2_grpc.MessagingServiceStub(channel)
        received = trial.receive(stub, topic, group)
        for message in received:
            typer.echo(message.body.decode("utf-8", "replace"))
            trial.ack(stub, topic, group, message)
    if not received:
        warn(f"{group} has nothing to receive of {topic}")


@contextmanager
def _proxies(endpoint: str, credentials: grpc.ChannelCredentials | None) -> Iterator[grpc.Channel]:
    """Connect to the proxies, and say what goes wrong there."""
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


def _credentials(
    ca_file: Path | None, certificate_file: Path | None, key_file: Path | None
) -> grpc.ChannelCredentials:
    """Return whom to believe, and what to show to proxies that ask for it."""
    import grpc

    if (certificate_file is None) != (key_file is None):
        raise typer.BadParameter("--certificate-file and --key-file belong together")
    if ca_file is not None and not ca_file.exists():
        warn(f"{ca_file} is not there: public authorities are believed")
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
    except WaitTimeout as error:
        fail(str(error), EXIT_UNREACHABLE)


def _rest(context: typer.Context, patience_s: float) -> PatientRestClient:
    options = options_of(context)
    client = RestClient(
        url=options.admin,
        user="helm",
        token=options.token,
        ca_file=options.ca_file,
        timeout_s=TIMEOUT_S,
    )
    return PatientRestClient(client, patience_s=patience_s)


def _read(file: Path) -> Json:
    try:
        read: Any = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        fail(f"{file}: {error}", EXIT_USAGE)
    return read
