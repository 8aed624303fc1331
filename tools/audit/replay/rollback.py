"""Applies a `term` line to the prompts: erases those admitted after its version, reopens those that were open then.

A prompt that was closed between update V and batch V may be open or closed; the line states which (I3, I4).
"""

from collections.abc import Mapping

from tools.audit.replay.ledger import OPEN, REFUNDED, TRAINED, TRAINING, WORDS, AcceptedSample, AuditedPrompt, Prompts
from tools.audit.replay.terms import TermStart

Lost = tuple[AuditedPrompt, Mapping[int, AcceptedSample]]  # a prompt, and its verdicts that are lost


class Rollback:
    """Call `run` once. `is_same_head`: the head survived, and with it the leases of which nothing was lost."""

    def __init__(self, prompts: Prompts, beginning: TermStart, *, is_same_head: bool) -> None:
        self.prompts, self.beginning, self.is_same_head = prompts, beginning, is_same_head
        self.file = prompts.file
        self.keeps_refunds = beginning.restored and is_same_head
        self.moment = 2 * beginning.version  # of the clock, between update V and batch V
        self.first = self.moment - beginning.lives_on  # between batch V - 1 and update V
        self.n_erased = 0
        self.lost: list[Lost] = []
        self.found: list[Lost] = []  # verdicts that an earlier term lost and this term's head checkpoint contains

    def run(self) -> None:
        since = self._left_since()
        self._erase()
        self._miss()
        self._reopen(since)
        prompts = self.prompts
        prompts.sort()
        prompts.passes.go_on_at(self.beginning.position)

    def _left_since(self) -> set[int]:
        """Prompts closed after the rollback point, surely or perhaps: none of them was open then."""
        moments, uids = self.prompts.left
        since, stay = set(), []
        while moments and moments[-1] >= self.first:
            left, uid = moments.pop(), uids.pop()
            if uid >= self.beginning.next_uid:
                continue
            if left < self.moment and self.prompts.state[uid] in (TRAINING, TRAINED):  # by batch V - 1
                stay.append((left, uid))
                continue
            if self.keeps_refunds and self.prompts.state[uid] == REFUNDED:
                stay.append((min(left, self.moment), uid))
                continue
            since.add(uid)
            if uid not in self.beginning.open:
                stay.append((min(left, self.moment), uid))
                self._must_be_open(uid, left)
        for left, uid in reversed(stay):
            moments.append(left)
            uids.append(uid)
        return since

    def _must_be_open(self, uid: int, left: int) -> None:
        version = self.beginning.version
        if left <= self.moment:
            return  # refunded between update V and batch V: the head checkpoint was taken later
        if self.prompts.state[uid] in (TRAINING, TRAINED):
            text = f"what a batch >= {version} trained is undone and open again: batch {left // 2} had this prompt"
            self.file.add("I4", text, uid=uid)
        else:
            self.file.add("I3", f"what was refunded after batch {version} was taken is open again", uid=uid)

    def _erase(self) -> None:
        """Erase prompts that were admitted later: their uids and rows are free again."""
        prompts, first = self.prompts, self.beginning.next_uid
        for uid in range(len(prompts.state) - 1, first - 1, -1):
            prompt = prompts.open.pop(uid, None) or prompts.closed.pop(uid, None)
            if prompt is None:
                continue  # its line is damaged or lost
            if prompts.state[uid] in (TRAINING, TRAINED) and (prompt.left or 0) < self.moment:
                rule = f"what a batch < {self.beginning.version} trained stays trained"
                text = f"{rule}: batch {(prompt.left or 0) // 2} had this prompt, whose row is free again"
                self.file.add("I4", text, uid=uid)
            prompts.passes.put_back(prompt.row, n_before=prompt.n_before, is_drawn=False)
            self.n_erased += 1
            self.lost.append((prompt, prompt.scored))
        del prompts.state[first:]

    def _miss(self) -> None:
        """No live prompt vanishes."""
        prompts = self.prompts
        for uid in [uid for uid in prompts.open if uid not in self.beginning.open]:
            self.file.add("I3", "a live prompt is open in the next term, or was admitted too late for it", uid=uid)
            prompt = prompts.open.pop(uid)
            prompts.state[uid] = REFUNDED
            prompts.refunds["lost_timeline"] += 1
            self.lost.append((prompt, prompt.scored))

    def _reopen(self, since: set[int]) -> None:
        prompts = self.prompts
        was_live, prompts.open = prompts.open, {}
        for uid, kept in sorted(self.beginning.open.items()):
            prompt = was_live.get(uid)
            is_live = prompt is not None
            if prompt is None and uid < len(prompts.state):
                prompt = prompts.closed.pop(uid, None)
            if prompt is None:
                self.file.add("I3", "only what was admitted can be open in the next term", uid=uid)
                continue
            if not is_live and uid not in since:
                self._must_be_closed(uid)
            self._revive(prompt, kept, is_live=is_live)
            prompts.open[uid] = prompt
            prompts.state[uid] = OPEN

    def _must_be_closed(self, uid: int) -> None:
        word, version = WORDS[self.prompts.state[uid]], self.beginning.version
        if word == "refunded":
            self.file.add("I3", f"what was refunded before update {version} stays so: it is open again", uid=uid)
        else:
            self.file.add("I4", f"what a batch < {version} trained stays trained: it is open again", uid=uid)

    def _revive(self, prompt: AuditedPrompt, kept: frozenset[int], *, is_live: bool) -> None:
        """Reopen a prompt. It keeps its lease if its head and all of its verdicts survived."""
        self._check(prompt, kept)
        gone = {number: sample for number, sample in prompt.scored.items() if number not in kept}
        if gone:
            self.lost.append((prompt, gone))
            prompt.earlier.extend(gone.items())
        prompt.scored = {number: sample for number, sample in prompt.scored.items() if number in kept}
        stays = is_live and self.is_same_head and not (gone or prompt.is_ready or prompt.is_queued)
        is_complete = 0 < prompt.n == len(prompt.scored)
        self._compare(prompt)
        prompt.is_ready = is_complete and (prompt.group is not None or not self.prompts.clock.setup.compares)
        prompt.is_queued = not stays and not is_complete
        prompt.may_return = stays
        if prompt.is_queued:
            prompt.holder = ""
        prompt.failed, prompt.left = "", None
        prompt.sampled.clear()
        self.prompts.passes.put_back(prompt.row, n_before=prompt.n_before, is_drawn=True)

    def _compare(self, prompt: AuditedPrompt) -> None:
        """A group keeps its verdict as the line says, and only with just the samples that were compared."""
        is_kept = prompt.uid in self.beginning.compared
        prompt.group = prompt.groups.get(prompt.attempts) if is_kept else None
        if is_kept and prompt.group is None:
            text = "the verdict of a group is kept with the samples that it compared: others are kept"
            self.file.add("I4", text, uid=prompt.uid)

    def _find_again(
        self, prompt: AuditedPrompt, number: int, *, instead_of: AcceptedSample | None
    ) -> AcceptedSample | None:
        """The last verdict that a term lost and that this term's head checkpoint may contain."""
        version = self.beginning.version
        lost = (sample for other, sample in reversed(prompt.earlier) if other == number and sample.newest <= version)
        again = next(lost, None)
        if again is None:
            return instead_of
        if instead_of is not None:
            self.lost.append((prompt, {number: instead_of}))
        self.found.append((prompt, {number: again}))
        prompt.scored[number] = again
        return again

    def _check(self, prompt: AuditedPrompt, kept: frozenset[int]) -> None:
        """Kept verdicts were received, have a value, and their tokens have versions that still count."""
        version, prompts = self.beginning.version, self.prompts
        for number in sorted(kept):
            ids = {"uid": prompt.uid, "sample": number}
            sample = prompt.scored.get(number)
            if sample is None or sample.newest > version:
                sample = self._find_again(prompt, number, instead_of=sample)
            if sample is None:
                self.file.add("I12", "a verdict that is kept was received: this one was not", **ids)
                continue
            if sample.newest > version:
                text = f"a verdict is kept whose tokens are of versions <= {version}: this one has {sample.newest}"
                self.file.add("I6", text, **ids)
            if not (prompts.has_reward(sample) or prompts.clock.setup.partial_groups):
                self.file.add("I10", f"a verdict is kept that is a number: this one is {sample.status}", **ids)
