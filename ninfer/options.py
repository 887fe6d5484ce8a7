"""Flags, environment names, defaults, units and help: the one place for all of them.

Each options class is a frozen dataclass; every field is declared with `option(...)`. A value comes
from the flag, else from the environment (`NINFER_` + the field name in capitals; an empty variable
counts as unset), else the default:

    parser = argparse.ArgumentParser(); add_options(parser, EngineOptions)
    options = read_options(EngineOptions, parser.parse_args(), os.environ)   # OptionError
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeVar

from ninfer.contract.drafting import MAX_DRAFT_TOKENS
from ninfer.contract.errors import OptionError
from ninfer.option_values import (
    parse_bool,
    parse_bytes,
    parse_bytes_or_none,
    parse_cases,
    parse_float,
    parse_host,
    parse_int,
    parse_keys,
    parse_media_hosts,
    parse_name,
    parse_names,
    parse_origins,
    parse_output_name,
)

ENVIRONMENT_PREFIX: Final = "NINFER_"
INPUT_LIMIT_MIB: Final = 64
"""Most that is read of a file or pipe that an option names."""
MODEL: Final = "model"
"""The name of the argument that is no option; its variable is NINFER_MODEL."""
NO_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({})
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """How one field is parsed and described. `parse` raises ValueError with a readable text.

    aliases     other flags of the same meaning
    is_list     the flag may be repeated; `parse` makes a tuple of one text
    is_secret   never shown to anybody
    """

    help: str
    parse: Callable[[str], Any]
    metavar: str | None
    choices: tuple[str, ...] | None
    is_switch: bool
    is_list: bool = False
    is_secret: bool = False
    aliases: tuple[str, ...] = ()


def option(
    default: Any,
    help: str,
    *,
    parse: Callable[[str], Any] = str,
    metavar: str | None = None,
    choices: tuple[str, ...] | None = None,
    is_list: bool = False,
    is_secret: bool = False,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Declare one field of an options class.

    A bool default, or None with `parse_bool`, makes a `--name/--no-name` switch.
    """
    is_switch = isinstance(default, bool) or parse is parse_bool
    spec = OptionSpec(
        help,
        parse_bool if is_switch else parse,
        metavar,
        choices,
        is_switch,
        is_list,
        is_secret,
        aliases,
    )
    return field(default=default, repr=not is_secret, metadata={"option": spec})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a model is loaded and run."""

    executor: str = option(
        "auto",
        "where the model runs; auto takes a usable NVIDIA GPU, else the CPU",
        choices=("auto", "cpu", "cuda"),
    )
    device: int = option(
        0, "the GPU to run on, counted from 0", parse=parse_int(0, 1023), metavar="N"
    )
    weights: str = option(
        "auto",
        "how projections are stored on a GPU; auto keeps the codes of a quantised checkpoint, else"
        " takes the first of bf16, fp8 and nvfp4 that fits",
        choices=("auto", "bf16", "fp8", "nvfp4"),
    )
    kv_dtype: str = option(
        "bf16", "how keys and values are stored on a GPU", choices=("bf16", "fp8", "int8")
    )
    kernels: str | None = option(
        None,
        "folder of compiled kernels that `kernels build` wrote; default they are compiled when"
        " first used",
        parse=parse_name,
        metavar="DIR",
    )
    max_concurrency: int = option(
        8, "sequences that run at once (lanes); also --max-running",
        parse=parse_int(1, 256), metavar="N", aliases=("--max-running",),
    )  # fmt: skip
    max_pending: int | None = option(
        None,
        "requests that may wait for a lane; default 4 per lane, at least 16; also --max-waiting",
        parse=parse_int(0, 1_000_000),
        metavar="N",
        aliases=("--max-waiting",),
    )
    max_context: int | None = option(
        None,
        "most tokens of one sequence, prompt and output; default what the model was trained for,"
        " lowered to what memory allows",
        parse=parse_int(1, 16_777_216),
        metavar="TOKENS",
    )
    memory_budget: int | None = option(
        None,
        "bytes for weights, KV pages and states together (512MiB, 2GiB); default within half of"
        " the free memory what the running lanes can use and 48 MiB for the context cache, on a GPU"
        " all that is free less 1 GiB",
        parse=parse_bytes,
        metavar="SIZE",
    )
    cache_slots: int | None = option(
        None,
        "saved states the context cache can hold on the device, for models with linear attention;"
        " default one for every seven times its bytes of KV pages, at most 512",
        parse=parse_int(0, 65_536),
        metavar="N",
    )
    host_cache_bytes: int | None = option(
        None,
        "host memory of the context cache, beside the memory budget; 0 = off; default a sixteenth"
        " of the free memory, at most 48 MiB, on a GPU a quarter, at most 8 GiB",
        parse=parse_bytes_or_none,
        metavar="SIZE",
    )
    cache_dir: str | None = option(
        None,
        "folder in which the context cache outlives the server; its files hold what was read from"
        " prompts; needs host memory of the cache; default none",
        parse=parse_name,
        metavar="DIR",
    )
    cache_dir_bytes: int = option(
        8 << 30,
        "most bytes of the files in that folder; the least recently used go first",
        parse=parse_bytes,
        metavar="SIZE",
    )
    prefill_chunk: int | None = option(
        None,
        "most prompt tokens computed between two decode steps; default 256, on a GPU 2048",
        parse=parse_int(1, 1_048_576),
        metavar="TOKENS",
    )
    max_decode_gap_ms: int = option(
        200,
        "longest time that running streams stand still for a part of somebody's prompt; a chunk"
        " that would take longer is cut, by what chunks took so far; 0 = any time",
        parse=parse_int(0, 3_600_000),
        metavar="MS",
    )
    cpu_threads: int | None = option(
        None,
        "threads of a matrix product in the CPU executor; default all processors but one",
        parse=parse_int(1, 4096),
        metavar="N",
    )
    spec: str = option(
        "none",
        "speculative decoding: tokens are guessed and several checked in one step, with the same"
        " answers; ngram guesses what followed the same words earlier in prompt and answer, mtp"
        " also asks the model's own MTP module, dflash a --draft-model",
        choices=("none", "ngram", "mtp", "dflash"),
    )
    draft_model: str | None = option(
        None,
        "directory of the DFlash or DFlash2 draft model, for --spec dflash",
        parse=parse_name,
        metavar="PATH",
    )
    draft_tokens: int | None = option(
        None,
        "most tokens that one sequence guesses at once, with --spec; default 7, with"
        " dflash what the draft model was trained for",
        parse=parse_int(1, MAX_DRAFT_TOKENS),
        metavar="N",
    )
    queue_timeout: float = option(
        120.0, "longest wait for a lane, in seconds", parse=parse_float(0.0, 86_400.0), metavar="S"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Generation defaults; they win over the model's generation_config, requests win over them."""

    temperature: float | None = option(
        None, "0 = greedy, at most 2", parse=parse_float(0.0, 2.0), metavar="X"
    )
    top_k: int | None = option(
        None, "only the k best tokens; 0 = off", parse=parse_int(-1, 2**31 - 1), metavar="N"
    )
    top_p: float | None = option(
        None, "smallest set of tokens with this mass", parse=parse_float(0.0, 1.0), metavar="X"
    )
    min_p: float | None = option(
        None, "drop tokens below this share of the best one",
        parse=parse_float(0.0, 1.0), metavar="X",
    )  # fmt: skip
    thinking_budget: int | None = option(
        None,
        "most tokens of a thought; then it is closed and the answer begins; default no limit",
        parse=parse_int(1, 2**31 - 1),
        metavar="TOKENS",
    )
    presence_penalty: float | None = option(
        None, "-2 to 2, over generated tokens", parse=parse_float(-2.0, 2.0), metavar="X"
    )
    frequency_penalty: float | None = option(
        None, "-2 to 2, over generated tokens", parse=parse_float(-2.0, 2.0), metavar="X"
    )
    repetition_penalty: float | None = option(
        None, "above 0, at most 10; 1 = off", parse=parse_float(1e-6, 10.0), metavar="X"
    )
    seed: int | None = option(
        None, "64-bit seed; default a new one for every request",
        parse=parse_int(-(2**63), 2**63 - 1), metavar="N",
    )  # fmt: skip
    max_tokens: int | None = option(
        None, "most tokens of an answer; default the rest of the context",
        parse=parse_int(0, 16_777_216), metavar="N",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The HTTP server."""

    host: str = option("127.0.0.1", "address to listen on", parse=parse_host)
    port: int = option(
        8080, "port to listen on; 0 = any free one", parse=parse_int(0, 65_535), metavar="PORT"
    )
    model_name: str | None = option(
        None, "name in /v1/models and answers; default the model's own",
        parse=parse_name, metavar="NAME",
    )  # fmt: skip
    model_alias: tuple[str, ...] = option(
        (), "further names of the model, with commas or repeated; each is listed in /v1/models",
        parse=parse_names, metavar="NAMES", is_list=True,
    )  # fmt: skip
    strict_model: bool = option(False, "answer 404 to requests that name another model")
    preserve_thinking: bool | None = option(
        None, "keep the thoughts of earlier turns in prompts; default as the template does",
        parse=parse_bool,
    )  # fmt: skip
    reasoning_field: str = option(
        "reasoning_content", "where chat answers have the model's thought",
        choices=("reasoning_content", "reasoning", "both"),
    )  # fmt: skip
    api_key: tuple[str, ...] = option(
        (),
        "keys that requests must bring one of, with commas or repeated; other users of the machine"
        " can read a command line, not its environment; default none is asked for",
        parse=parse_keys, metavar="KEYS", is_list=True, is_secret=True,
    )  # fmt: skip
    api_key_file: str | None = option(
        None, "file with a key on each line; blank lines and # comments do not count",
        parse=parse_name, metavar="FILE",
    )  # fmt: skip
    protect_metrics: bool = option(False, "ask for a key on /metrics too")
    cors_origins: tuple[str, ...] = option(
        (),
        "origins of web pages that may use the server, with commas or repeated; * = any; default"
        " none may",
        parse=parse_origins, metavar="ORIGINS", is_list=True,
    )  # fmt: skip
    max_request_mib: int = option(
        64, "largest request body in MiB", parse=parse_int(1, 4096), metavar="N"
    )
    allow_remote_media: bool = option(
        False,
        "fetch pictures and videos that requests name by http(s) address, from public addresses"
        " only; for models with vision",
    )
    remote_media_hosts: tuple[str, ...] = option(
        (),
        "the only hosts they are fetched from, with commas or repeated; .example.org = every host"
        " below it, HOST:PORT = at another port than 80 and 443; default any host",
        parse=parse_media_hosts, metavar="HOSTS", is_list=True,
    )  # fmt: skip
    max_connections: int = option(
        1024, "open connections at once", parse=parse_int(1, 1_000_000), metavar="N"
    )
    drain_grace: float = option(
        5.0, "seconds after SIGTERM in which new requests are still taken",
        parse=parse_float(0.0, 3600.0), metavar="S",
    )  # fmt: skip
    drain_timeout: float = option(
        120.0, "seconds after SIGTERM in which running requests may finish",
        parse=parse_float(0.0, 86_400.0), metavar="S",
    )  # fmt: skip
    exit_on_failure: bool = option(
        True, "end the server when its engine has died; off: it stays, and /health says so"
    )
    request_log: str | None = option(
        None,
        "file to which a line of JSON is added for every answer and refusal: tokens, times, what"
        " came from the context cache, no text; - is stdout; default none",
        parse=parse_name,
        metavar="FILE",
    )
    log_prompts: bool = option(
        False, "add the body of every request to the request log: all that clients send"
    )
    metric_aliases: str = option(
        "vllm",
        "also show figures in /metrics under the names that dashboards of other servers expect",
        choices=("vllm", "sglang", "all", "none"),
    )
    log_level: str = option(
        "info", "what is logged to stderr", choices=("debug", "info", "warning", "error")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The conversation."""

    system: str | None = option(None, "system prompt; default none", metavar="TEXT")
    think: bool | None = option(
        None, "let the model think before it answers; default as its template does",
        parse=parse_bool,
    )  # fmt: skip
    tools: str | None = option(
        None,
        'JSON file with OpenAI tools that the model may call, a list or {"tools": [...]} with a'
        " tool_choice; its calls are shown, not carried out; default none",
        parse=parse_name,
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """One answer."""

    prompt: str | None = option(
        None, "the prompt; - reads it from stdin, which is the default in a pipe", metavar="TEXT"
    )
    messages: str | None = option(
        None,
        'JSON file with OpenAI messages, a list or {"messages": [...]}; - reads stdin',
        parse=parse_name,
        metavar="FILE",
    )
    raw: bool = option(
        False, "feed the prompt as it is, without the chat template; special tokens are parsed"
    )
    timeout: float | None = option(
        None, "longest time for the answer, in seconds; default no limit",
        parse=parse_float(0.001, 86_400.0), metavar="S",
    )  # fmt: skip
    json: bool = option(False, "print one JSON object instead of streaming text")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """What is scored."""

    text: str | None = option(
        None, "UTF-8 text file; special tokens in it are parsed; - reads stdin",
        parse=parse_name, metavar="FILE",
    )  # fmt: skip
    ids: str | None = option(
        None, "JSON file with a list of token ids; - reads stdin",
        parse=parse_name, metavar="FILE",
    )  # fmt: skip
    window: int | None = option(
        None, "tokens scored from one empty state; default the context, at most 4096",
        parse=parse_int(2, 16_777_216), metavar="TOKENS",
    )  # fmt: skip
    stride: int | None = option(
        None, "tokens from one window's start to the next; default half a window",
        parse=parse_int(1, 16_777_216), metavar="TOKENS",
    )  # fmt: skip
    logits: str | None = option(
        None, "also write the logits, float32 [tokens, vocabulary] under the key `logits`",
        parse=parse_output_name, metavar="OUT.npz",
    )  # fmt: skip
    json: bool = option(False, "print one JSON object, with the NLL of every token")


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoOptions:
    """How the description is printed."""

    json: bool = option(False, "print one JSON object instead of a table")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """What is written."""

    out: str | None = option(
        None, "the artifact to write; needed", parse=parse_output_name, metavar="FILE.ninfer"
    )
    force: bool = option(False, "replace the file if it exists")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What is measured."""

    synthetic: str | None = option(
        None,
        "made-up weights of this model's shapes instead of a model's own",
        choices=(
            "qwen3.5-0.8b",
            "qwen3.5-2b",
            "qwen3.5-4b",
            "qwen3.5-9b",
            "qwen3.5-27b",
            "qwen3.5-35b-a3b",
            "qwen3-8b",
        ),
        metavar="NAME",
    )
    cases: tuple[tuple[int, int], ...] = option(
        ((1024, 1),),
        "prompt tokens and sequences decoded at once, 1024x1 or 1024x1,1024x8",
        parse=parse_cases,
        metavar="NxN,NxN",
    )
    output: int = option(
        64, "decode steps timed in each case", parse=parse_int(1, 1_000_000), metavar="TOKENS"
    )
    record: str | None = option(
        None, "also write all figures as JSON", parse=parse_output_name, metavar="FILE.json"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsOptions:
    """What is compiled."""

    arch: str | None = option(
        None, "architectures with commas (sm_90a,sm_120a); default all supported ones",
        metavar="NAMES",
    )  # fmt: skip
    out: str | None = option(
        None, "the folder to fill; needed", parse=parse_output_name, metavar="DIR"
    )
    jobs: int | None = option(
        None, "compilers at once; default one a processor", parse=parse_int(1, 4096), metavar="N"
    )


EXCLUSIVE: Final = (
    ("prompt", "messages"),
    ("raw", "messages"),
    ("raw", "system"),
    ("raw", "think"),
    ("text", "ids"),
    ("synthetic", MODEL),
)
"""Pairs of which a command takes at most one. A flag sets its partner's variable aside."""


def flag_of(name: str) -> str:
    return "MODEL" if name == MODEL else "--" + name.replace("_", "-")


def environment_name_of(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def variable_of(name: str, environ: Mapping[str, str]) -> str | None:
    """The text of an option's variable; None where it is unset or empty."""
    return environ.get(environment_name_of(name)) or None


def settled_environ(
    classes: Sequence[type[Any]], arguments: argparse.Namespace, environ: Mapping[str, str]
) -> dict[str, str]:
    """`environ` without the variables that a flag of an exclusive partner sets aside.

    `classes` are those of a command; a MODEL counts where `arguments` has one. Raises OptionError
    that names both where two flags, or two variables and no flag, exclude each other.
    """
    fields = {item.name: item for cls in classes for item in dataclasses.fields(cls)}
    known = {*fields, *({MODEL} & vars(arguments).keys())}
    pairs = [pair for pair in EXCLUSIVE if known.issuperset(pair)]
    flags = {name: getattr(arguments, name, None) for name in known}
    settled = dict(environ)
    for first, second in pairs:
        by_flag = [name for name in (first, second) if _is_asked(fields.get(name), flags[name])]
        if len(by_flag) == 2:
            raise OptionError(flag_of(second), f"goes without {flag_of(first)}")
        if by_flag:
            settled.pop(environment_name_of(second if by_flag == [first] else first), None)
    for pair in pairs:
        if all(_is_asked_by_variable(name, fields.get(name), settled) for name in pair):
            first, second = (environment_name_of(name) for name in pair)
            raise OptionError(second, f"goes without {first}; a flag would choose one of them")
    return settled


def _is_asked(item: dataclasses.Field[Any] | None, value: Any) -> bool:
    """A switch that is switched to what it is anyway stands in nobody's way."""
    return value is not None and (item is None or value != item.default)


def _is_asked_by_variable(
    name: str, item: dataclasses.Field[Any] | None, environ: Mapping[str, str]
) -> bool:
    text = variable_of(name, environ)
    if text is None or item is None:
        return text is not None
    spec: OptionSpec = item.metadata["option"]
    return _is_asked(item, parse_value(spec, environment_name_of(name), text))


def specs_of(cls: type[Any]) -> dict[str, OptionSpec]:
    """Field name -> spec, in declaration order."""
    return {item.name: item.metadata["option"] for item in dataclasses.fields(cls)}


def add_options(
    parser: argparse.ArgumentParser, cls: type[Any], defaults: Mapping[str, Any] = NO_DEFAULTS
) -> None:
    """Add one flag a field. Values stay text; `read_options` parses them, so errors look alike.

    `defaults` are a command's own, where they differ from those of the class.
    """
    group = parser.add_argument_group((cls.__doc__ or "").strip().rstrip("."))
    for item in dataclasses.fields(cls):
        spec: OptionSpec = item.metadata["option"]
        default = defaults.get(item.name, item.default)
        text = f"{spec.help} [{environment_name_of(item.name)}{_default_text(default)}]"
        flag = flag_of(item.name)
        if spec.is_list:
            metavar = spec.metavar or item.name.upper()
            group.add_argument(
                flag, dest=item.name, action="append", metavar=metavar, help=_escaped(text)
            )
            continue
        if spec.is_switch:
            action = argparse.BooleanOptionalAction
            group.add_argument(
                flag, dest=item.name, action=action, default=None, help=_escaped(text)
            )
            continue
        metavar = spec.metavar or item.name.upper()
        if spec.choices is not None and spec.metavar is None:
            metavar = "{" + ",".join(spec.choices) + "}"
        elif spec.choices is not None:
            text = f"{spec.help}: {', '.join(spec.choices)} {text.removeprefix(spec.help).strip()}"
        group.add_argument(
            flag, *spec.aliases, dest=item.name, metavar=metavar, help=_escaped(text)
        )


def _escaped(text: str) -> str:
    """argparse would fill in what follows a percent sign."""
    return text.replace("%", "%%")


def read_options(
    cls: type[T],
    arguments: argparse.Namespace,
    environ: Mapping[str, str],
    defaults: Mapping[str, Any] = NO_DEFAULTS,
) -> T:
    """Build `cls` from parsed flags and the environment. Raises OptionError naming the source."""
    values: dict[str, Any] = dict(defaults)
    for name, spec in specs_of(cls).items():
        given = getattr(arguments, name, None)
        if given is not None:
            values[name] = _given_value(spec, flag_of(name), given)
            continue
        text = variable_of(name, environ)
        if text is not None:
            values[name] = parse_value(spec, environment_name_of(name), text)
    return cls(**values)


def _given_value(spec: OptionSpec, flag: str, given: Any) -> Any:
    """The value of a flag as argparse hands it over."""
    if spec.is_switch:
        return given
    if spec.is_list:
        return tuple(value for text in given for value in parse_value(spec, flag, text))
    return parse_value(spec, flag, given)


def parse_value(spec: OptionSpec, source: str, text: str) -> Any:
    """One option's value from text; OptionError names `source` (flag, variable or setting)."""
    if spec.choices is not None and text not in spec.choices:
        raise OptionError(source, f"{text!r} is not one of {', '.join(spec.choices)}")
    try:
        return spec.parse(text)
    except ValueError as error:
        raise OptionError(source, str(error)) from None


def _default_text(default: Any) -> str:
    if default is None:
        return ""
    if isinstance(default, bool):
        return f", default {'on' if default else 'off'}"
    if isinstance(default, tuple) and not default:
        return ""
    if isinstance(default, tuple):
        return f", default {','.join('x'.join(map(str, item)) for item in default)}"
    return f", default {default}"
