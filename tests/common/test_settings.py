import os
from pathlib import Path

import pytest

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.process.settings import exports_traces, home, library_variable, set_library_variables, zone
from tests.rpc.call_errors import raises


def test_home_that_is_a_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("STAGEMESH_HOME", str(file))
    message = r"STAGEMESH_HOME is '.*file'; it must be a folder"
    with raises(InvalidRequestError, reason="INVALID_SETTING", match=message):
        home()


def test_home_may_be_created_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEMESH_HOME", str(tmp_path / "new"))
    assert home() == tmp_path / "new"


def test_zone_that_is_not_text_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEMESH_ZONE", os.fsdecode(b"rack \xff"))
    with pytest.raises(InvalidRequestError, match=r"STAGEMESH_ZONE is .*; it must be printable UTF-8 text"):
        zone()


def test_library_variables_keep_the_users_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_LIBRARY", "user")
    set_library_variables({"SOME_LIBRARY": "ours"})
    assert library_variable("SOME_LIBRARY") == "user"
    set_library_variables({"SOME_LIBRARY": "ours"}, replace=True)
    assert library_variable("SOME_LIBRARY") == "ours"


@pytest.mark.parametrize(
    ("variables", "exported"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317", "OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317", "OTEL_SDK_DISABLED": "True"}, False),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, False),
    ],
)
def test_a_collector_gets_traces(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], exported: bool) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert exports_traces() == exported


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"), ("OTEL_TRACES_EXPORTER", "zipkin")]
)
def test_other_protocols_of_traces_are_rejected(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317")
    monkeypatch.setenv(name, value)
    with raises(InvalidRequestError, reason="INVALID_SETTING", match=f"{name} is '{value}'; it must be"):
        exports_traces()
