"""A live request: its prompt, the tokens sampled so far and the version of each span."""

from dataclasses import dataclass, field

from actors.engines.builtin.uniforms import Uniforms
from actors.engines.protocol import Completion, Request
from areal_bus.messages import Finish


@dataclass(slots=True)
class Sequence:
    """One live request."""

    request: Request
    prompt: tuple[int, ...]
    uniforms: Uniforms
    filled: int  # version that computed the KV cache of its prompt
    cached: bool = False  # all but its last token are in the cache
    sampled: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.sampled)

    @property
    def last(self) -> int:
        return self.sampled[-1] if self.sampled else self.prompt[-1]

    @property
    def n_left(self) -> int:
        """Tokens left of its budget."""
        return self.request.max_new_tokens - len(self.sampled)

    def add(self, tokens: list[int], logps: list[float], version: int) -> None:
        self.sampled += tokens
        self.logps += logps
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][1] += len(tokens)
        else:
            self.spans.append([version, len(tokens)])

    def completion(self, finish: Finish) -> Completion:
        return Completion(self.request.key, self.sampled, self.logps, self.spans, str(finish))


def new_sequence(request: Request, *, version: int) -> Sequence:
    """The sequence of a request. Tokens of a partial rollout count as sampled; they are not in the cache."""
    row = Sequence(request, tuple(request.ids), Uniforms(request.seed), filled=version)
    if (done := request.done) is not None:
        row.sampled, row.logps, row.spans = list(done.ids), list(done.logps), [list(x) for x in done.spans]
    return row
