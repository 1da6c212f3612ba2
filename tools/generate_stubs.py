"""Generate the Python stubs of every contract under proto/, with types, for `make proto`.

protoc names modules by the path of their .proto file, so its output would claim the top-level
packages `apache` and `tidemill`. The official client brings its own `apache` modules, and ours has
other code in `tidemill`; so the stubs live below `tidemill.stubs`, and the imports among
them are rewritten to say so. Nothing on the wire changes by it: files, messages and methods keep
the names that the .proto files give them.

The output is a function of the input: old files are removed first, and nothing in the new ones
depends on the machine or the time.
"""

from __future__ import annotations

import re
import shutil
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO_DIR = ROOT / "proto"
STUBS_DIR = ROOT / "services" / "tidemill" / "stubs"
STUBS_PACKAGE = "tidemill.stubs"
PACKAGE_DOCSTRING = (
    '"""Generated from proto/ by tools/generate_stubs.py; never edited by hand."""\n'
)


def main() -> None:
    """Replace the stubs by freshly generated ones."""
    shutil.rmtree(STUBS_DIR, ignore_errors=True)
    STUBS_DIR.mkdir(parents=True)
    compile_protos(sorted(PROTO_DIR.rglob("*.proto")))
    for stub in sorted([*STUBS_DIR.rglob("*.py"), *STUBS_DIR.rglob("*.pyi")]):
        stub.write_text(with_rewritten_imports(stub.read_text("utf-8")), "utf-8")
    for folder in [STUBS_DIR, *sorted(path for path in STUBS_DIR.rglob("*") if path.is_dir())]:
        (folder / "__init__.py").write_text(PACKAGE_DOCSTRING, "utf-8")


def compile_protos(protos: list[Path]) -> None:
    """Run protoc with its gRPC plugin and the two plugins of mypy-protobuf."""
    # protoc looks for a plugin on the PATH, where the virtual environment need not be.
    scripts = Path(sys.executable).parent
    arguments = [
        "protoc",
        f"--proto_path={PROTO_DIR}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        f"--python_out={STUBS_DIR}",
        f"--grpc_python_out={STUBS_DIR}",
        f"--mypy_out=quiet:{STUBS_DIR}",
        f"--mypy_grpc_out=quiet:{STUBS_DIR}",
        *(str(proto.relative_to(PROTO_DIR)) for proto in protos),
    ]
    if status := protoc.main(arguments):
        raise SystemExit(status)


def with_rewritten_imports(source: str) -> str:
    """Return `source` importing its neighbours from the package of the stubs."""
    packages = "|".join(sorted(path.name for path in PROTO_DIR.iterdir() if path.is_dir()))
    return re.sub(
        rf"^from ((?:{packages})(?:\.[\w.]+)? import)",
        rf"from {STUBS_PACKAGE}.\1",
        source,
        flags=re.MULTILINE,
    )


if __name__ == "__main__":
    main()
