"""How an SGLang server is started and met: its command line, its environment, and what is asked of it at first."""

from collections.abc import Sequence

from actors.context import Context
from actors.engines.servers.kinds import LOOPBACK, Kind, Met, longest, seed
from actors.engines.servers.protocol import Server
from actors.engines.servers.relay import Relay
from actors.engines.servers.sglang import SGLang
from actors.engines.servers.sglang_probe import OLDEST, ROOM, probe
from areal_bus.config import Config

STREAM = 16  # tokens in an event: what is not yet sent when a generator dies is lost
SPARE = 2  # times the tokens of all slots, on CPU: room for what they share


def command(context: Context, config: Config, *, most_tokens: int, port: int) -> list[str]:
    """What follows the interpreter: our words, then the user's, which win."""
    rollout = config.rollout
    words: Sequence[object] = [
        "-m", "sglang.launch_server",
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
        most = longest(config, most_tokens) + ROOM
        words = [
            *words,
            "--device", "cpu",
            "--attention-backend", "torch_native",
            "--grammar-backend", "none",
            "--disable-overlap-schedule",
            "--max-total-tokens", max(SPARE * most * rollout.max_concurrent_rollouts, most_tokens + ROOM),
        ]  # fmt: skip
    return [*map(str, words), *config.engine.arguments]


def environment(context: Context) -> dict[str, str]:
    """What the server needs to know besides."""
    more = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "GLOO_SOCKET_IFNAME": LOOPBACK[1],
        "NCCL_SOCKET_IFNAME": LOOPBACK[1],
    }
    return more | {"SGLANG_USE_CPU_ENGINE": "1"} if context.device == "cpu" else more


def meet(met: Met) -> Server:
    """The server, joined to a group of its own. Raises ConfigError for one that cannot serve the run, EngineLost."""
    config, call_s = met.config, met.config.engine.call_timeout_s
    keep = config.rollout.on_update == "keep"
    names = met.shape.parameters if met.process is None else None
    abilities = probe(
        met.link, architecture=met.architecture, names=names, keep=keep, longest=met.longest, timeout_s=call_s
    )
    return SGLang(
        met.link,
        Relay(address=met.address, interface=met.interface),
        abilities,
        group=met.name,
        stop_ids=sorted(met.stop_ids),
        bucket_bytes=config.weights.bucket_mib << 20,
        call_timeout_s=call_s,
        load_timeout_s=config.weights.timeout_s,
        is_known=met.is_known,
        process=met.process,
    )


SGLANG = Kind(
    packages=("sglang",),
    oldest=OLDEST,
    ready="/model_info",
    command=command,
    environment=environment,
    meet=meet,
)
