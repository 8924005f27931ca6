"""The transforms between the stages of Qwen3-Omni, for prompts, answers and codes that arrive in any pieces."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.common.plugins.descriptors import TransformDescriptor
from stagemesh.common.plugins.entry_points import import_factory, load_descriptor
from stagemesh.common.wire.tensors import Array
from stagemesh.connectors.packets import Packet
from stagemesh.services.models.qwen3_omni.description import TextTokens
from stagemesh.services.models.qwen3_omni.transforms import Talker2Code2Wav, Thinker2Talker
from tests.models.vocoding import pieces
from tests.rpc.call_errors import raises

WIDTH = 8
ANSWER = [40, 41, 42, 43]


def prompt_of(model: Path, *, media: bool) -> list[int]:
    """A system message, a message of the user, an answer, another message of the user, and the begin of an answer."""
    tokens = TextTokens.of(model)
    start, medium = tokens.message_start, min(tokens.media)
    first = [start, tokens.user, 10, *([medium] * 5 if media else []), 11]
    second = [start, tokens.user, 20, 21]
    return [start, 5, 6, *first, start, tokens.assistant, 30, 31, *second, start, tokens.assistant, 9]


def positions_of(prompt: Sequence[int], medium: int) -> Array:
    """Positions as M-RoPE has them: those of a medium's rows grow along the third axis only, up to 3."""
    rows, following = list[list[int]](), 0
    for number, token in enumerate(prompt):
        if token == medium:
            in_medium = sum(each == medium for each in prompt[:number])
            rows.append([following + 1, following + 1, following + 1 + min(in_medium, 3)])
        else:
            following = max((max(row) for row in rows), default=-1) + 1
            rows.append([following] * 3)
    return np.array(rows, np.int32)


def arrivals(model: Path, *, media: bool, prefill: int, text: int) -> list[Packet]:
    """The thinker's packets: the prompt, `prefill` states at a time, and `text` tokens of the answer at a time."""
    prompt = prompt_of(model, media=media)
    total = len(prompt) + len(ANSWER) - 1
    states = np.random.default_rng(0).normal(size=(total, WIDTH)).astype(np.float32)
    positions = positions_of([*prompt, *ANSWER[:-1]], min(TextTokens.of(model).media))
    packets = [Packet({"prompt_ids": np.array(prompt, np.int32)})]
    for start in range(0, total, prefill):
        part = slice(start, start + prefill)
        rows = {"hidden_states_accept": states[part], "positions": positions[part]}
        packets.append(Packet(rows, {"token_start": start, "prompt_tokens": len(prompt)}))
    tokens = [np.array(ANSWER[start : start + text], np.int32) for start in range(0, len(ANSWER), text)]
    return [*packets, *(Packet({"token_ids": part}) for part in tokens)]


def rows_of(model: Path, packets: Sequence[Packet]) -> dict[str, Array]:
    """All rows of the talker. Rows without a state have zeros."""
    transform = Thinker2Talker(model)
    made = [each for packet in packets for each in transform.push(packet)] + list(transform.finish())
    starts = np.cumsum([0, *(len(each.tensors["text_ids"]) for each in made)])
    assert [each.metadata["token_start"] for each in made] == starts[:-1].tolist()
    parts = [{"states": np.zeros((len(each.tensors["text_ids"]), WIDTH), np.float32), **each.tensors} for each in made]
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    rows["states"] = np.where(rows["text_ids"][:, None] == -1, rows["states"], 0)
    return rows


@pytest.mark.parametrize("media", [False, True])
def test_any_cutting_gives_the_same_rows(tiny_qwen3_omni: Path, media: bool) -> None:
    whole = rows_of(tiny_qwen3_omni, arrivals(tiny_qwen3_omni, media=media, prefill=100, text=100))
    for prefill in (1, 2, 3, 7, 16):
        for text in (1, 3):
            rows = rows_of(tiny_qwen3_omni, arrivals(tiny_qwen3_omni, media=media, prefill=prefill, text=text))
            assert all(np.array_equal(rows[name], whole[name]) for name in whole)


def test_tokens_may_arrive_before_the_states_of_the_prompt(tiny_qwen3_omni: Path) -> None:
    packets = arrivals(tiny_qwen3_omni, media=True, prefill=5, text=1)
    tokens = [packet for packet in packets if "token_ids" in packet.tensors]
    states = [packet for packet in packets if "token_ids" not in packet.tensors]
    expected, early = rows_of(tiny_qwen3_omni, packets), rows_of(tiny_qwen3_omni, [states[0], *tokens, *states[1:]])
    assert all(np.array_equal(early[name], expected[name]) for name in expected)


def test_the_rows_are_those_of_the_users_messages_and_the_answer(tiny_qwen3_omni: Path) -> None:
    tokens = TextTokens.of(tiny_qwen3_omni)
    start, user = tokens.message_start, tokens.user
    rows = rows_of(tiny_qwen3_omni, arrivals(tiny_qwen3_omni, media=True, prefill=4, text=1))
    prompt = [start, user, 10, *[-1] * 5, 11, start, user, 20, 21]
    begin = [start, tokens.assistant, 9, *[tokens.pad] * 4, tokens.bos]
    assert rows["text_ids"].tolist() == [*prompt, *begin, *ANSWER[:-1], tokens.eos]
    slots = [-1] * (len(prompt) + 3) + [0, 1, 2, 3, 4, 5]
    assert rows["codec_slots"].tolist() == slots + [-1] * (len(rows["text_ids"]) - len(slots))
    # The medium's rows begin at position 3 and reach 6. Everything after it follows without a gap.
    assert rows["positions"][:10, 2].tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 7, 8]
    assert rows["positions"][8:, 0].tolist() == list(range(7, 7 + len(rows["text_ids"]) - 8))


def test_states_are_those_of_the_mediums_rows(tiny_qwen3_omni: Path) -> None:
    packets = arrivals(tiny_qwen3_omni, media=True, prefill=100, text=100)
    rows = rows_of(tiny_qwen3_omni, packets)
    given = packets[1].tensors["hidden_states_accept"]
    medium = np.array(prompt_of(tiny_qwen3_omni, media=True)) == min(TextTokens.of(tiny_qwen3_omni).media)
    assert np.array_equal(rows["states"][rows["text_ids"] == -1], given[: len(medium)][medium])


def test_a_text_prompt_does_not_wait_for_the_thinker(tiny_qwen3_omni: Path) -> None:
    transform = Thinker2Talker(tiny_qwen3_omni)
    first, *_ = arrivals(tiny_qwen3_omni, media=False, prefill=1, text=1)
    made = transform.push(first)
    # All rows of the prompt but the last, which has the first token of the answer.
    assert sum(len(each.tensors["text_ids"]) for each in made) == made[0].metadata["prompt_tokens"] - 1  # type: ignore[operator]


def test_the_first_token_is_written_at_once_unless_it_ends_the_answer(tiny_qwen3_omni: Path) -> None:
    prompt, *_ = arrivals(tiny_qwen3_omni, media=False, prefill=1, text=1)
    tokens = TextTokens.of(tiny_qwen3_omni)
    for token, spoken in ((ANSWER[0], [ANSWER[0], tokens.eos]), (min(tokens.answer_ends), [tokens.eos])):
        transform = Thinker2Talker(tiny_qwen3_omni)
        transform.push(prompt)
        made = [*transform.push(Packet({"token_ids": np.array([token], np.int32)})), *transform.finish()]
        assert [each.tensors["text_ids"].tolist() for each in made] == [[each] for each in spoken]


@pytest.mark.parametrize("ending", ["none", "turn of the user", "incomplete header", "message start"])
def test_a_prompt_without_an_answer_is_rejected(tiny_qwen3_omni: Path, ending: str) -> None:
    tokens = TextTokens.of(tiny_qwen3_omni)
    answered = [tokens.message_start, tokens.user, 9, tokens.message_start, tokens.assistant, 9, 10]
    prompts = {
        "none": [1, 2, 3],
        "turn of the user": [*answered, tokens.message_start, tokens.user, 9],
        "incomplete header": [*answered, tokens.message_start, tokens.assistant],
        "message start": [tokens.message_start, tokens.user, 9, tokens.message_start],
    }
    with raises(InvalidRequestError, reason="INVALID_PROMPT", match="begins no answer of the assistant"):
        Thinker2Talker(tiny_qwen3_omni).push(Packet({"prompt_ids": np.array(prompts[ending], np.int32)}))


# -- from the talker to code2wav


CODES = np.array([[0, 9], [7, 1], [8, 1], [3, 3], [9, 0]], np.int32)
SPOKEN = CODES[[0, 1, 3]]


def folder_of(path: Path, codebook_size: object) -> Path:
    config = {"model_type": "qwen3_omni_moe", "code2wav_config": {"codebook_size": codebook_size}}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 4], [2], [3]], ids=str)
def test_frames_with_special_codes_are_removed(tmp_path: Path, cuts: list[int]) -> None:
    transform = Talker2Code2Wav(folder_of(tmp_path, 8))
    packets = [Packet({"codes": piece}, {"part": 1}) for piece in pieces(CODES, cuts)]
    made = [each.tensors["codes"] for packet in packets for each in transform.push(packet)]
    assert all(len(codes) for codes in made)
    np.testing.assert_array_equal(np.concatenate([*made, *transform.finish()]), SPOKEN)


def test_an_edge_finds_the_transform_by_its_name(tmp_path: Path) -> None:
    descriptor = load_descriptor(TransformDescriptor, "qwen3_omni.talker2code2wav")
    transform = import_factory(descriptor.factory)(folder_of(tmp_path, 10))
    assert [packet.tensors["codes"].tolist() for packet in transform.push(Packet({"codes": CODES}))] == [CODES.tolist()]


def test_a_wrong_codebook_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match=r"code2wav_config\.codebook_size is 0"):
        Talker2Code2Wav(folder_of(tmp_path, 0))
