"""Generate the typed Python stubs of all .proto files, for `make proto`.

protoc names modules by the path of their .proto file, so its output would occupy the top-level
packages `apache` and `tidemill`. The official client has its own `apache` modules, and `tidemill`
has other code. The stubs therefore live below `tidemill.stubs`, and this tool rewrites the imports
between them.

Protobuf registers all messages of a process in one table by their full names. The official client
registers its own `apache.rocketmq.v2`. Our messages have more fields, so a process with both, such
as a notebook, could load only one of them. This tool therefore compiles our package as
`tidemill.apache.rocketmq.v2`. The wire is the same: it has no names of messages, and the paths of
methods keep the original package. `transport/aio/reflection.py` also reports the original names.

The output depends only on the .proto files, not on the machine or the time. Old files are removed
first.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO_DIR = ROOT / "proto"
STUBS_DIR = ROOT / "services" / "tidemill" / "stubs"
STUBS_PACKAGE = "tidemill.stubs"
PUBLIC = "apache.rocketmq.v2"  # the package that the official clients also compile
PACKAGE_DOCSTRING = (
    '"""Generated from proto/ by tools/generate_stubs.py; never edited by hand."""\n'
)


def main() -> None:
    """Replace the stubs with newly generated ones."""
    shutil.rmtree(STUBS_DIR, ignore_errors=True)
    STUBS_DIR.mkdir(parents=True)
    compile_protos(sorted(PROTO_DIR.rglob("*.proto")))
    for stub in sorted([*STUBS_DIR.rglob("*.py"), *STUBS_DIR.rglob("*.pyi")]):
        text = with_rewritten_imports(stub.read_text("utf-8"))
        if stub.stem.endswith("_pb2_grpc"):
            text = text.replace(f"tidemill.{PUBLIC}.", f"{PUBLIC}.")
        stub.write_text(text, "utf-8")
    for folder in [STUBS_DIR, *sorted(path for path in STUBS_DIR.rglob("*") if path.is_dir())]:
        (folder / "__init__.py").write_text(PACKAGE_DOCSTRING, "utf-8")


def compile_protos(protos: list[Path]) -> None:
    """Run protoc with its gRPC plugin and the two plugins of mypy-protobuf."""
    with tempfile.TemporaryDirectory() as folder:
        for proto in protos:
            copy = Path(folder) / proto.relative_to(PROTO_DIR)
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = proto.read_text("utf-8")
            # protoc resolves references to it from within `tidemill`; they need no change.
            copy.write_text(
                text.replace(f"package {PUBLIC};", f"package tidemill.{PUBLIC};"), "utf-8"
            )
        compile_in(Path(folder), [str(proto.relative_to(PROTO_DIR)) for proto in protos])


def compile_in(folder: Path, names: list[str]) -> None:
    """Compile the .proto files of a folder."""
    # A virtual environment may not be on the PATH. The scripts of an isolated build are only there.
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    plugins = [
        f"--plugin={name}={shutil.which(name, path=scripts)}"
        for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    ]
    arguments = [
        "protoc",
        f"--proto_path={folder}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        *plugins,
        f"--python_out={STUBS_DIR}",
        f"--grpc_python_out={STUBS_DIR}",
        f"--mypy_out=quiet:{STUBS_DIR}",
        f"--mypy_grpc_out=quiet:{STUBS_DIR}",
        *names,
    ]
    if status := protoc.main(arguments):
        raise SystemExit(status)


def with_rewritten_imports(source: str) -> str:
    """Return `source` with its imports of other stubs redirected to `tidemill.stubs`."""
    packages = "|".join(sorted(path.name for path in PROTO_DIR.iterdir() if path.is_dir()))
    return re.sub(
        rf"^from ((?:{packages})(?:\.[\w.]+)? import)",
        rf"from {STUBS_PACKAGE}.\1",
        source,
        flags=re.MULTILINE,
    )


if __name__ == "__main__":
    main()
