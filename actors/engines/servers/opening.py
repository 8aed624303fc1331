"""From settings to a server and the engine over it: starts the server, or attaches to one that runs."""

import hashlib
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping

from actors.context import Context
from actors.engines import limits
from actors.engines.servers.engine import ServerEngine, Shape
from actors.engines.servers.link import Link, Refused
from actors.engines.servers.process import ServerProcess, free_port, installed
from actors.engines.servers.relay import Relay
from actors.engines.servers.sglang import SGLang
from actors.engines.servers.sglang_probe import OLDEST, number, probe
from actors.models.loading import empty_model, stop_ids
from areal_bus.config import Config
from areal_bus.errors import ConfigError, EngineLost

POLL_S = 0.2
LOOPBACK = ("127.0.0.1", "lo")
ROOM = 8  # positions beyond the model's: SGLang ends a completion a few tokens before its limit
STREAM = 16  # tokens in an event: what is not yet sent when a generator dies is lost
SPARE = 2  # times the tokens of all slots, on CPU: room for what they share


def open_engine(context: Context, config: Config, tokenizer: Any) -> ServerEngine:
    """The engine of this generator, its server ready for the first weights.

    Raises ConfigError for a server that cannot serve the run, or that is not there when the job begins; EngineLost for
    one that is not there later.
    """
    model = empty_model(context.model_folder, config.model.dtype, "meta")
    shape = shape_of(model)
    architecture = (getattr(model.config, "architectures", None) or [""])[0]
    try:
        return _open(context, config, shape, architecture, stop_ids(model, tokenizer))
    except EngineLost as error:
        if context.incarnation:
            raise
        raise ConfigError(f"rollout.engine = {config.rollout.engine!r}: {error}") from error


def shape_of(model: Any) -> Shape:
    """Raises ConfigError for a model whose parameters have other names than its files: servers pass over those names
    without a word, and would sample with the weights that they were started with.
    """
    if get_model_conversion_mapping(model, add_legacy=False):
        raise ConfigError(
            "a server is sent weights under the names that the model's files have: transformers joins or renames those "
            f'of {model.config.model_type}; set rollout.engine = "builtin"'
        )
    return Shape(
        parameters=dict(model.named_parameters()),
        vocabulary=int(model.get_input_embeddings().num_embeddings),
        most_tokens=limits.most_tokens(model.config),
    )


def _open(context: Context, config: Config, shape: Shape, architecture: str, stops: frozenset[int]) -> ServerEngine:
    process, url = _process(context, config, shape)
    link = Link(url)
    try:
        wait_ready(link, process, timeout_s=config.engine.start_timeout_s)
        keep, call_s = config.rollout.on_update == "keep", config.engine.call_timeout_s
        abilities = probe(link, architecture=architecture, keep=keep, timeout_s=call_s)
        address, interface = LOOPBACK if process is not None else (context.address, context.interface)
        server = SGLang(
            link,
            Relay(address=address, interface=interface),
            abilities,
            group=f"{context.name}-{uuid.uuid4().hex[:12]}",
            stop_ids=sorted(stops),
            bucket_bytes=config.weights.bucket_mib << 20,
            call_timeout_s=call_s,
            load_timeout_s=config.weights.timeout_s,
            process=process,
        )
    except BaseException:
        link.close()
        if process is not None:
            process.close()
        raise
    return ServerEngine(
        server,
        link,
        shape,
        name=uuid.uuid4().hex,
        on_update=config.rollout.on_update,
        silent_s=config.engine.silent_s,
        call_timeout_s=call_s,
    )


def _process(context: Context, config: Config, shape: Shape) -> tuple[ServerProcess | None, str]:
    """The server, when it is ours, and its address."""
    urls = config.engine.urls
    if urls and context.index >= len(urls):
        raise ConfigError(
            f"engine.urls has a server for each generator: {len(urls)} for generator {context.index}; add one"
        )
    if urls:
        return None, urls[context.index]
    python = interpreter(config.engine.python, Path(context.config_folder))
    version = installed(python, "sglang")
    if number(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"SGLang {oldest} or newer is needed, for safety: {python} has {version}; upgrade it")
    port = free_port()
    command = [
        python,
        "-m",
        "sglang.launch_server",
        *arguments(context, config, most_tokens=shape.most_tokens, port=port),
    ]
    log = context.folder / "logs" / f"{context.name}.server.txt"
    return ServerProcess(command, log, environment(context)), f"http://127.0.0.1:{port}"


def interpreter(python: str, folder: Path) -> str:
    """A relative path is taken from the working directory, else from `folder`; empty: this process's own."""
    if not python:
        return sys.executable
    given = Path(python).expanduser()
    if given.is_absolute() or not (folder / given).exists():
        return str(given.absolute())  # not resolved: an environment's interpreter is a link
    return str(given.absolute() if given.exists() else folder / given)


def arguments(context: Context, config: Config, *, most_tokens: int, port: int) -> list[str]:
    """The server's command line: ours, then the user's, which win."""
    rollout, gconfig = config.rollout, config.gconfig
    words: Sequence[object] = [
        "--model-path", context.model_folder,
        "--host", "127.0.0.1",
        "--port", port,
        "--load-format", "dummy",  # all weights come by push
        "--dtype", config.model.dtype,
        "--tp-size", config.topology.tensor_parallel,
        "--context-length", most_tokens + ROOM,
        "--max-running-requests", rollout.max_concurrent_rollouts,
        "--random-seed", seed(config.run.seed, context),
        "--skip-tokenizer-init",
        "--skip-server-warmup",
        "--incremental-streaming-output",
        "--stream-interval", STREAM,
    ]  # fmt: skip
    if rollout.on_update == "keep":
        words = [*words, "--disable-radix-cache", "--disable-overlap-schedule"]
    if context.device == "cpu":
        longest = min(config.data.max_prompt_tokens + gconfig.max_new_tokens, most_tokens) + ROOM
        words = [
            *words,
            "--device", "cpu",
            "--attention-backend", "torch_native",
            "--grammar-backend", "none",
            "--disable-overlap-schedule",
            "--max-total-tokens", max(SPARE * longest * rollout.max_concurrent_rollouts, most_tokens + ROOM),
        ]  # fmt: skip
    return [*map(str, words), *config.engine.arguments]


def seed(run_seed: int, context: Context) -> int:
    """Another number for each generator and each of its lives: their samples of one prompt are to differ."""
    text = f"{run_seed},{context.index},{context.incarnation}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1


def environment(context: Context) -> dict[str, str]:
    """What the server needs to know besides."""
    more = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "GLOO_SOCKET_IFNAME": LOOPBACK[1],
        "NCCL_SOCKET_IFNAME": LOOPBACK[1],
    }
    return more | {"SGLANG_USE_CPU_ENGINE": "1"} if context.device == "cpu" else more


def wait_ready(link: Link, process: ServerProcess | None, *, timeout_s: float) -> None:
    """Until it answers. Raises EngineLost when it ends or does not within that time; one that runs answers at once."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            link.call("GET", "/model_info", timeout_s=10.0)
        except Refused as error:
            if error.status == 404:  # an older one, which the probe looks at
                return
            why = str(error)
        except EngineLost as error:
            if process is None:
                raise EngineLost(f"{error}; start it, or correct engine.urls") from None
            why = str(error)
        else:
            return
        if process is not None:
            process.check()
        if time.monotonic() > deadline:
            raise EngineLost(f"a server must be ready within engine.start_timeout_s ({timeout_s:g}): {why}")
        time.sleep(POLL_S)
