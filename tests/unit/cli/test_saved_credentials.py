"""The credentials that the command line finds: options first, then the saved file."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, ApiRequest, refusal, scripted_api
from tidemill.cli.app import app
from tidemill.cli.credentials import FILE_BYTES_MAX, UserCredentials, find_credentials
from tidemill.cli.root_options import CREDENTIALS
from tidemill.common.exit_codes import EXIT_REFUSED, EXIT_UNREACHABLE, EXIT_USAGE
from tidemill.security.tokens import make_token


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "tidemill" / "credentials"
    file.parent.mkdir()
    file.touch(0o600)
    return file


def test_the_saved_file_has_a_user_or_a_token(saved: Path) -> None:
    assert find_credentials("", None) is None, "an empty file"
    saved.write_text("ops\na-secret-of-sixteen\n")
    assert find_credentials("", None) == UserCredentials(
        "ops", "a-secret-of-sixteen", is_named=False
    )
    text = make_token().text
    saved.write_text(f"{text}\n")
    found = find_credentials("", None)
    assert found is not None
    assert (found.is_token, found.secret, found.is_named) == (True, text, False)


@pytest.mark.parametrize("text", ["ops", "ops secret more", "tmk_a tmk_b tmk_c"])
def test_a_malformed_file_is_refused_without_its_content(saved: Path, text: str) -> None:
    saved.write_text(text)
    with pytest.raises(typer.BadParameter, match="neither two lines") as caught:
        find_credentials("", None)
    assert text not in str(caught.value).replace(str(saved), "")


def test_a_saved_token_is_left_out_over_http_to_another_machine(saved: Path) -> None:
    saved.write_text(make_token().text)
    result = CliRunner().invoke(app, ["--admin", "http://admin.invalid:8080", "topic", "list"])
    assert result.exit_code == EXIT_UNREACHABLE


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (b"tmk_a", 0o604, "every user of this machine can open it"),
        (b"ops\nsch\xc3\xb6n", 0o600, "characters outside of ASCII"),
        (b"x" * (FILE_BYTES_MAX + 1), 0o600, f"longer than {FILE_BYTES_MAX} bytes"),
    ],
)
def test_an_unusable_file_is_refused(saved: Path, content: bytes, mode: int, reason: str) -> None:
    saved.write_bytes(content)
    saved.chmod(mode)
    with pytest.raises(typer.BadParameter, match=reason):
        find_credentials("", None)


def secret_file(folder: Path, text: str) -> Path:
    file = folder / "admin.secret"
    file.touch(0o600)
    file.write_text(text)
    return file


@pytest.mark.parametrize("user", ["", "admin"])
@pytest.mark.parametrize("end", ["", "https://admin.example\n"])
def test_the_file_of_the_first_administrator_is_a_secret_file(
    tmp_path: Path, user: str, end: str
) -> None:
    file = secret_file(tmp_path, f"admin\na-secret-of-sixteen\n{end}")
    assert find_credentials(user, file) == UserCredentials(
        "admin", "a-secret-of-sixteen", is_named=True
    )


@pytest.mark.parametrize(
    ("user", "text", "reason"),
    [
        ("ops", "admin\na-secret-of-sixteen\n", "the secret of another user than ops"),
        ("", "a-secret-of-sixteen\n", "names no user; add --user"),
        ("ops", "", "neither a secret alone nor two lines"),
        ("ops", "a b c", "neither a secret alone nor two lines"),
    ],
)
def test_a_secret_file_without_a_known_user_is_refused(
    tmp_path: Path, user: str, text: str, reason: str
) -> None:
    with pytest.raises(typer.BadParameter, match=reason) as caught:
        find_credentials(user, secret_file(tmp_path, text))
    assert "a-secret-of-sixteen" not in str(caught.value)


SAVED = "ops\na-secret-of-sixteen\n"


def run_with_saved(saved: Path, *options: str) -> tuple[int, str, list[str]]:
    """List topics; return the exit status, the output, and the credentials that were sent."""
    saved.write_text(SAVED)
    sent: list[str] = []

    def answer(request: ApiRequest) -> ApiAnswer:
        sent.append(request.authorization)
        return ApiAnswer({"topics": []})

    with scripted_api(answer) as address:
        result = CliRunner().invoke(app, ["--admin", address, *options, "topic", "list"])
    return result.exit_code, result.output, sent


@pytest.mark.parametrize("option", ["--token", "--user"])
def test_an_empty_option_does_not_mean_the_saved_credentials(saved: Path, option: str) -> None:
    status, output, sent = run_with_saved(saved, option, "")
    assert (status, sent) == (EXIT_USAGE, [])
    assert f"{option} is empty" in output


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_token_file_does_not_mean_the_saved_credentials(
    saved: Path, tmp_path: Path, text: str
) -> None:
    file = secret_file(tmp_path, text)
    status, output, sent = run_with_saved(saved, "--token-file", str(file))
    assert (status, sent) == (EXIT_USAGE, [])
    assert "has no token" in " ".join(output.replace("│", " ").split())


@pytest.mark.parametrize("variable", CREDENTIALS.values())
def test_an_empty_variable_does_not_mean_the_saved_credentials(
    saved: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "")
    status, output, sent = run_with_saved(saved)
    assert (status, sent) == (EXIT_USAGE, [])
    assert variable in output


def test_an_option_replaces_an_empty_variable(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_ADMIN_TOKEN_FILE", "")
    assert run_with_saved(saved, "--token", "given")[2] == ["Bearer given"]


@pytest.mark.parametrize(
    ("own", "other", "is_same"),
    [
        ("https://admin.example", "https://admin.example:443", True),
        ("http://localhost:8080", "http://127.0.0.1:8080", True),
        ("http://admin.example:8080", "https://ADMIN.example:8080", True),
        ("https://admin.example", "https://admin.example.evil", False),
        ("https://admin.example", "https://admin.example:444", False),
        ("https://admin.example", "https://other.example", False),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8081", False),
        ("http://127.0.0.1:8080", "http://other.example:8080", False),
        ("https://admin.example", "https://admin.example:x", False),
    ],
)
def test_saved_credentials_belong_to_one_api(
    saved: Path, own: str, other: str, is_same: bool
) -> None:
    saved.write_text(f"{SAVED}{own}\n")
    found = find_credentials("", None)
    assert found is not None
    assert (found.pair, found.address) == (("ops", "a-secret-of-sixteen"), own)
    assert found.is_for(own)
    assert found.is_for(other) is is_same
    saved.write_text(f"{make_token().text}\n{own}\n")
    found = find_credentials("", None)
    assert found is not None
    assert (found.is_token, found.is_for(other)) == (True, is_same)


def test_saved_credentials_are_not_sent_to_another_api(saved: Path) -> None:
    shown: list[str] = []

    def answer(request: ApiRequest) -> ApiAnswer:
        shown.append(request.authorization)
        return refusal("no credentials", 401)

    with scripted_api(answer) as address:
        for own in ("http://127.0.0.1:1", address):
            saved.write_text(f"{SAVED}{own}\n")
            ended = CliRunner().invoke(app, ["--admin", address, "topic", "list"])
            assert ended.exit_code == EXIT_REFUSED
            assert ("so they were not sent" in ended.output) is (own != address)
    assert [bool(each) for each in shown] == [False, True]


def test_saved_credentials_without_an_api_are_warned_of(saved: Path) -> None:
    saved.write_text(SAVED)
    for host, is_warned in (("admin.invalid", True), ("127.0.0.1:1", False)):
        line = ["--admin", f"https://{host}", "topic", "list"]
        output = CliRunner().invoke(app, line).output
        assert ("name no admin API" in output) is is_warned
