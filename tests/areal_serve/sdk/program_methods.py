"""Calls every public method of the clients that this server serves, and compares the results with each other."""

import inspect
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from pathlib import Path

import numpy as np
import tinker
import torch
from tinker import types

warnings.simplefilter("ignore")
CALLED: set[str] = set()
FOUND: dict[str, object] = {}
NOT_SERVED = {  # of the SDK's clients: why
    "ServiceClient.copy_weights": "one project",
    "RestClient.copy_weights": "one project",
    "RestClient.get_audit_log": "no audit log",
    "RestClient.get_billing_usage": "no billing",
    "RestClient.get_current_checkpoint_storage_usage": "no billing",
    "RestClient.export_session_trace": "no traces",
    "RestClient.publish_checkpoint_from_tinker_path": "no public checkpoints",
    "RestClient.unpublish_checkpoint_from_tinker_path": "no public checkpoints",
    "RestClient.assign_session_project": "one project",
    "RestClient.search_sessions": "sessions are listed",
}
NO_SERVER = {
    "get_console_url",
    "get_playground_url",
    "get_telemetry",
    "from_sampler_handle",
    "create",
    "create_rest_client",
    "on_queue_state_change",
    "whoami",
}  # fmt: skip  they ask the hosted console, or nothing


def call(client, name, *args, **kwargs):
    CALLED.add(f"{type(client).__name__}.{name}")
    found = getattr(client, name)(*args, **kwargs)
    return found.result() if hasattr(found, "result") else found


def datum(seed=0, n=9):
    ids = np.random.default_rng(seed).integers(3, 20, n + 1)
    inputs = {"target_tokens": ids[1:], "weights": np.ones(n, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs)


def main():
    service, rest = tinker.ServiceClient(user_metadata={"who": "test"}, display_name="methods"), tinker.RestClient()
    name = call(rest, "get_server_capabilities").supported_models[0].model_name
    CALLED.add("ServiceClient.get_server_capabilities")
    service.get_server_capabilities()
    training = call(service, "create_lora_training_client", base_model=name, rank=4, seed=3, user_metadata={"a": "b"})
    train(service, training)
    sampling = sample(service, training, name)
    checkpoints(service, rest, training, sampling)
    whole = service.create_lora_training_client(base_model=f"{name}:full").result()
    FOUND["whole_is_lora"] = whole.get_info().is_lora
    refused = {}
    for method in NOT_SERVED:
        refused[method] = refusal({"ServiceClient": service, "RestClient": rest, "TrainingClient": whole}, method)
    call(service, "close", "success")
    FOUND["refused"] = refused
    FOUND["missing"] = sorted(public() - CALLED - NOT_SERVED.keys())
    print(json.dumps(FOUND))


def train(service, training):
    data = [datum(0), datum(1, 5)]
    FOUND["tokenizer"] = len(call(training, "get_tokenizer"))
    FOUND["rank"] = call(training, "get_info").lora_rank
    first = call(training, "forward", data, "cross_entropy").metrics["loss:sum"]
    for _ in range(5):
        passed = call(training, "forward_backward", data, "cross_entropy")
        call(training, "optim_step", types.AdamParams(learning_rate=1e-2))
    FOUND["loss"] = [first, call(training, "forward", data, "cross_entropy").metrics["loss:sum"]]
    FOUND["sum"] = [
        -float(sum(out["logprobs"].to_numpy().sum() for out in passed.loss_fn_outputs)),
        passed.metrics["loss:sum"],
    ]
    custom(service, training, data)


def custom(service, training, data):
    """A custom loss equal to cross_entropy has its gradient: the norms of two steps with learning rate 0 are equal."""
    still = types.AdamParams(learning_rate=0.0)
    training.forward_backward(data, "cross_entropy").result()
    norms = [training.optim_step(still).result().metrics["grad_norm:mean"]]

    def loss(data, logps):
        value = sum(
            -(logp * torch.tensor(one.loss_fn_inputs["weights"].tolist())).sum()
            for one, logp in zip(data, logps, strict=True)
        )
        return value, {"mine": 1.0}

    call(training, "forward_backward_custom", data, loss)
    norms.append(training.optim_step(still).result().metrics["grad_norm:mean"])
    traced = call(service, "create_custom_loss", traced_loss, input_ranks={"logprobs": 1, "weights": 1})
    training.forward_backward_custom(data, traced).result()
    norms.append(training.optim_step(still).result().metrics["grad_norm:mean"])
    FOUND["norms"] = norms


def traced_loss(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/mine:sum": loss}


def sample(service, training, name):
    sampling = call(training, "save_weights_and_get_sampling_client")
    prompt = types.ModelInput.from_ints([5, 9, 4, 12])
    params = types.SamplingParams(max_tokens=6, seed=4, stop=[])
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 3}
    asked["target_prompt_logprobs"] = types.TensorData.from_numpy(np.array([[3, -1], [4, 5], [-1, 6]]))
    replies = [call(sampling, "sample", prompt, 3, params, prompt_alt_tokens_k=2, **asked) for _ in range(2)]
    FOUND["same"] = [[seq.tokens for seq in reply.sequences] for reply in replies]
    (one, _, _), reply = replies[0].sequences, replies[0]
    whole = types.ModelInput.from_ints([5, 9, 4, 12, *one.tokens])
    logps = call(sampling, "compute_logprobs", whole)
    FOUND["logps"] = [reply.prompt_logprobs[1:] + one.logprobs, logps[1:]]
    FOUND["shapes"] = [len(reply.topk_prompt_logprobs), len(one.topk_logprobs), reply.target_prompt_logprobs.shape]
    FOUND["alternatives"] = reply.prompt_alt_tokens.tokens.shape
    data = types.Datum(
        model_input=types.ModelInput.from_ints(whole.to_ints()[:-1]),
        loss_fn_inputs={"target_tokens": whole.to_ints()[1:], "weights": [1.0] * (whole.length - 1)},
    )
    FOUND["learner"] = training.forward([data], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    base = call(service, "create_sampling_client", base_model=name)
    FOUND["base"] = [call(base, "get_base_model"), base.compute_logprobs(whole).result()[1:] != logps[1:]]
    call(base, "get_tokenizer")
    newest = training.save_weights_and_get_sampling_client(kind="inflight").result()
    before = newest.compute_logprobs(whole).result()
    training.forward_backward([data], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    training.save_weights_and_get_sampling_client(kind="inflight").result()
    FOUND["inflight"] = [
        before == newest.compute_logprobs(whole).result(),
        logps == sampling.compute_logprobs(whole).result(),
    ]
    handle = call(sampling, "get_sampler_handle")
    FOUND["handle"] = tinker.SamplingClient.from_sampler_handle(handle).compute_logprobs(whole).result() == logps
    return sampling


def checkpoints(service, rest, training, sampling):
    state = call(training, "save_state", "one", ttl_seconds=7200, user_metadata={"k": "v"}).path
    weights = call(training, "save_weights_for_sampler", "two").path
    call(training, "create_sampling_client", weights)
    data = [datum(5)]
    call(training, "load_state", state)
    call(training, "load_state_with_optimizer", state)
    others = [call(service, f"create_training_client_from_state{kind}", state) for kind in ("", "_with_optimizer")]
    FOUND["loaded"] = [one.forward(data, "cross_entropy").result().metrics["loss:sum"] for one in (training, *others)]
    FOUND["runs"] = [run.training_run_id for run in call(rest, "list_training_runs").training_runs]
    FOUND["run"] = call(rest, "get_training_run", training.model_id).training_run_id
    call(rest, "get_training_run_by_tinker_path", state)
    FOUND["checkpoints"] = sorted(
        one.checkpoint_id for one in call(rest, "list_checkpoints", training.model_id).checkpoints
    )
    FOUND["user_checkpoints"] = len(call(rest, "list_user_checkpoints").checkpoints)
    info = call(rest, "get_weights_info_by_tinker_path", state)
    FOUND["info"] = [info.is_lora, info.lora_rank]
    call(rest, "set_checkpoint_ttl_from_tinker_path", state, None)
    download(rest, training, state)
    session = training.model_id.partition(":")[0]
    FOUND["session"] = session in call(rest, "list_sessions").sessions
    FOUND["session_runs"] = len(call(rest, "get_session", session).training_run_ids)
    FOUND["sampler"] = call(rest, "get_sampler", sampling._sampling_session_id).base_model
    call(rest, "delete_checkpoint", training.model_id, "weights/one")
    call(rest, "delete_checkpoint_from_tinker_path", weights)
    FOUND["left"] = len(rest.list_checkpoints(training.model_id).result().checkpoints)


def download(rest, training, state):
    """By the clients, and by the SDK's command line, which exports a training checkpoint and deletes the export."""
    path = call(training, "save_weights_external", "three").path
    found = call(rest, "get_external_weights_urls", path)
    ours = {}
    for name, url in found.urls.items():
        with urllib.request.urlopen(url) as response:
            ours[name] = response.read()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tinker.cli", "checkpoint", "download", state, "--output", folder]
        subprocess.run(command, check=True, capture_output=True)
        (target,) = Path(folder).iterdir()
        theirs = {file.name: file.read_bytes() for file in target.iterdir()}
    FOUND["files"] = sorted(ours)
    FOUND["downloads"] = [ours == theirs, found.expires.timestamp() - time.time() > 3000]
    rest.delete_checkpoint_from_tinker_path(path).result()


def refusal(clients, method):
    """The error of a call that is not served."""
    kind, name = method.split(".")
    path = "tinker://a/external_weights/b"
    arguments = {
        "get_audit_log": (),
        "get_billing_usage": ("2026-01-01", "2026-01-02"),
        "get_current_checkpoint_storage_usage": (),
        "export_session_trace": ("session",),
        "search_sessions": (types.SessionSearchRequest(),),
        "assign_session_project": ("session", "project"),
    }
    try:
        found = getattr(clients[kind], name)(*arguments.get(name, (path,)))
        found.result() if hasattr(found, "result") else None
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "served"


def public():
    """Methods of the clients that are not deprecated copies of others."""
    found = set()
    for client in (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient):
        for name, _ in inspect.getmembers(client, callable):
            if not name.startswith("_") and not name.endswith("_async") and name not in NO_SERVER:
                found.add(f"{client.__name__}.{name}")
    return found


if __name__ == "__main__":
    main()
