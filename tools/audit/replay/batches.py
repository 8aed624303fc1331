"""Batches and their updates: groups are complete, or short as declared (I8), and token counts add up (I12)."""

from collections import deque
from dataclasses import dataclass, field

from tools.audit import figures
from tools.audit.journal_reader import JournalFile, Line
from tools.audit.replay.ledger import AuditedPrompt, Prompts
from tools.audit.replay.terms import TermLog
from tools.audit.run_settings import RunSettings


@dataclass(slots=True)
class BatchRecord:
    """One batch: from its line, through its trajectories, to its update."""

    step: int
    where: str
    n_groups: int
    n_trajectories: int
    is_undone: bool  # a later term begins before it
    groups: dict[int, AuditedPrompt] = field(default_factory=dict)
    samples: dict[int, set[int]] = field(default_factory=dict)
    missing: set[tuple[int, int]] = field(default_factory=set)  # (uid, sample) left out of its groups, by its line
    n_dropped: int = 0  # tokens of these
    n_seen: int = 0
    n_tokens: int = 0
    n_masked: int = 0
    trained: list[figures.TrainedSample] = field(default_factory=list)


class BatchChecks:
    """`take` and `trajectory` for the head's lines of a batch, `update` for the figures of its step."""

    def __init__(self, setup: RunSettings, file: JournalFile, prompts: Prompts, terms: TermLog) -> None:
        self.setup, self.file, self.prompts, self.terms = setup, file, prompts, terms
        self.n = 0  # in all terms
        self.current: BatchRecord | None = None  # whose trajectory lines are being read
        self.n_tokens = self.n_masked = self.n_trained = self.n_skipped = 0  # by the figures of the updates that last
        self.n_without_figures = 0
        self._training: deque[BatchRecord] = deque()
        self._short: int | None = None  # step of a short batch
        self.is_torn = False  # lines of the last batch are missing

    def take(self, line: Line) -> None:
        self.finish()
        self.n += 1
        step = line["step"]
        self.prompts.n_refilled = 0
        is_undone = self.terms.undo_step(step)
        self.current = BatchRecord(step, self.file.where(), line["n_groups"], line["n_trajectories"], is_undone)
        numbers = line.get("missing", [])
        self.current.missing = set(zip(numbers[::2], numbers[1::2], strict=False))
        self.current.n_dropped = line.get("n_tokens_dropped", 0)
        size = self.setup.batch_size
        if self._short is not None:
            self.file.add("I8", "a short batch is the last: another follows", step=step)
        if size is not None and (line["n_groups"] < size) != line["short"]:
            text = f"a batch is short exactly when it has fewer than B = {size} groups: {line['n_groups']}"
            self.file.add("I8", text, step=step)
        self._short = step if line["short"] else None

    def admitted(self, uid: int) -> None:
        """After a short batch, at the end of the data, nothing is admitted."""
        if self._short is not None:
            self.file.add("I8", "a short batch is taken at the end of the data: a prompt is admitted after it", uid=uid)
            self._short = None

    def trajectory(self, line: Line) -> AuditedPrompt | None:
        """Its prompt; None if it belongs to none."""
        batch, uid, sample = self.current, line["uid"], line["sample"]
        if batch is None or line["step"] != batch.step:
            self.file.add("I8", "a trajectory belongs to the batch just named", uid=uid, sample=sample)
            return None
        batch.n_seen += 1
        batch.n_tokens += line["n_tokens"]
        batch.n_masked += line["n_masked"]
        batch.trained.append(figures.read(line))
        if line["clock"] != batch.step:
            text = f"a trajectory has the clock of its batch: {batch.step}, not {line['clock']}"
            self.file.add("I6", text, uid=uid, sample=sample)
        prompt = batch.groups.get(uid)
        if prompt is None:
            prompt = self.prompts.take(line)
            if prompt is None:
                return None
            batch.groups[uid] = prompt
            batch.samples[uid] = set()
        if sample in batch.samples[uid]:
            self.file.add("I4", "no trajectory is trained twice: it is in this batch before", uid=uid, sample=sample)
        batch.samples[uid].add(sample)
        return prompt

    @property
    def n_groups_seen(self) -> int:
        """Groups of the batch whose lines are being read."""
        return len(self.current.groups) if self.current is not None else 0

    def finish(self, *, torn: bool = False) -> None:
        """End of a batch's lines: its groups are complete. A killed head may leave the last batch incomplete."""
        batch, self.current = self.current, None
        if batch is None:
            return
        self._training.append(batch)
        if torn and batch.n_seen < batch.n_trajectories:
            self.is_torn = True
            return
        if batch.n_seen != batch.n_trajectories or len(batch.groups) != batch.n_groups:
            has = f"{len(batch.groups)} of {batch.n_groups}, {batch.n_seen} of {batch.n_trajectories} trajectories"
            text = f"a batch has the groups that its line says: {has}"
            self.file.findings.add("I8", batch.where, text, step=batch.step)
        for uid, samples in batch.samples.items():
            n, without = batch.groups[uid].n, self.prompts.left_out(batch.groups[uid])
            are_members = all(0 <= sample < n and sample not in without for sample in samples)
            if not are_members or len(samples) != n - len(without):  # n may be any number in a damaged journal
                rule = f"all but {sorted(without)}, which failed" if without else "all of them"
                text = f"a batch holds whole groups: samples {sorted(samples)} of {n}, {rule}, must be there"
                self.file.findings.add("I8", batch.where, text, step=batch.step, uid=uid)
        self._check_left_out(batch)

    def _check_left_out(self, batch: BatchRecord) -> None:
        """A group may be short by policy only; its missing samples are named and their tokens counted (I8, I12)."""
        each = ((uid, self.prompts.left_out(prompt)) for uid, prompt in batch.groups.items())
        left_out = {(uid, number): sample for uid, samples in each for number, sample in samples.items()}
        if batch.missing != left_out.keys():
            rule = "a batch names the samples that its groups go without"
            text = f"{rule}: {sorted(left_out)}, not {sorted(batch.missing)}"
            self.file.findings.add("I8", batch.where, text, step=batch.step)
        if left_out and not self.setup.partial_groups:
            text = "without reward.partial_groups every group of a batch is whole: a group without all its rewards is"
            self.file.findings.add("I8", batch.where, f"{text} trained, without {sorted(left_out)}", step=batch.step)
        n_tokens = sum(sample.n_tokens for sample in left_out.values())
        if batch.n_dropped != n_tokens:
            text = f"dropped tokens of a batch are those of the samples left out: {n_tokens}, not {batch.n_dropped}"
            self.file.findings.add("I12", batch.where, text, step=batch.step)

    def go_back(self, version: int) -> None:
        """A term begins: nothing is in training any more, and the batches from `version` on count as never taken."""
        self.finish()
        self._training.clear()
        self.is_torn = False
        if self._short is not None and self._short >= version:
            self._short = None

    def outlive(self, figures: Line | None) -> None:
        """A surviving learner has trained its batch; `figures` come from its own journal, if there is one."""
        self.finish()
        if self.is_torn:
            step = self._training[-1].step
            self.file.add("I12", "a batch has all its lines before a learner has it: this one is trained", step=step)
        self.update({} if figures is None else figures)

    def update(self, line: Line) -> None:
        """Mark the batch's prompts trained; its tokens must be those the learner reports (I12)."""
        self.finish()
        if not self._training:
            return  # the clock has reported it
        batch = self._training.popleft()
        for uid in batch.groups:
            self.prompts.trained(uid)
        eta = self.setup.eta
        oldest = line.get("lag_max")
        if eta is not None and self.setup.policy != "paper" and oldest is not None and oldest > eta:
            text = f"no trained token is over eta = {eta} behind: lag_max {oldest:g} by the learner's figures"
            self.file.add("I2", text, step=batch.step)
        if oldest is None and line.get("n_tokens_trained", 0) > 0:
            self.file.add("I2", "an update tells the largest lag that it trained: lag_max is missing", step=batch.step)
        self._balance(line, batch)
        for text in figures.broken(line, batch.trained, self._judged(batch), self.setup):
            self.file.add("I12", text, step=batch.step)

    def _judged(self, batch: BatchRecord) -> list[tuple[bool, str]]:
        """Which answers of the batch were right, among those that the task judged, and how they ended."""
        ours = [one for one in batch.trained if one.uid in batch.groups]
        found = [(batch.groups[one.uid].scored.get(one.sample), one.finish) for one in ours]
        return [(one.correct, finish) for one, finish in found if one is not None and one.correct is not None]

    def _balance(self, line: Line, batch: BatchRecord) -> None:
        names = ("n_tokens", "n_tokens_trained", "n_tokens_masked", "n_tokens_skipped")
        if any(name not in line for name in names):
            self.n_without_figures += not batch.is_undone
            return
        n, trained, masked, skipped = (line[name] for name in names)
        if not batch.is_undone:
            self.n_tokens += int(n)
            self.n_trained += int(trained)
            self.n_masked += int(masked)
            self.n_skipped += int(skipped)
        if not n == batch.n_tokens == trained + masked + skipped:
            told = f"the batch has {batch.n_tokens}, the update {n:g} = {trained:g} + {masked:g} + {skipped:g}"
            self.file.add("I12", f"tokens = trained + masked + skipped: {told}", step=batch.step)
        if masked != batch.n_masked:
            text = f"masked tokens are those of the batch's lines: {batch.n_masked}, not {masked:g}"
            self.file.add("I12", text, step=batch.step)
