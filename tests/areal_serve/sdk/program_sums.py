"""A loop of reinforcement learning on one-digit sums, as a client writes it: sample, reward, centre, train."""

import json
import random
import re
import sys

import tinker
from tinker import types

N_STEPS, N_PROBLEMS, N_SAMPLES = int(sys.argv[1]), 8, 8


def main():
    service = tinker.ServiceClient()
    base = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    training = service.create_lora_training_client(base_model=base, rank=16, seed=1, train_unembed=False).result()
    tokenizer, draw = training.get_tokenizer(), random.Random(1)
    rewards = []
    for _ in range(N_STEPS):
        sampling = training.save_weights_and_get_sampling_client().result()
        sums = [(draw.randrange(10), draw.randrange(10)) for _ in range(N_PROBLEMS)]
        asked = [(a + b, prompt_of(tokenizer, a, b)) for a, b in sums]
        params = types.SamplingParams(max_tokens=8, temperature=1.0)
        futures = [sampling.sample(types.ModelInput.from_ints(ids), N_SAMPLES, params) for _, ids in asked]
        data, earned = [], []
        for (answer, ids), future in zip(asked, futures, strict=True):
            sequences = future.result().sequences
            scores = [score(tokenizer, one, answer) for one in sequences]
            earned += scores
            mean = sum(scores) / len(scores)
            data += [trained(ids, one, own - mean) for one, own in zip(sequences, scores, strict=True) if own != mean]
        rewards.append(sum(earned) / len(earned))
        if data:
            passed = training.forward_backward(data, "importance_sampling")
            stepped = training.optim_step(types.AdamParams(learning_rate=4e-4, beta2=0.95, eps=1e-8))
            passed.result(), stepped.result()
    print(json.dumps({"rewards": rewards}))


def prompt_of(tokenizer, a, b):
    """A turn of the user, as configs/demo.toml has it: no system message."""
    question = f"What is {a}+{b}? Reply with just the number."
    return tokenizer.encode(
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )


def score(tokenizer, sequence, answer):
    """The demo's reward: half for the last number, half for nothing but the number."""
    text = tokenizer.decode(sequence.tokens, skip_special_tokens=True)
    numbers = re.findall(r"\d+", text)
    return 0.5 * (bool(numbers) and int(numbers[-1]) == answer) + 0.5 * (text.strip() == str(answer))


def trained(ids, sequence, advantage):
    """The datum of a sample: its prompt has advantage 0."""
    n = len(ids) - 1
    tokens = sequence.tokens
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids + tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": [0] * n + tokens,
            "logprobs": [0.0] * n + sequence.logprobs,
            "advantages": [0.0] * n + [advantage] * len(tokens),
        },
    )


if __name__ == "__main__":
    main()
