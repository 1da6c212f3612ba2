"""Build a tool once per machine and link it into this tree.

    cached_build.py NAME --needs PROGRAM --input FILE... --link PATH=PART -- COMMAND

The shell command writes into the empty folder $OUT. The result is kept as
`${XDG_CACHE_HOME:-~/.cache}/tidemill/NAME-KEY`, where KEY is a hash of the command, the platform
and the inputs. PATH becomes a symbolic link to PART of the result. A second build of the same key
waits for the first. The result appears in the cache only after the command has succeeded. A build
deletes older results of NAME that no tree has used for a month.

Standard error gets a line per step with the seconds since the start of make, and regular lines
while a build goes on.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

UNUSED_S_MAX = 30 * 24 * 3600
REPORT_S = 15.0  # between two reports of a build that goes on
_BEGAN_S = int(os.environ.get("MAKE_BEGAN_S") or time.time())


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Build a tool once per machine and link it.")
    parser.add_argument("name")
    parser.add_argument("--needs", metavar="PROGRAM", help="Build nothing if this is missing.")
    parser.add_argument("--skipped", default="its tests are skipped", help="The consequence then.")
    parser.add_argument("--input", nargs="+", default=[], type=Path, help="Files of the key.")
    parser.add_argument("--key", default="", help="More text of the key, such as a version.")
    parser.add_argument("--link", metavar="PATH=PART", help="The link and the part it leads to.")
    parser.add_argument("command")
    given = parser.parse_args(arguments)
    if given.needs and shutil.which(given.needs) is None:
        print(f"{given.needs} is missing: {given.skipped}", file=sys.stderr)
        return 0
    key = cache_key(given.command, given.key, given.input)
    try:
        result = cached(given.name, key, given.command)
    except subprocess.CalledProcessError as error:
        say(f"building {given.name} failed\n{error.output}")
        return 1
    if given.link:
        path, _, part = given.link.partition("=")
        link(Path(path), result / part)
    return 0


def cache_folder() -> Path:
    """Return the folder of all results on this machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidemill"


def cache_key(command: str, more: str, inputs: Sequence[Path]) -> str:
    """Return a hash of everything that the result depends on."""
    parts = [command.encode(), more.encode(), f"{platform.system()} {platform.machine()}".encode()]
    for path in sorted(inputs):
        parts += [str(path).encode(), path.read_bytes()]
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(digests).hexdigest()[:16]


def cached(name: str, key: str, command: str) -> Path:
    """Return the result of this key; build it if missing. Raises CalledProcessError."""
    cache = cache_folder()
    result = cache / f"{name}-{key}"
    if result.is_dir():
        os.utime(result)  # The time of the last use.
        return result
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}-{key}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another build of {name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if result.is_dir():
            return result
        say(f"building {name}, once per machine")
        with tempfile.TemporaryDirectory(dir=cache, prefix=f"{name}-", suffix=".part") as scratch:
            out = Path(scratch) / "out"
            out.mkdir()
            run(name, command, {"OUT": str(out), "CACHE": str(cache)})
            if not any(out.iterdir()):
                raise subprocess.CalledProcessError(0, command, output="it built nothing")
            out.rename(result)
            say(f"built {name}")
    for older in cache.glob(f"{name}-*"):
        if older.is_dir() and time.time() - older.stat().st_mtime > UNUSED_S_MAX:
            shutil.rmtree(older, ignore_errors=True)
    return result


def run(name: str, command: str, variables: Mapping[str, str]) -> None:
    """Run a shell command; report regularly that it goes on. Raises CalledProcessError."""
    # The shell is the caller's: each command is a line of the Makefile.
    with subprocess.Popen(
        ["sh", "-ec", command],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        while True:
            try:
                output, _ = process.communicate(timeout=REPORT_S)
                break
            except subprocess.TimeoutExpired:
                say(f"still building {name}")
            except BaseException:
                process.kill()
                raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output=output)


def say(text: str) -> None:
    """Print a line with the seconds since the start of make."""
    print(f"setup: {time.time() - _BEGAN_S:.0f} s: {text}", file=sys.stderr, flush=True)


def link(path: Path, target: Path) -> None:
    """Let `path` be a symbolic link to `target`; whatever was there is removed."""
    if path.is_symlink() and path.readlink() == target:
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.link")
    draft.symlink_to(target)
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
