"""What the clients of a server (`areal-bus serve`) did: steps, tokens, lag and time of each. Pure: lines in, sums."""

from dataclasses import dataclass, field

from tools.report.facts.curves import Curve
from tools.run import Line, is_number, skips_incomplete

SUPERVISED = "cross_entropy"  # the loss whose mean per token shows whether a client learns


@dataclass(slots=True)
class Busy:
    """Seconds that at least one of many intervals covers. Intervals come in the order of their ends."""

    _parts: list[tuple[float, float]] = field(default_factory=list)  # apart from each other

    def add(self, begin: float, end: float) -> None:
        while self._parts and self._parts[-1][1] >= begin:
            begin = min(begin, self._parts.pop()[0])
        self._parts.append((begin, end))

    @property
    def seconds(self) -> float:
        return sum(end - begin for begin, end in self._parts)


@dataclass(slots=True)
class Client:
    """One session."""

    first_wall: float  # when its first call was accepted, and when its last one ended
    last_wall: float
    n_steps: int = 0  # optimizer steps
    n_passes: int = 0  # with a gradient
    n_trained: int = 0  # tokens
    n_sampled: int = 0
    n_errors: int = 0
    error: str = ""  # the last one
    lags: list[int] = field(default_factory=lambda: [0, 0, 0])  # passes with a known lag, their sum, the largest
    trainer_s: float = 0.0  # the trainer worked on its calls
    waits: dict[str, Busy] = field(default_factory=lambda: {name: Busy() for name in ("training", "sampling", "any")})
    loss: Curve = field(default_factory=Curve)  # mean per trained token of each supervised pass

    @property
    def wall_s(self) -> float:
        return self.last_wall - self.first_wall

    @property
    def own_s(self) -> float:
        """Seconds without a call in flight: the client's own code, or a pause."""
        return max(0.0, self.wall_s - self.waits["any"].seconds)


@dataclass(slots=True)
class Clients:
    """Takes `call` lines in the order of their wall time."""

    of: dict[str, Client] = field(default_factory=dict)
    _last: dict[str, int] = field(default_factory=dict)  # model -> number of its last call

    @skips_incomplete
    def take(self, line: Line) -> None:
        """Take one line. One without its fields is ignored, as is a call that a restarted front repeats."""
        end, seconds, call = float(line["wall"]), float(line["seconds"]), int(line["call"])
        op, name = str(line["op"]), str(line["client"])
        if op != "sample":
            if call <= self._last.get(line["model"], -1):
                return
            self._last[line["model"]] = call
        client = self.of.setdefault(name, Client(end - seconds, end))
        client.first_wall, client.last_wall = min(client.first_wall, end - seconds), end
        for kind in ("sampling" if op == "sample" else "training", "any"):
            client.waits[kind].add(end - seconds, end)
        client.trainer_s += float(line.get("trainer_s", 0.0))
        if "error" in line:
            client.n_errors, client.error = client.n_errors + 1, str(line["error"])
        else:
            _count(client, op, line)


def _count(client: Client, op: str, line: Line) -> None:
    if op == "sample":
        client.n_sampled += int(line["n_tokens"])
    elif op == "optim_step":
        client.n_steps += 1
    elif op == "forward_backward":
        n_trained = int(line["n_tokens_trained"])
        client.n_passes += 1
        client.n_trained += n_trained
        if is_number(line.get("lag")):
            (n, total, largest), lag = client.lags, int(line["lag"])
            client.lags = [n + 1, total + lag, max(largest, lag)]
        if line.get("loss_fn") == SUPERVISED and n_trained:
            client.loss.add(client.n_passes, float(line["loss"]) / n_trained)
