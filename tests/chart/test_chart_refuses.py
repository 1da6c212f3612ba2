"""Values that cannot be meant are refused, with a reason."""

from __future__ import annotations

import pytest
import yaml
from kubernetes.utils.quantity import parse_quantity

from tests.support.chart import CHART, find, need_helm, objects, refusal
from tidemill.common.feature_level import FEATURE_LEVEL


@pytest.fixture(autouse=True, scope="module")
def _helm() -> None:
    need_helm()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (["broker.config.retention=5"], "at '/broker/config': additional properties 'retention'"),
        (["proxy.config.memory_bytes_max=1"], "at '/proxy/config/memory_bytes_max': minimum"),
        (["proxy.config.grpc_port=9"], "additional properties 'grpc_port' not allowed"),
        (["config.log_level=loud"], "at '/config/log_level': value must be one of 'debug'"),
        (["proxxy.replicas=2"], "additional properties 'proxxy' not allowed"),
        (["proxy.replica=2"], "at '/proxy': additional properties 'replica'"),
        (["brokerGroups="], "at '/brokerGroups'"),
        (["brokerGroups[0].name=Broker"], "at '/brokerGroups/0/name'"),
        (
            ["brokerGroups[0].name=a", "brokerGroups[0].replicas=3", "brokerGroups[0].minInSync=4"],
            "a has minInSync: 4 and replicas: 3: no message could ever be acknowledged",
        ),
        (
            ["brokerGroups[0].name=a", "brokerGroups[0].replicas=2"],
            "it would stop whenever one of its pods is down",
        ),
        (["brokerGroups[0].name=a", "brokerGroups[1].name=a"], "the name a is not unique"),
        (["brokerGroups[0].name=proxy"], "proxy is the name of another object of the release"),
        (["brokerGroups[0].name=controller-0"], "controller-0 is the name of another object"),
        (["brokerGroups[0].name=metrics"], "metrics is the name of another object"),
        (["brokerGroups[0].name=scaler"], "scaler is the name of another object"),
        (
            ["brokerGroups[0].name=a", "brokerGroups[1].name=a-1"],
            "a-1 is the name of a replica of a",
        ),
        (["proxy.resources.limits.memory=100Mi"], "a limit of at least 256Mi"),
        (["proxy.tls.mode=required"], "name the Secret with the certificate"),
        (
            [
                "proxy.tls.mode=optional",
                "proxy.tls.existingSecret=s",
                "proxy.tls.clientCertificates=true",
            ],
            "has no effect unless",
        ),
        (
            ["internalTls.existingSecret=s", "internalTls.certManager.enabled=true"],
            "exclude each other",
        ),
        (["admin.replicas=0", "topics[0].name=orders"], "set admin.replicas"),
        (["brokerGroups[0].name=security-key"], "security-key is the name of another object"),
        (["brokerGroups[0].name=admin-user"], "admin-user is the name of another object"),
        (["security.mode=always"], "at '/security/mode': value must be one of"),
        (["security.existingKeySecret=a", "security.keyRotation=2"], "leave keyRotation at 1"),
        (["featureLevelMax=2"], "users need feature level 3: set security.mode to off"),
        (
            ["pipeline.enabled=true", "pipeline.existingClaim=archive"],
            "pipeline.enabled needs pipeline.userSecret in the security mode on",
        ),
        (["admin.ingress.enabled=true"], "needs admin.ingress.hosts"),
        (["topics[0].name=t", "topics[0].messageType=FAST"], "at '/topics/0/messageType'"),
        (["fullnameOverride=7mq"], "7mq is not a valid name of a Service"),
        (["nameOverride=a-name-of-twenty-five-char"], "which has 35 characters; 31 are permitted"),
        (
            [
                "proxy.autoscaling.enabled=true",
                "proxy.autoscaling.minReplicas=5",
                "proxy.autoscaling.maxReplicas=2",
            ],
            "minReplicas (5) is more than maxReplicas (2)",
        ),
        (
            [
                "brokerGroups[0].name=a",
                "brokerGroups[1].name=b",
                "broker.podDisruptionBudget.enabled=true",
                "broker.podDisruptionBudget.maxUnavailable=0",
            ],
            "would wait forever",
        ),
        (["proxy.podDisruptionBudget.maxUnavailable=lots"], "podDisruptionBudget/maxUnavailable'"),
        (["internalTls.job.schedule=every day at 3"], "at '/internalTls/job/schedule'"),
        (
            ["monitoring.podMonitor.enabled=true", "monitoring.serviceMonitor.enabled=true"],
            "each sample counts twice",
        ),
        (
            ["monitoring.podMonitor.enabled=true", "monitoring.podMonitor.interval=5s"],
            "scrapeTimeout (10s) is longer than interval (5s)",
        ),
        (["monitoring.alerts.thresholds.diskUsedRatioWarning=1"], "is more than diskUsedRatioC"),
        (
            ["monitoring.alerts.enabled=true", "internalTls.job.days=30"],
            "CertificateExpires fires at 14 days",
        ),
        (["internalTls.job.schedule=0 3 1 * *", "internalTls.job.days=90"], "may be 31 days apart"),
        (["internalTls.job.schedule=@yearly"], "may be 366 days apart"),
        (["internalTls.job.schedule=0 3 * * 1", "internalTls.job.days=20"], "may be 7 days apart"),
        (["topics[0].name=a", "topics[1].name=a"], "topics: the name a is not unique"),
        (["listenAddress=127.0.0.1"], "at '/listenAddress'"),
        (["proxy.terminationGracePeriodSeconds=3"], "a stop may take 8000 ms"),
        (["broker.terminationGracePeriodSeconds=14"], "a stop may take 15000 ms"),
        (["admin.replicas=0", "admin.scaler.enabled=true"], "need the admin process"),
        (["admin.replicas=0", "admin.grpc.enabled=true"], "need the admin process"),
        (["admin.auth.key=a/b"], "at '/admin/auth/key'"),
        (["proxy.advertisedAddress=http://x:99"], "at '/proxy/advertisedAddress'"),
        (["proxy.advertisedAddress=x:99999"], "at '/proxy/advertisedAddress'"),
        (["broker.persistence.size=10"], "at '/broker/persistence/size': minimum"),
        (["broker.persistence.size=10m"], "at '/broker/persistence/size'"),
        (["brokerGroups[0].name=a", "brokerGroups[0].persistence.size=1.5"], "persistence/size"),
        (["topics[0].name=bad name"], "at '/topics/0/name'"),
        (["topics[0].name=%DLQ%x"], "at '/topics/0/name'"),
        (["groups[0].name=h!"], "at '/groups/0/name'"),
        (["groups[0].name=h", "groups[0].maxAttempts=100000"], "at '/groups/0/maxAttempts'"),
        (["groups[0].name=h", "groups[0].retry.customised.nextMs={1}"], "'customised' not allowed"),
        (["groups[0].name=h", "groups[0].retry.customized.nextMs={a}"], "nextMs/0'"),
        (["networkPolicy.clientsFrom[0].podSelectr.a=b"], "'podSelectr' not allowed"),
    ],
)
def test_it_is_refused_with_a_reason(values: list[str], reason: str) -> None:
    assert reason in refusal(*values)


@pytest.mark.parametrize(
    ("value", "place", "permitted"),
    [
        ("proxy.replica=2", "/proxy", "'replicas'"),
        ("broker.config.retention=5", "/broker/config", "'retention_ms'"),
        ("broker.persistence.storageclass=ssd", "/broker/persistence", "'storageClass'"),
        ("proxxy.replicas=2", "", "'proxy'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_permitted_ones(
    value: str, place: str, permitted: str
) -> None:
    found = refusal(value)
    assert f"at '{place}': additional properties" in found
    [line] = [line for line in found.splitlines() if "value must be one of" in line]
    assert permitted in line


@pytest.mark.parametrize(
    ("quantity", "half"), [("1e9", 500_000_000), ("0.5Gi", 1 << 28), ("400000000000m", 200_000_000)]
)
def test_every_form_of_a_quantity_is_accepted(quantity: str, half: int) -> None:
    found = objects("--set-string", f"proxy.resources.limits.memory={quantity}")
    settings = find(found, "ConfigMap", "tidemill-proxy")["data"]["tidemill.yaml"]
    assert yaml.safe_load(settings)["memory_bytes_max"] == half


@pytest.mark.parametrize("size", ["20Gi", "1.5T", "800M", "1e10", "10000000000", ".5Ti"])
def test_a_volume_may_have_any_size_in_a_unit_or_in_bytes(size: str) -> None:
    for option in ("--set", "--set-string"):
        found = objects(option, f"broker.persistence.size={size}")
        [claim] = find(found, "StatefulSet", "tidemill-broker-0")["spec"]["volumeClaimTemplates"]
        assert parse_quantity(str(claim["spec"]["resources"]["requests"]["storage"])) > 1 << 29


@pytest.mark.parametrize("component", ["broker", "proxy", "admin", "controller", "jobs"])
def test_a_component_may_have_no_resources(component: str) -> None:
    found = objects("--set", f"{component}.resources=null", "-f", CHART / "values-ha.yaml")
    assert find(found, "Deployment", "tidemill-proxy")


def test_the_chart_declares_the_feature_level_of_its_brokers() -> None:
    chart = (CHART / "Chart.yaml").read_text("utf-8")
    assert f'tidemill/feature-level: "{FEATURE_LEVEL}"' in chart


def test_a_cap_above_the_level_of_the_chart_is_refused() -> None:
    text = f"this chart has feature level {FEATURE_LEVEL}"
    assert text in refusal(f"featureLevelMax={FEATURE_LEVEL + 1}")


@pytest.mark.parametrize(("cap", "written"), [(0, "5010"), (1, "1010"), (2, "2010"), (4, "4010")])
def test_a_cap_keeps_the_format_of_the_stores(cap: int, written: str) -> None:
    """Version 0.1.0 reads stores up to format 1010; a rollback is possible while the cap holds."""
    found = objects(
        "--set", f"featureLevelMax={cap},security.mode=off", "-f", CHART / "values-ha.yaml"
    )
    kept = find(found, "ConfigMap", "tidemill-claims-stay")
    assert kept["data"]["store-format"] == written
    names = ("tidemill-broker-0", "tidemill-controller")
    settings = [
        yaml.safe_load(find(found, "ConfigMap", name)["data"]["tidemill.yaml"]) for name in names
    ]
    assert [one.get("feature_level_max", 0) for one in settings] == [cap, cap]
