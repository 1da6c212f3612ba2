"""The base of the settings of every process: flags, then environment, then file, then defaults.

Each process declares one frozen model below `ProcessSettings`. The process reads it once at its
start and passes it on as a parameter. Other code does not read the environment.

    1. flags            --metrics-port 5557
    2. environment      TIDEMILL_METRICS_PORT=5557
    3. YAML             --config tidemill.yaml (or TIDEMILL_CONFIG), with the field names as keys
    4. the default of the field
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NoReturn, Self

import yaml
from pydantic import Field, PrivateAttr, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    CliSuppress,
    EnvSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from tidemill.common.exit_codes import EXIT_USAGE
from tidemill.common.known_settings import (
    KNOWN_KEYS,
    is_service_address,
    replaced_flags,
    unknown_keys,
    unknown_variables,
)
from tidemill.common.setting_types import Flag, Names, Port

# Sources of the value of a setting.
DEFAULT: Final = "DEFAULT"
FILE: Final = "FILE"
ENVIRONMENT: Final = "ENVIRONMENT"
FLAG: Final = "FLAG"


class ProcessSettings(BaseSettings):
    """Settings that every process has."""

    model_config = SettingsConfigDict(
        env_prefix="TIDEMILL_",
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        nested_model_default_partial_update=True,
    )

    # The subcommand of `tidemill` that starts the process; set by each model.
    command: ClassVar[str]
    # Panels of `--help`: prefix of the name of a setting -> title. A class lists its own settings.
    panels: ClassVar[dict[str, str]] = {
        "": "Process",
        "log_": "Logs and metrics",
        "metrics_": "Logs and metrics",
    }

    config: Path | None = Field(
        None, description="YAML file with settings; flags and the environment override it."
    )
    name: str = Field(
        "", description="Name of this process in logs and metrics. Default: the kind of process."
    )
    node_id: str = Field(
        "",
        description="Label of this process on each metric, such as the name of its pod. Default:"
        " its name; for a broker, that of its replica.",
    )
    cluster: str = Field("tidemill", description="Name of the cluster, a label on every metric.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest severity of log lines."
    )
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="Format of log lines; auto: text on a terminal, else JSON."
    )
    allow_unknown_settings: Flag = Field(
        False,
        description="Start even if the file or a variable has an unknown name, for example one of"
        " another version.",
    )
    metrics_host: str = Field("127.0.0.1", description="Address of /metrics, /livez and /readyz.")
    metrics_port: Port = Field(
        5557, description="Port of /metrics, /livez and /readyz; 0: a free port."
    )
    metrics_hosts: Names = Field(
        [],
        description="Host names of /metrics besides localhost, metrics_host and all addresses."
        " Requests for other names get 421, because pages of other sites could send them.",
    )
    metrics_token_file: str = Field(
        "",
        description="File with the bearer token of /metrics; read again when it changes. No other"
        " user of the machine may read it. Default: no token. /livez and /readyz need none.",
    )
    supervisor_fd: CliSuppress[int | None] = Field(
        None,
        description="File descriptor for the readiness line; the standalone supervisor sets it.",
    )

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    def note_sources(self, sources: dict[str, str]) -> None:
        """Note where the values come from that are not defaults."""
        self._sources = sources

    def source_of(self, name: str) -> str:
        """Return where the value of a setting comes from: FLAG, ENVIRONMENT, FILE or DEFAULT."""
        return self._sources.get(name, DEFAULT)

    @classmethod
    def load(cls, arguments: Sequence[str]) -> Self:
        """Read the settings from `arguments`, the environment and the file they name.

        If they are invalid, the function prints the reasons and exits with 2. `--help` prints the
        settings and exits with 0.
        """
        if not {"-h", "--help"}.isdisjoint(arguments):
            # Here, because the start of a process does not need the command line's library.
            from tidemill.common.settings_help import print_help

            print_help(cls)
            sys.exit(0)
        if replaced := replaced_flags(arguments):
            _exit_with(cls, "\n".join(replaced))
        config = _config_file(arguments)
        known = KNOWN_KEYS | cls.model_fields.keys()
        unknown: list[str] = []
        try:
            flags: CliSettingsSource[Any] = CliSettingsSource(
                cls, cli_prog_name=f"tidemill {cls.command}", cli_parse_args=list(arguments)
            )
            values: dict[str, Any] = {}
            if config:
                unknown += unknown_keys(_keys_of(cls, config), config, known)
                values.update(_SharedFile(cls, yaml_file=config)())
            sources = dict.fromkeys(values, FILE)
            # Each source overrides the earlier ones.
            for source, given in ((ENVIRONMENT, _Variables(cls)()), (FLAG, flags())):
                values.update(given)
                sources.update(dict.fromkeys(given, source))
            unknown += unknown_variables(known)
            settings = cls.model_validate(values)
            settings.note_sources(sources)
        except ValidationError as error:
            reasons = [
                f"  {'.'.join(map(str, item['loc'])) or 'settings'}: {_sentence(item['msg'])}"
                for item in error.errors()
            ]
            # An unknown name may be a misspelt missing setting.
            reasons += [f"  {each}" for each in unknown]
            _exit_with(cls, "\n".join(["invalid settings:", *reasons]))
        # The supervisor has already checked the file and the environment of a child.
        if unknown and settings.supervisor_fd is None and not settings.allow_unknown_settings:
            lines = [
                "unknown settings (to start anyway, add --allow-unknown-settings):",
                *(f"  {each}" for each in unknown),
            ]
            _exit_with(cls, "\n".join(lines))
        return settings

    @classmethod
    def settings_customise_sources(cls, *_sources: Any, **sources: Any) -> tuple[Any, ...]:
        """Use only the arguments of the constructor, because `load` has read every source."""
        return (sources["init_settings"],)


class _SharedFile(YamlConfigSettingsSource):
    """A YAML file that may also contain settings of other processes."""

    def __call__(self) -> dict[str, Any]:
        fields = self.settings_cls.model_fields
        return {name: value for name, value in super().__call__().items() if name in fields}


class _Variables(EnvSettingsSource):
    """The environment, without variables that Kubernetes sets for a service.

    For a service "tidemill-admin", Kubernetes sets TIDEMILL_ADMIN_PORT=tcp://10.0.0.1:8080, which
    has the name of a setting.
    """

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {
            name: value
            for name, value in super()._load_env_vars().items()
            if not is_service_address(value or "")
        }


def _sentence(message: str) -> str:
    return message.removeprefix("Value error, ")  # Pydantic adds it to our texts.


def _config_file(arguments: Sequence[str]) -> str | None:
    """Return the path of the configuration file, which is needed before the other settings."""
    config = os.environ.get("TIDEMILL_CONFIG")
    for index, argument in enumerate(arguments):
        if argument == "--config" and index + 1 < len(arguments):
            config = arguments[index + 1]
        elif argument.startswith("--config="):
            config = argument.removeprefix("--config=")
    return config


def _keys_of(settings: type[ProcessSettings], config: str) -> Iterable[object]:
    """Return the keys of the configuration file; exit if it is not a mapping."""
    path = Path(config)
    if not path.exists():
        _exit_with(settings, f"the file {config} of --config does not exist")
    try:
        content = yaml.safe_load(path.read_bytes())
    except OSError as error:
        _exit_with(settings, f"the file {config} of --config cannot be read: {error.strerror}")
    except yaml.YAMLError as error:
        _exit_with(settings, f"the file {config} of --config is not valid YAML: {error}")
    if content is not None and not isinstance(content, dict):
        _exit_with(settings, f"the file {config} of --config must have `name: value` pairs")
    return content or {}


def _exit_with(settings: type[ProcessSettings], reason: str) -> NoReturn:
    sys.stderr.write(f"tidemill {settings.command}: {reason}\n")
    sys.exit(EXIT_USAGE)
