"""The options of `stagemesh bench`."""

from stagemesh.bench.settings import Arrivals, Endpoint
from stagemesh.cli.requests.request_options import ADMISSION, CONTENT, SAMPLING, STAGES
from stagemesh.cli.terminal.connection_options import SERVER
from stagemesh.cli.terminal.options import Kind, Parameters, in_panel, option

DEFAULT_PROMPT = "Tell me about the sea in three sentences."
API_KEY = "OPENAI_API_KEY"
"""The environment variable with the API key, unless an option names another one."""

_HTTP: Parameters = {
    "openai": option(
        str,
        "Measure the server with OpenAI's API at this URL, for example http://127.0.0.1:8000, instead of a pipeline.",
        "--openai",
        metavar="URL",
    ),
    "model": option(Kind.NAME, "Send requests to this model of the server."),
    "endpoint": option(
        Endpoint, "Send chat completions (chat) or requests for speech as PCM (speech).", default=Endpoint.CHAT
    ),
    "modalities": option(
        str,
        "Request these modalities of chat completions, separated by commas: text, or text and audio.",
        default="text",
        metavar="NAMES",
    ),
    "sample_rate": option(int, "Set the sample rate of PCM audio in hertz.", default=24_000, min=1, metavar="HZ"),
    "api_key_env": option(
        str,
        f"Send the API key in this environment variable. Uses {API_KEY} if omitted, and sends no key if that is not "
        "set.",
        metavar="VARIABLE",
    ),
}
_LOAD: Parameters = {
    "concurrency": option(
        str,
        "Keep this number of requests running: each caller sends its next request when the last one has ended. Several "
        "numbers, separated by commas, are measured one after the other. Uses 1 if --rate is omitted, too.",
        metavar="N[,N]...",
    ),
    "rate": option(
        str,
        "Send this number of requests per second, whether or not earlier ones have ended. Several numbers, separated "
        "by commas, are measured one after the other.",
        metavar="R[,R]...",
    ),
    "arrivals": option(
        Arrivals,
        "Choose the times between the requests of --rate: random (poisson), equal (uniform), or several requests at "
        "once (burst).",
        default=Arrivals.POISSON,
    ),
    "burst": option(int, "Set the number of requests that arrive at once with --arrivals burst.", default=8, min=1),
    "requests": option(
        int, "Send this number of requests for each load. Uses 100 if --duration is omitted, too.", min=1
    ),
    "duration": option(Kind.SECONDS, "Send requests for this number of seconds for each load.", min=0.001),
    "warmup": option(
        int,
        "Send this number of requests first, which are not counted: one, then the others at once. 0 sends none.",
        default=1,
        min=0,
    ),
    "seed": option(
        int,
        "Set the seed of the arrival times, of the order of requests and of the requests themselves. The same seed "
        "repeats them.",
        default=0,
        min=0,
    ),
    "timeout": option(
        Kind.SECONDS,
        "Count a request as failed if it takes longer than this number of seconds.",
        default=300.0,
        min=0.001,
    ),
}
_REPORT: Parameters = {
    "limits": option(
        list[str],
        "Count a request as good only if this figure is at most this value, in seconds or as a factor: ttft, ttfa, "
        "e2e, inter_token, inter_chunk, underrun, total_underrun or rtf. Repeatable: all must be met.",
        "--limit",
        metavar="FIGURE=VALUE",
    ),
    "json_file": option(
        str,
        "Write the results to this file as JSON. A single - writes them to standard output, without the table.",
        "--json",
        metavar="FILE",
    ),
    "plot": option(
        Kind.FILE,
        "Write a PNG file with the latencies and the throughput against the load. Needs the extra bench.",
        "--plot",
    ),
}

BENCH: Parameters = {
    **SERVER,
    **in_panel("Server with OpenAI's API", _HTTP),
    **in_panel("Load", _LOAD),
    "prompt": option(
        [Kind.TEXT],
        f"Send this prompt. Repeatable: each prompt is sent equally often. Sends {DEFAULT_PROMPT!r} if omitted.",
    ),
    "requests_file": option(
        Kind.INPUT_FILE,
        "Send the requests in this JSONL file: objects with prompt or messages, and optionally weight, max_tokens, "
        "outputs and options.",
    ),
    "max_tokens": SAMPLING["max_tokens"],
    "temperature": SAMPLING["temperature"],
    "ignore_eos": SAMPLING["ignore_eos"],
    "outputs": CONTENT["outputs"],
    "options": option(
        [Kind.PAIR],
        "Set an option that a stage of the pipeline declares, or a field of the HTTP body, such as voice=alto. Double "
        "quotes make any value a text. Repeatable.",
        "--option",
    ),
    "stage_parameters": STAGES["stage_parameters"],
    "priority": ADMISSION["priority"],
    "caller": ADMISSION["caller"],
    **in_panel("Report", _REPORT),
}
