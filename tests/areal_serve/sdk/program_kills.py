"""Trains and samples for N updates, prints the end; kills processes of the server, given by their roles, in between."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import tinker
from tinker import types

RUN, N_UPDATES = sys.argv[1], int(sys.argv[2])
KILLS = sys.argv[3:]  # roles, killed in this order, spread over the updates


def pids(role):
    """Processes of this server, by the words of their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        is_role = "areal_serve.process" in words if role == "front" else "areal_serve.worker" in words and role in words
        if is_role and RUN in words:
            found.append(int(path.parent.name))
    return found


def main():
    service = tinker.ServiceClient()
    base = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    training = service.create_lora_training_client(base_model=base, rank=4, seed=5).result()
    rng = np.random.default_rng(0)
    every = max(1, N_UPDATES // (len(KILLS) + 1))
    n_killed = 0
    sampled = []
    for update in range(N_UPDATES):
        data = []
        for n in rng.integers(5, 20, 3):
            ids = rng.integers(3, 20, n + 1)
            inputs = {"target_tokens": ids[1:], "weights": np.ones(n, np.float32)}
            data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs))
        drawn = sample(training) if update % 4 == 1 else None
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
        if n_killed < len(KILLS) and update % every == every - 1:
            for pid in pids(KILLS[n_killed])[:1]:
                os.kill(pid, signal.SIGKILL)
                n_killed += 1
        losses = passed.result().metrics["loss:sum"]
        steps = stepped.result().metrics["step:max"]
        if drawn is not None:
            sampled += [[one.tokens, one.logprobs] for one in drawn.result().sequences]
    sampled += [[one.tokens, one.logprobs] for one in sample(training).result().sequences]
    end = [training.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist(), sampled]
    print(json.dumps({"end": end, "loss": losses, "steps": steps, "kills": n_killed}))


def sample(training):
    sampling = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, seed=1, stop=[])
    return sampling.sample(types.ModelInput.from_ints([5, 9, 4]), 2, params)


if __name__ == "__main__":
    main()
