"""The protos of the API with their comments, which the generated stubs lack."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).resolve().parents[1]


def compile_protos(paths: Sequence[str]) -> list[FileDescriptorProto]:
    """Returns compiled .proto files with their comments. `paths` are relative to the repository's root.

    Raises CalledProcessError if a file cannot be compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "protos.bin"
        arguments = ["-I", "protos", "--include_source_info", f"--descriptor_set_out={target}", *paths]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True, cwd=ROOT)
        files = {file.name: file for file in FileDescriptorSet.FromString(target.read_bytes()).file}
    return [files[path.removeprefix("protos/")] for path in paths]


def read_comments(file: FileDescriptorProto) -> Mapping[tuple[int, ...], str]:
    """Returns the comments of a compiled file, each on one line, by the path of the element in the descriptor."""
    return {tuple(each.path): " ".join(each.leading_comments.split()) for each in file.source_code_info.location}
