import asyncio
import re
import time
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Self

import pytest
from PIL import Image

from stagemesh.bench.loads import Load, LoadRun, LoadRunner, LoadSettings
from stagemesh.bench.measurements import Failure, Measurement
from stagemesh.bench.plot import write_plot
from stagemesh.bench.report import make_report, summarize, to_document
from stagemesh.bench.settings import Arrivals, arrival_times_s
from stagemesh.bench.targets import Clock, MixedRequest, draw_requests, read_requests
from stagemesh.common.errors import ExitCode, InvalidRequestError
from tests.cli.commands import invoke
from tests.rpc.call_errors import raises


def times_s(pattern: Arrivals, count: int, *, seed: int = 1) -> list[float]:
    return list(islice(arrival_times_s(pattern, rate_per_s=20, burst=4, seed=seed), count))


def measured(*, due_s: float = 0.0, text_s: float = 0.1, ended_s: float = 1.0) -> Measurement:
    """Returns the measurement of a request with one text and no audio."""
    return Measurement(due_s, due_s, ended_s, [text_s], output_tokens=10)


def spoken(*chunks: tuple[float, float]) -> Measurement:
    """Returns the measurement of a request with chunks of audio: pairs of the arrival and the playing time."""
    one = Measurement(0.0, 0.0, chunks[-1][0])
    for at_s, duration_s in chunks:
        one.add_audio(at_s, duration_s=duration_s)
    return one


def failed(reason: str) -> Measurement:
    return Measurement(0.0, 0.0, 0.01, failure=Failure(reason, "it failed"))


def test_random_arrivals_have_the_rate_and_are_reproducible() -> None:
    found = times_s(Arrivals.POISSON, 4000)
    assert found == times_s(Arrivals.POISSON, 4000)
    assert found != times_s(Arrivals.POISSON, 4000, seed=2)
    gaps = [later - earlier for earlier, later in pairwise(found)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    # The standard deviation of an exponential distribution is its mean.
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15)


def test_uniform_arrivals_have_equal_gaps() -> None:
    assert times_s(Arrivals.UNIFORM, 4) == pytest.approx([0, 0.05, 0.1, 0.15])


def test_bursts_arrive_together_at_the_same_average_rate() -> None:
    assert times_s(Arrivals.BURST, 9) == pytest.approx([0, 0, 0, 0, 0.2, 0.2, 0.2, 0.2, 0.4])


def test_requests_are_drawn_by_weight_in_a_reproducible_order(tmp_path: Path) -> None:
    path = tmp_path / "mix.jsonl"
    lines = ['{"prompt": "a", "weight": 3, "max_tokens": 5}', "", '{"messages": [{"role": "user", "content": "b"}]}']
    path.write_text("\n".join(lines))
    mix = read_requests(path)
    drawn = list(islice(draw_requests(mix, seed=3), 2000))
    assert drawn == list(islice(draw_requests(mix, seed=3), 2000))
    assert drawn.count(mix[0]) / len(drawn) == pytest.approx(0.75, abs=0.05)
    assert (mix[0].max_tokens, mix[1].messages[0].content) == (5, "b")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "tokens": 5}', "mix.jsonl:2: Object contains unknown field `tokens`"),
        ('{"weight": 2}', "mix.jsonl:2: give either prompt or messages"),
        ('{"prompt": "a", "weight": 0}', "mix.jsonl:2: weight is 0; it must be greater than 0"),
        ('{"prompt": "a", "max_tokens": 0}', "mix.jsonl:2: max_tokens is 0; it must be at least 1"),
        ("prompt", "mix.jsonl:2: JSON is malformed"),
        ("", "has no requests; add lines such as"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mix.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        read_requests(path)


def test_percentiles_are_interpolated() -> None:
    found = summarize([float(value) for value in range(101)])
    assert (found.p50, found.p90, found.p95, found.p99, found.mean, found.max) == (50, 90, 95, 99, 50, 100)
    assert summarize([1.0, 2.0]).p50 == 1.5


def test_a_listener_waits_for_late_audio() -> None:
    # The first chunk is played at 0.3, the second from 0.5 to 0.6, and the third one is 0.1 late.
    report = make_report(LoadRun(Load(1), [spoken((0.2, 0.1), (0.5, 0.1), (0.7, 1.0))], 2.0), {})
    assert report.figures["underrun"].max == pytest.approx(0.2)
    assert report.figures["total_underrun"].max == pytest.approx(0.3)
    assert report.figures["ttfa"].max == pytest.approx(0.2)
    assert report.figures["rtf"].max == pytest.approx(0.7 / 1.2)
    assert report.figures["inter_chunk"].count == 2


def test_c50_is_the_share_of_streams_without_an_underrun_over_50_ms() -> None:
    streams = [spoken((0, 1), (1 + late_s, 1)) for late_s in (0.0, 0.04, 0.06, 0.3)]
    assert make_report(LoadRun(Load(1), streams, 2.0), {}).c50 == 0.5


def test_audio_without_samples_is_not_the_first_audio() -> None:
    assert spoken((0.1, 0.0), (0.4, 1.0)).audio_chunks_s == [0.4]


def test_goodput_counts_requests_that_meet_all_limits() -> None:
    late, slow = measured(text_s=0.4), measured(ended_s=3.0)
    requests = [measured(), late, slow, failed("OVERLOADED")]
    goodput = make_report(LoadRun(Load(1), requests, 2.0), {"ttft": 0.3, "e2e": 2.0}).goodput
    assert goodput is not None
    assert (goodput.requests, goodput.share, goodput.requests_per_s) == (1, 0.25, 0.5)


def test_a_request_without_audio_misses_a_limit_of_audio_but_not_of_pauses() -> None:
    run = LoadRun(Load(1), [measured()], 1.0)
    shares = [make_report(run, {name: 1.0}).goodput for name in ("ttfa", "underrun", "inter_token", "inter_chunk")]
    assert [each.share for each in shares if each is not None] == [0, 0, 1, 1]


def test_failed_requests_are_counted_by_reason_and_have_no_figures() -> None:
    requests = [failed("INTERNAL"), failed("OVERLOADED"), failed("OVERLOADED"), measured(ended_s=1.0)]
    document = to_document(make_report(LoadRun(Load(rate_per_s=2.0), requests, 2.0), {}))
    assert document["errors"] == {"OVERLOADED": 2, "INTERNAL": 1}
    assert document["figures"]["e2e_s"]["count"] == 1
    assert document["throughput"] == {"requests_per_s": 0.5, "tokens_per_s": 5.0, "audio_s_per_s": 0.0}
    assert document["load"] == {"concurrency": None, "rate_per_s": 2.0}


class StallingTarget:
    """Answers at once. The first request blocks the whole process for `stall_s` seconds."""

    def __init__(self, *, stall_s: float = 0.0) -> None:
        self.stall_s = stall_s
        self.seeds: list[int] = []
        self.running = self.most_running = 0

    async def check(self) -> None: ...

    async def send(self, request: MixedRequest, measurement: Measurement, *, seed: int, clock: Clock) -> Failure | None:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        self.seeds.append(seed)
        if len(self.seeds) == 1:
            time.sleep(self.stall_s)  # noqa: ASYNC251 - it must block the generator of the load
        await asyncio.sleep(0)
        measurement.add_text(clock())
        self.running -= 1
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


def settings(requests: int | None = 10, *, duration_s: float | None = None) -> LoadSettings:
    return LoadSettings([MixedRequest(prompt="a")], 5, requests, duration_s, Arrivals.UNIFORM, 1)


async def results(target: StallingTarget, load: Load, shared: LoadSettings) -> Sequence[Measurement]:
    ended: list[Measurement] = []
    runner = LoadRunner(target, shared, on_result=ended.append)
    await runner.run(load)
    assert ended == runner.runs[0].measurements
    return ended


async def test_latencies_of_an_open_load_count_from_the_intended_arrival() -> None:
    found = await results(StallingTarget(stall_s=0.5), Load(rate_per_s=20.0), settings(6))
    # The last request was due at 0.25, and could be sent after the stall.
    assert [one.due_s for one in found] == pytest.approx([0.05 * index for index in range(6)])
    report = make_report(LoadRun(Load(rate_per_s=20.0), list(found), 1.0), {})
    assert min(one.ended_s - one.due_s for one in found) >= 0.25
    assert report.figures["ttft"].max >= 0.45
    assert report.figures["lag"].max >= 0.4


async def test_a_closed_load_keeps_its_concurrency_and_number_of_requests() -> None:
    target = StallingTarget()
    assert len(await results(target, Load(3), settings(10))) == 10
    assert target.most_running == 3
    assert sorted(target.seeds) == list(range(5, 15))


@pytest.mark.parametrize("load", [Load(2), Load(rate_per_s=200.0)], ids=["closed", "open"])
async def test_a_load_ends_after_its_duration(load: Load) -> None:
    found = await results(StallingTarget(), load, settings(None, duration_s=0.1))
    assert found
    assert max(one.due_s for one in found) < 0.1


def test_a_plot_is_a_png_file(tmp_path: Path) -> None:
    runs = [
        LoadRun(Load(count), [spoken((0.1 * count, 1), (1.5, 1)), measured(ended_s=count)], 2.0) for count in (4, 1)
    ]
    path = tmp_path / "new" / "plot.png"
    write_plot(path, [make_report(run, {"ttft": 0.5}) for run in runs])
    with Image.open(path) as image:
        image.load()
        assert (image.format, image.width > 1000, image.height > 500) == ("PNG", True, True)
        assert len(image.convert("RGB").getcolors(1 << 24) or ()) > 50


def test_a_plot_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with raises(InvalidRequestError, reason="CANNOT_WRITE", match="--plot: cannot write"):
        write_plot(tmp_path, [make_report(LoadRun(Load(1), [measured()], 1.0), {})])


MODEL = ["--openai", "http://a", "--model", "m"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1", "--rate", "2"], "give either --concurrency or --rate"),
        (["--concurrency", "1,x"], "give numbers greater than 0, separated by commas"),
        (["--rate", "0"], "give numbers greater than 0, separated by commas"),
        (["--requests", "1", "--duration", "1"], "give either --requests or --duration"),
        (["--limit", "speed=1"], "unknown figure 'speed'; known: ttft, ttfa"),
        (["--limit", "ttft=fast"], "the value of 'ttft=fast' is not valid"),
        (["--limit", "ttft=nan"], "ttft is nan; it must be at least 0"),
        (["--model", "m"], "--model: it needs --openai URL"),
        (["--endpoint", "speech"], "--endpoint: it needs --openai URL"),
        (["--arrivals", "burst"], "it needs --rate"),
        (["--rate", "1", "--burst", "3"], "it needs --arrivals burst"),
        (["--openai", "http://a"], "it is missing; --openai needs it"),
        (["--openai", "a:80", "--model", "m"], "give a URL such as http://127.0.0.1:8000"),
        ([*MODEL, "--modalities", "video"], "give text, or text,audio"),
        ([*MODEL, "--outputs", "text"], "set fields of the body with --option"),
        ([*MODEL, "--endpoint", "speech", "--max-tokens", "9"], "--max-tokens: it contradicts --endpoint speech"),
        ([*MODEL, "--api-key-env", "NO_KEY"], "variable NO_KEY is not set"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments: list[str], message: str) -> None:
    invoke("bench", *arguments).check(ExitCode.USAGE, message)
