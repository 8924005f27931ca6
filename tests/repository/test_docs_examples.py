"""The code blocks of the documents parse, and the names in them exist.

tests/system/test_docs_programs.py runs the programs.
"""

import ast
import importlib
import json
from pathlib import Path

import pytest
import typer
import yaml
from pydantic import TypeAdapter
from typer.main import get_command

from stagemesh.cli.app import app
from stagemesh.pipeline import load_pipeline
from stagemesh.pipeline.schema import PipelineFile
from tests.repository.code_blocks import Block, find_blocks, find_commands

KNOWN_LANGUAGES = ("", "python", "yaml", "json", "bash", "sh", "text", "mermaid")
FIELDS = {name: field.annotation for name, field in PipelineFile.model_fields.items()}
KEYS = {name: TypeAdapter[object](annotation) for name, annotation in FIELDS.items() if annotation is not None}
COMMANDS = list(find_commands())


def missing_names(code: str) -> list[str]:
    """Returns the names that a program imports from Stagemesh and that do not exist."""
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    return [
        f"{node.module}.{name.name}"
        for node in imports
        if node.module is not None and node.module.startswith("stagemesh")
        for name in node.names
        if not hasattr(importlib.import_module(node.module), name.name)
    ]


PROGRAMS = [block for block in find_blocks("python") if not block.is_fragment]


def test_every_block_has_a_language_that_is_checked() -> None:
    assert len(find_blocks(*KNOWN_LANGUAGES)) > 100
    assert len(COMMANDS) > 100


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_a_program_parses_and_imports_names_that_exist(block: Block) -> None:
    assert missing_names(block.code) == []


@pytest.mark.parametrize("block", find_blocks("json"), ids=str)
def test_a_json_document_parses(block: Block) -> None:
    assert json.loads(block.code)


@pytest.mark.parametrize("block", [block for block in find_blocks("yaml") if block.is_fragment], ids=str)
def test_the_keys_of_a_fragment_have_valid_values(block: Block) -> None:
    document = yaml.safe_load(block.code)
    assert document
    # The options of a file and of a stage have the same key.
    for key in KEYS.keys() & document.keys() - {"options"}:
        KEYS[key].validate_python(document[key])


@pytest.mark.parametrize("block", [block for block in find_blocks("yaml") if not block.is_fragment], ids=str)
def test_a_pipeline_is_valid(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "a-model")
    file = tmp_path / "pipeline.yaml"
    file.write_text(block.code if "pipeline" in yaml.safe_load(block.code) else f"pipeline: example\n{block.code}")
    assert load_pipeline(str(file), check_models=False, check_code=True).outputs


@pytest.mark.parametrize(("place", "words"), COMMANDS, ids=[f"{place} {words[0]}" for place, words in COMMANDS])
def test_a_command_has_a_name_and_options_that_exist(place: str, words: list[str]) -> None:
    del place
    command, rest = get_command(app), list(words)
    context = typer.Context(command, info_name="stagemesh")
    while isinstance(command, typer.core.TyperGroup) and rest and not rest[0].startswith("-"):
        found = command.get_command(context, rest.pop(0))
        assert found is not None
        command, context = found, typer.Context(found, info_name=found.name, parent=context)
    command.make_parser(context).parse_args(rest)
