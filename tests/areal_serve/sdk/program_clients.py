"""Two clients at once: each prints what it learns; alone or together, it must be the same."""

import json
import sys

import numpy as np
import tinker
from tinker import types


def main(names):
    capabilities = tinker.RestClient().get_server_capabilities().result()
    base = capabilities.supported_models[0].model_name
    clients = {}
    for name in names:
        service = tinker.ServiceClient()
        seed = ord(name)
        clients[name] = (
            service.create_lora_training_client(base_model=base, rank=2 + seed % 2, seed=seed).result(),
            [],
        )
    for turn in range(4):
        waits = []
        for name, (training, _) in clients.items():
            rng = np.random.default_rng(ord(name) + turn)
            waits.append(training.forward_backward([datum(rng) for _ in range(3)], "cross_entropy"))
            waits.append(training.optim_step(types.AdamParams(learning_rate=1e-2)))
        [wait.result() for wait in waits]
        for training, found in clients.values():
            sampling = training.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=6, seed=turn, stop=[])
            reply = sampling.sample(types.ModelInput.from_ints([5, 9, 4]), 2, params).result()
            found.append([[seq.tokens, seq.logprobs] for seq in reply.sequences])
    print(json.dumps({name: found for name, (_, found) in clients.items()}))


def datum(rng):
    inputs = {"target_tokens": rng.integers(3, 20, 8), "weights": np.ones(8, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(rng.integers(3, 20, 8).tolist()), loss_fn_inputs=inputs)


if __name__ == "__main__":
    main(sys.argv[1:])
