"""The ledger, kept once more from the head's lines: where each prompt is, and what came of its samples (I3, I4, I10).

Open prompts are kept whole; of a closed one a single byte says how it ended.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from tools.audit.reading import File, Line

OPEN, TRAINING, TRAINED, REFUNDED = range(4)
WORDS = {OPEN: "open", TRAINING: "in training", TRAINED: "trained", REFUNDED: "refunded"}
FAR = 1 << 24  # a number beyond what a damaged journal may make us keep a byte for
MOST_AGAIN = 3
AGAIN = frozenset({"too_old", "lost_timeline"})  # refunds after which a row may be drawn again in the same pass


class Sample(NamedTuple):
    """One accepted verdict."""

    status: str
    reward: float
    n_tokens: int
    finish: str
    attempt: int
    holder: str


@dataclass(slots=True)
class Prompt:
    """An admitted prompt until it is handed to the learner or refunded."""

    uid: int
    born: int
    row: tuple[int, int]  # epoch, row
    n: int = 0  # samples of its group, by its first lease
    attempt: int | None = None  # None until it is leased
    holder: str = ""
    is_queued: bool = False  # its lease was lost
    is_ready: bool = False
    failed: str = ""  # status of a verdict without a value: it must be refunded next
    scored: dict[int, Sample] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        return sum(sample.n_tokens for sample in self.scored.values())


class Prompts:
    """Admit, lease, score, ready, take, refund. Each method gets the line and says what is wrong with it."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.open: dict[int, Prompt] = {}
        self.state = bytearray()  # by uid
        self.refunds: Counter[str] = Counter()
        self.n_ready = 0
        self.n_queued = 0
        self.n_reissued = 0
        self.n_leases = 0
        self.n_values = self.n_failed = 0  # verdicts accepted
        self._passes: dict[int, bytearray] = {}  # epoch -> by row: 2 k + 1 drawn for the k-th time again, 2 k may be

    # the ways in

    def admit(self, line: Line) -> None:
        uid = line["uid"]
        if uid != len(self.state):
            self.file.add("I3", f"uids count admissions 0, 1, 2, ...: {len(self.state)} is next, not {uid}", uid=uid)
            if not len(self.state) < uid < len(self.state) + FAR:
                return
            self.state.extend([REFUNDED] * (uid - len(self.state)))
        self.state.append(OPEN)
        self.open[uid] = Prompt(uid, line["born"], (line["epoch"], line["row"]))
        self._draw(line["epoch"], line["row"], uid)

    def lease(self, line: Line) -> Prompt | None:
        """First of its prompt, or the next attempt after the one before was lost."""
        uid, attempt = line["uid"], line["attempt"]
        self.n_leases += 1
        prompt = self.of(line, "I3", "only a live prompt is leased")
        if prompt is None:
            return None
        if prompt.attempt is None:
            prompt.n = line["n"]
        expected = 0 if prompt.attempt is None else prompt.attempt + 1
        if attempt != expected:
            self.file.add("I6", f"attempts count the leases of a prompt: {expected} is next, not {attempt}", uid=uid)
        if attempt and not prompt.is_queued:
            self.file.add("I3", f"only a lost lease is leased again: {prompt.holder or 'nobody'} holds it", uid=uid)
        if line["n"] != prompt.n - len(prompt.scored):
            missing = prompt.n - len(prompt.scored)
            self.file.add("I8", f"a lease is for all samples without a verdict: {missing}, not {line['n']}", uid=uid)
        if line["born"] != prompt.born:
            self.file.add("I7", f"born stays what it was at admission: {prompt.born}, not {line['born']}", uid=uid)
        self.n_queued -= prompt.is_queued
        prompt.is_queued = False
        prompt.attempt, prompt.holder = attempt, line["holder"]
        return prompt

    def lose(self, holder: str) -> None:
        """Who held these is gone: they wait for another lease."""
        for prompt in self.open.values():
            if prompt.holder == holder and not prompt.is_ready and not prompt.is_queued:
                prompt.is_queued = True
                prompt.holder = ""
                self.n_queued += 1

    # verdicts

    def score(self, line: Line) -> Sample | None:
        """One verdict that the head accepted: for the open attempt, once a sample (I4, I6)."""
        uid, sample, attempt, status = line["uid"], line["sample"], line["attempt"], line["status"]
        ids = {"uid": uid, "sample": sample, "attempt": attempt}
        prompt = self.of(line, "I6", "only an open prompt's results are accepted")
        if prompt is None:
            return None
        if prompt.attempt != attempt or prompt.is_queued:
            state = "queued" if prompt.is_queued else "leased"
            text = f"an older attempt's results are refused: attempt {attempt}, {state} is {prompt.attempt}"
            self.file.add("I6", text, **ids)
        if sample in prompt.scored:
            self.file.add("I4", "a sample is scored once: it was before", **ids)
        if not 0 <= sample < prompt.n:
            self.file.add("I8", f"a group has samples 0..{prompt.n - 1}: {sample}", **ids)
        new = Sample(status, line["reward"], line["n_tokens"], line["finish"], attempt, prompt.holder)
        prompt.scored[sample] = new
        if status == "value":
            self.n_values += 1
            if not abs(new.reward) < float("inf"):
                self.file.add("I10", f"a reward is a number when its status is value: {new.reward}", **ids)
        elif status in ("timeout", "error"):
            self.n_failed += 1
            prompt.failed = status
        else:
            self.file.add("I10", f"a verdict is value, timeout or error: {status!r}", **ids)
        return new

    def ready(self, line: Line) -> None:
        prompt = self.of(line, "I3", "only a live prompt gets ready")
        if prompt is None:
            return
        if len(prompt.scored) != prompt.n:
            text = f"a group is ready with its last verdict: {len(prompt.scored)} of {prompt.n}"
            self.file.add("I8", text, uid=prompt.uid)
        if prompt.failed:
            text = f"a {prompt.failed} is no number: its group is refunded, never ready"
            self.file.add("I10", text, uid=prompt.uid)
        self.n_ready += not prompt.is_ready
        prompt.is_ready = True

    # the ways out

    def take(self, line: Line) -> Prompt | None:
        """The prompt of the first trajectory line of its group: from ready to training."""
        uid = line["uid"]
        if 0 <= uid < len(self.state) and self.state[uid] in (TRAINING, TRAINED):
            text = f"no trajectory is trained twice: its prompt is {WORDS[self.state[uid]]}"
            self.file.add("I4", text, uid=uid, sample=line["sample"])
            return None
        prompt = self.of(line, "I3", "only a live prompt is trained")
        if prompt is None:
            return None
        if not prompt.is_ready:
            text = f"a batch holds whole groups: {len(prompt.scored)} of {prompt.n} samples have a verdict"
            self.file.add("I8", text, uid=uid)
        self.state[uid] = TRAINING
        self._leave(prompt)
        return prompt

    def trained(self, uid: int) -> None:
        self.state[uid] = TRAINED

    def refund(self, line: Line) -> Prompt | None:
        prompt = self.of(line, "I3", "only a live prompt is refunded")
        if prompt is None:
            return None
        reason = line["reason"]
        self.refunds[reason] += 1
        self.state[prompt.uid] = REFUNDED
        self._leave(prompt)
        if prompt.failed and reason != f"reward_{prompt.failed}":
            text = f"a {prompt.failed} refunds its group as reward_{prompt.failed}: {reason}"
            self.file.add("I10", text, uid=prompt.uid)
        if line["n_tokens_dropped"] != prompt.n_tokens:
            text = f"dropped tokens are those received: {prompt.n_tokens}, not {line['n_tokens_dropped']}"
            self.file.add("I12", text, uid=prompt.uid)
        if line.get("again", reason in AGAIN):
            self._release(*prompt.row)
        return prompt

    # passes through the data

    def _draw(self, epoch: int, row: int, uid: int) -> None:
        """In one pass each row is drawn once (I4)."""
        if not 0 <= row < FAR or not 0 <= epoch < FAR:
            self.file.add("I4", f"a row is an index of the data, in a pass: row {row} of pass {epoch}", uid=uid)
            return
        rows = self._passes.setdefault(epoch, bytearray())
        if row >= len(rows):
            rows.extend(bytes(row + 1 - len(rows)))
        if rows[row] % 2:
            self.file.add("I4", f"in each pass every row is drawn once: row {row} again in pass {epoch}", uid=uid)
        rows[row] += 1 + rows[row] % 2
        if rows[row] > 2 * MOST_AGAIN + 1:
            self.file.add("I4", f"a row is issued again at most {MOST_AGAIN} times: row {row} of pass {epoch}", uid=uid)

    def _release(self, epoch: int, row: int) -> None:
        """A row that became too old may be drawn again."""
        self.n_reissued += 1
        rows = self._passes.get(epoch, bytearray())
        if row < len(rows):
            rows[row] = min(rows[row] + rows[row] % 2, 250)

    def close(self, *, ended: bool) -> None:
        """Passes that a later one followed are whole; after an orderly end nothing is open."""
        n_rows = max(map(len, self._passes.values()), default=0)
        for epoch in sorted(self._passes)[:-1]:
            rows = self._passes[epoch]
            if (n := len(rows) - rows.count(0)) != n_rows:
                text = f"each pass draws every row before the next begins: {n} of {n_rows} in pass {epoch}"
                self.file.add("I4", text, epoch=epoch)
        if not ended:
            return
        for uid in list(self.open)[:100]:
            self.file.add("I3", "at the end every prompt is trained or refunded: this one is open", uid=uid)
        for uid, state in enumerate(self.state):
            if state == TRAINING:
                self.file.add("I3", "at the end every prompt is trained or refunded: no update took it in", uid=uid)

    # inside

    def of(self, line: Line, invariant: str, rule: str) -> Prompt | None:
        """The open prompt of a line, or a finding."""
        uid = line["uid"]
        prompt = self.open.get(uid)
        if prompt is None:
            known = WORDS[self.state[uid]] if 0 <= uid < len(self.state) else "never admitted"
            self.file.add(invariant, f"{rule}: prompt {uid} is {known}", uid=uid)
        return prompt

    def _leave(self, prompt: Prompt) -> None:
        self.n_ready -= prompt.is_ready
        self.n_queued -= prompt.is_queued
        del self.open[prompt.uid]
