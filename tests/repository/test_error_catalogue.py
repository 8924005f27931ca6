import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from stagemesh.common.errors import Code
from tests.repository.commands import ROOT
from tests.repository.raised_errors import Findings, find_raised
from tools.error_catalogue import Catalogue, read_catalogue

HOW_TO_ADD = """
To add a reason, add a value ERROR_REASON_<reason> to the enum ErrorReason in protos/stagemesh/v1/errors.proto, among
the values of its code and with the next free number. Its comment states the cause and the remedy. Its option (error)
has the code, `retry: true` if the same call can succeed later without any change, the metadata keys, and the parts that
raise it. A new metadata key is a value of the enum ErrorMetadataKey. Then run `make protos`, which writes the stubs and
docs/errors.md. To remove a reason, delete its value. A reason has one code: if an error needs another code, give it
another reason.
"""
# gRPC or a proxy reports these codes without a reason.
FOREIGN = {"UNAVAILABLE", "NOT_FOUND", "ALREADY_EXISTS", "UNAUTHENTICATED", "PERMISSION_DENIED"}
FINAL_CODES = {"INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED", "INTERNAL"}
# Names in the comments of the protos that are neither reasons nor constants of the protos.
OTHER_NAMES = {"NOT_SERVING", "STAGEMESH_HOME"}


def explained(problems: list[str]) -> str:
    return "\n".join([*problems, HOW_TO_ADD])


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return read_catalogue()


@pytest.fixture(scope="module")
def found() -> Findings:
    return find_raised()


def test_every_raised_reason_is_in_the_catalogue(found: Findings, catalogue: Catalogue) -> None:
    named = [*((each.place, each.reason) for each in found.raised), *found.named]
    # The catalogue has no reasons that begin with "X_": stages that are not Stagemesh's use them.
    unknown = [each for each in named if each[1] not in catalogue.entries and not each[1].startswith("X_")]
    problems = [*found.unclear, *(f"{place}: {reason} is not in the catalogue" for place, reason in unknown)]
    assert not problems, explained(problems)


def test_every_raised_reason_has_the_code_of_the_catalogue(found: Findings, catalogue: Catalogue) -> None:
    problems = [
        f"{each.place}: {each.reason} is raised with {each.code}; its code is {entry.code}"
        for each in found.raised
        if (entry := catalogue.entries.get(each.reason)) and each.code not in {"", entry.code}
    ]
    assert not problems, explained(problems)


def test_no_reason_of_the_catalogue_is_unused(found: Findings, catalogue: Catalogue) -> None:
    unused = catalogue.entries.keys() - {each.reason for each in found.raised} - FOREIGN
    assert not unused, explained([f"no code raises {reason}" for reason in sorted(unused)])


def test_every_metadata_key_is_listed_and_used(found: Findings, catalogue: Catalogue) -> None:
    common = {key.name for key in catalogue.keys.values() if key.common}
    used = defaultdict[str, set[str]](set)
    for each in found.raised:
        used[each.reason] |= each.metadata - common
    listed = {entry.reason: set(entry.metadata) for entry in catalogue.entries.values()}
    problems = [
        f"{reason}: code uses the metadata keys {sorted(used[reason])}, but the catalogue lists {sorted(keys)}"
        for reason, keys in listed.items()
        if keys != used[reason]
    ]
    assert not problems, explained(problems)
    assert {key for keys in listed.values() for key in keys} == catalogue.keys.keys() - common
    assert found.common_metadata <= common


def test_every_reason_names_the_parts_that_raise_it(found: Findings, catalogue: Catalogue) -> None:
    own, shared = defaultdict[str, set[str]](set), set[str]()
    for each in found.raised:
        own[each.reason].add(each.source) if each.source else shared.add(each.reason)
    problems = [
        f"{reason}: raised by {sorted(own[reason])}, but the catalogue lists {sorted(entry.raised_by)}"
        for reason, entry in catalogue.entries.items()
        if not own[reason] <= set(entry.raised_by)
        or not entry.raised_by
        or (reason not in shared | FOREIGN and own[reason] != set(entry.raised_by))
    ]
    assert not problems, explained(problems)


def test_no_reason_has_the_prefix_that_is_reserved_for_other_stages(catalogue: Catalogue) -> None:
    assert not [reason for reason in catalogue.entries if reason.startswith("X_")]


def test_a_retry_follows_from_the_code_where_the_code_decides(catalogue: Catalogue) -> None:
    for entry in catalogue.entries.values():
        assert entry.code in Code.__members__, entry
        assert entry.retry or entry.code != "UNAVAILABLE", entry
        assert not (entry.retry and entry.code in FINAL_CODES), entry


def test_an_error_with_a_retry_delay_can_be_retried(found: Findings, catalogue: Catalogue) -> None:
    delayed = {each.reason for each in found.raised if each.has_delay} & catalogue.entries.keys()
    assert not [reason for reason in delayed if not catalogue.entries[reason].retry]


def comments(proto: str) -> Iterator[str]:
    for comment in re.findall(r"//.*(?:\n *//.*)*", proto):
        yield re.sub(r"\s*//\s*", " ", comment)


def test_the_comments_of_the_protos_name_known_reasons(catalogue: Catalogue) -> None:
    texts = {path.name: path.read_text() for path in sorted((ROOT / "protos" / "stagemesh" / "v1").glob("*.proto"))}
    constants = {name for text in texts.values() for name in re.findall(r"^ *([A-Z][A-Z0-9_]+) = ", text, re.MULTILINE)}
    known = {*catalogue.entries, *Code.__members__, *constants, *OTHER_NAMES}
    problems = [
        f"{file}: {name} is not in the catalogue"
        for file, text in texts.items()
        for name in re.findall(r"\b[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+\b", " ".join(comments(text)))
        if name not in known
    ]
    assert not problems, explained(problems)


def test_the_comments_of_the_protos_state_the_codes_of_the_catalogue(catalogue: Catalogue) -> None:
    for path in (ROOT / "protos" / "stagemesh" / "v1").glob("*.proto"):
        for code, reason in re.findall(r"\(([A-Z_]+), ([A-Z_]+)\)", " ".join(comments(path.read_text()))):
            if code in Code.__members__ and reason in catalogue.entries:
                assert catalogue.entries[reason].code == code, f"{path.name}: {reason}"
