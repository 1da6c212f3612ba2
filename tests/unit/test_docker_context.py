"""The files that the Dockerfile copies reach Docker: .dockerignore excludes all others."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def copied() -> list[str]:
    """Return the sources of the COPY lines that copy from the repository."""
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    words = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    return [source for of_line in words if "--from" not in of_line[0] for source in of_line]


def test_docker_gets_each_file_that_the_dockerfile_copies() -> None:
    included = [
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines()
        if line.startswith("!")
    ]
    sources = [source for source in copied() if not source.startswith("--")]
    assert len(sources) > 10
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == one or source.startswith(f"{one}/") for one in included), source
