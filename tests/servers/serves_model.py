"""A server that speaks SGLang's routes and samples from the model that it is sent: `serves_model.py ... --port N ...`.

OFFSET in the environment is added to each log-prob that it reports: a server that counts wrong.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from actors.models.loading import empty_model, load_tokenizer, stop_ids  # noqa: E402
from tests.servers.speaks_sglang import SpeaksSGLang, Stream  # noqa: E402


class ServesModel(SpeaksSGLang):
    """One server on the loopback, its requests in threads."""

    def __init__(self, folder: str, *, port: int = 0, offset: float = 0.0) -> None:
        torch.set_num_threads(1)
        self.model, self.offset = empty_model(folder, "float32", "cpu"), offset
        for weights in self.model.parameters():
            weights.data.zero_()
        self.stops = set(stop_ids(self.model, load_tokenizer(folder)))
        super().__init__(port)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.architecture, self.allowed = type(self.model).__name__, 1 << 30

    def receive(self, body: dict[str, Any]) -> None:
        group, options = self.groups[body["group_name"]], c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            group.broadcast([tensor], options).wait()
            self.model.get_parameter(name).data.copy_(tensor)
        if body.get("weight_version") is not None:
            self.label = body["weight_version"]

    @torch.no_grad()
    def sample(self, stream: Stream) -> bool:
        params = stream.body["sampling_params"]
        if stream.finish or (self.is_paused and "rid" in stream.body):
            return stream.finish is not None
        ids = [*stream.body["input_ids"], *(token for _, token in stream.pairs)]
        logits = self.model(torch.tensor([ids])).logits[0, -1].double() / (params.get("temperature") or 1.0)
        logps = torch.log_softmax(logits, -1)
        token = int(torch.multinomial(logps.exp(), 1))
        stream.pairs.append((float(logps[token]) + self.offset, token))
        stream.labels.append(self.label)
        n = len(stream.pairs)
        if token in self.stops:
            stream.finish = {"type": "stop", "matched": token}
        elif n >= params["max_new_tokens"]:
            stream.finish = {"type": "length", "length": n}
        return True


if __name__ == "__main__":
    words = sys.argv
    ServesModel(
        words[words.index("--model-path") + 1],
        port=int(words[words.index("--port") + 1]),
        offset=float(os.environ.get("OFFSET", "0")),
    )
    threading.Event().wait()
