"""Pages name only links, commands, options, metrics, chart values and tests that exist."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.core
import typer.main
import yaml

from tidemill.cli.app import app
from tidemill.cli.former_names import FORMER
from tidemill.cli.processes import PROCESSES
from tidemill.cli.root_group import FLAGS, WITH_VALUE
from tidemill.common.known_settings import KNOWN_KEYS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], key=lambda path: path.relative_to(ROOT)
)
PAGES_OF_OPERATORS = [
    ROOT / "README.md",
    *(page for page in PAGES if page.parent.name in ("kubernetes", "coming-from")),
]
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^):\s]*))?\)")
METRIC = re.compile(r"\brocketmq_[a-z0-9_]*[a-z0-9]\b(?!\*)")
# A value of the chart in a sentence, such as `proxy.tls.mode: required`.
VALUE = re.compile(
    r"`((?:admin|broker|image|internalTls|jobs|monitoring|networkPolicy|priorityClass|proxy)"
    r"(?:\.\w+)+)(?::? [^`]*)?`"
)
TEST = re.compile(r"`(test_\w+?)(?:\.py)?`")
TEST_PATH = re.compile(r"`(tests/[^`*:\s]+)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
# A command starts a shell line, follows `--` of kubectl exec, or is quoted.
SHELL = re.compile(r"^```(?:sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(
    r"`((?:tide)?mill [a-z][^`\n]*)`"
)  # docs/kubernetes/troubleshooting.md uses the alias `mill`.
CALLED = re.compile(r"(?:^|-- |\| |&& |; )(tidemill [a-z][^|&;>#\n]*)")
# A command in a pod: the options of kubectl, and the call. ALIAS defines the first part once.
IN_POD = re.compile(r"kubectl exec ([^`|\n]*?)-- (tidemill [^`#|\n]*)")
ALIAS = re.compile(r"^alias mill='(kubectl exec .*? -- tidemill)'$", re.MULTILINE)
ASKS = re.compile(r'check_is_sure\("([a-z-]+ [a-z-]+)"')
# Every command accepts the options of the root (`tidemill.cli.app.run`).
SHARED = {*WITH_VALUE, *FLAGS, "--help"}


def identity(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Return the link anchors that GitHub generates from the headings of a page."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in HEADING.findall(page.read_text("utf-8"))
    }


def commands_of(text: str) -> list[str]:
    """Return the calls of the command line in a page. Each starts with the program name."""
    lines = [
        line.strip()
        for block in SHELL.findall(text)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    called = [call for line in lines for call in CALLED.findall(line)]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [*called, *QUOTED.findall(prose)]


@cache
def root_command() -> Any:
    """Return the command line, which takes a while to build."""
    return typer.main.get_command(app)


@cache
def chart_values() -> Any:
    """Return the values of the chart."""
    return yaml.safe_load((ROOT / "charts/tidemill/values.yaml").read_text("utf-8"))


def refusal(call: str, *, may_be_former: bool = False) -> str:
    """Return the unknown command or option of a call, or an empty text."""
    words = shlex.split(call, comments=True)[1:]
    if may_be_former and (rewrite := FORMER.get(" ".join(words[:2]))):
        words = rewrite(words[2:])
    if words[0] in PROCESSES:
        return ""  # Its options are settings. A test of docs/configuration.md checks those.
    command = root_command()
    while isinstance(command, typer.core.TyperGroup) and words and not words[0].startswith("-"):
        if words[0] in ("...", "NOUN"):
            return ""
        names = words[0].split("|")  # `tidemill timer list|show` stands for both.
        missing = [name for name in names if name not in command.commands]
        if missing or len(names) > 1:
            return f"{command.name} has no {missing}" if missing else ""
        command, words = command.commands[words[0]], words[1:]
    known = {option for one in command.params for option in one.opts} | SHARED
    options = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    unknown = [option for option in options if option not in known]
    return f"{command.name} has no {unknown}" if unknown else ""


@cache
def existing_tests() -> set[str]:
    """Return the names of all tests and of the modules with tests."""
    files = list((ROOT / "tests").rglob("*.py"))
    found = re.findall(r"def (test_\w+)", "\n".join(file.read_text("utf-8") for file in files))
    return {*found, *(file.stem for file in files)}


def is_value(name: str) -> bool:
    """Whether the chart has this value. Keys below a `config` are settings of a process."""
    value = chart_values()
    words = name.split(".")
    for n, word in enumerate(words):
        if n and words[n - 1] == "config":
            return word in KNOWN_KEYS
        if not isinstance(value, dict) or word not in value:
            return False
        value = value[word]
    return True


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_links_of_a_page_have_a_target(page: Path) -> None:
    missing = []
    for name, anchor in LINK.findall(page.read_text("utf-8")):
        target = (page.parent / name) if name else page
        is_there = target.exists() and (not anchor or anchor in anchors(target))
        if not is_there:
            missing.append(f"{name}#{anchor}")
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_a_page_calls_commands_and_options_that_there_are(page: Path) -> None:
    calls = commands_of(page.read_text("utf-8"))
    is_history = page.parent.name == "adr" or page.name == "bugs-found.md"
    found = [refusal(each, may_be_former=is_history) for each in calls]
    assert not [why for why in found if why]


@pytest.mark.parametrize("page", PAGES_OF_OPERATORS, ids=identity)
def test_a_page_names_metrics_that_there_are(page: Path) -> None:
    known = set(METRIC.findall((ROOT / "docs" / "metrics.md").read_text("utf-8")))
    assert set(METRIC.findall(page.read_text("utf-8"))) <= known


@pytest.mark.parametrize("page", PAGES_OF_OPERATORS, ids=identity)
def test_a_page_names_values_of_the_chart_that_there_are(page: Path) -> None:
    named = set(VALUE.findall(page.read_text("utf-8")))
    assert not [name for name in named if not is_value(name) and not name.endswith(".json")]


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_a_page_names_tests_that_there_are(page: Path) -> None:
    text = page.read_text("utf-8")
    assert set(TEST.findall(text)) <= existing_tests()
    assert not [path for path in TEST_PATH.findall(text) if not (ROOT / path).exists()]


@cache
def asking_commands() -> frozenset[str]:
    """Return the commands that ask for a confirmation, which needs a terminal or --yes."""
    sources = (ROOT / "services/tidemill/cli").glob("*.py")
    return frozenset(name for file in sources for name in ASKS.findall(file.read_text("utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_a_command_in_a_pod_can_be_confirmed(page: Path) -> None:
    text = page.read_text("utf-8")
    if alias := ALIAS.search(text):
        text = re.sub(r"\bmill (?=[a-z])", f"{alias[1]} ", text.replace(alias[0], ""))
    assert not [
        call
        for options, call in IN_POD.findall(text)
        if any(call.startswith(f"tidemill {one}") for one in asking_commands())
        and not {"-it", "--yes", "--dry-run"} & {*options.split(), *call.split()}
    ]


def test_commands_that_ask_are_known() -> None:
    assert {"group reset", "delivery release", "broker-group drain"} <= asking_commands()


def test_a_command_that_there_is_not_is_noticed() -> None:
    assert "no_such" in refusal("tidemill no_such")
    assert "--no-such" in refusal("tidemill topic create orders --no-such 4")
    assert not refusal("tidemill group show billing -o json")
    page = "```sh\nkubectl exec x -- tidemill topic make a\n```\nand `tidemill timer stop`"
    assert commands_of(page) == ["tidemill topic make a", "tidemill timer stop"]
