"""`stagemesh new stage`: writes a package with a stage of one's own."""

import keyword
import re
import shutil
import sys
import tempfile
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

import typer

from stagemesh.cli.terminal.options import Kind, Parameters, argument, command, option
from stagemesh.common.errors import ExistsError, InvalidRequestError, writing

app = typer.Typer(help="Write a package that adds a stage to Stagemesh.", no_args_is_help=True)

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_SUFFIX, _MODULE = ".tmpl", "module"
"""The suffix of the template's files, and the name of its folder that is named after the package."""
_NEXT = (
    "pip install --no-deps --editable .",
    "pytest",
    "stagemesh pipeline validate pipeline.yaml",
    'stagemesh demo pipeline.yaml --prompt "Hello" --audio hello.wav',
)
"""The commands that install, test, check and try a new package."""


_STAGE: Parameters = {
    "name": argument(Kind.NAME, "Set the name of the package, the stage and its function."),
    "folder": option(Path, "Write the package to this new folder.", metavar="DIR", show_default="a folder NAME here"),
}


@command(app, _STAGE)
def stage(*, name: str, folder: Path | None) -> None:
    """Write a package with a function, a transform, their descriptors, a pipeline and a test."""
    _check_name(name)
    target = folder or Path(name)
    _write(target, {"name": name, "module": name.replace("-", "_")})
    typer.echo(f"wrote {target}. Install and test it:")
    for line in (f"cd {target}", *_NEXT):
        typer.echo(f"  {line}")


def _check_name(name: str) -> None:
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name):
        problem = "use lower-case letters, digits and '-', a letter first"
    elif keyword.iskeyword(module) or module in sys.stdlib_module_names or module == "stagemesh":
        problem = f"{module} is a name of Python or of Stagemesh; choose another name"
    else:
        return
    raise InvalidRequestError(f"{name!r} cannot be the name of a package: {problem}", reason="INVALID_PACKAGE_NAME")


def _write(target: Path, values: dict[str, str]) -> None:
    """Writes the package to `target`. If this fails, leaves nothing behind."""
    if target.exists():
        raise ExistsError(f"{target} exists; choose another folder with --folder DIR", reason="FOLDER_NOT_EMPTY")
    with writing(target, remedy="; choose another folder with --folder DIR"):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Not in /tmp, because a folder is renamed only within one file system.
        written = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            _fill(files("stagemesh.new_stage") / "stage_template", written, values)
            written.chmod(0o755)
            written.rename(target)
        except BaseException:
            shutil.rmtree(written, ignore_errors=True)
            raise


def _fill(source: Traversable, target: Path, values: dict[str, str]) -> None:
    target.mkdir(exist_ok=True)
    for item in source.iterdir():
        if item.is_dir():
            _fill(item, target / (values["module"] if item.name == _MODULE else item.name), values)
        elif item.name.endswith(_SUFFIX):
            text = Template(item.read_text(encoding="utf-8")).substitute(values)
            (target / item.name.removesuffix(_SUFFIX)).write_text(text, encoding="utf-8")
