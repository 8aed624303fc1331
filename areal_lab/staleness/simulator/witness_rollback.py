"""Rolls the records of the witness back to the version of a new term, and checks what the `term` line keeps."""

from typing import TYPE_CHECKING, Any

from areal_lab.staleness.simulator.witness_records import Followed

if TYPE_CHECKING:
    from areal_lab.staleness.simulator.witness import Witness


def go_back(witness: "Witness", line: dict[str, Any]) -> None:
    """Roll the records back to the version of a new term.

    Prompts that were open then are live again, later prompts are removed, and training before that version stays.
    """
    version, next_uid = line["version"], line["next_uid"]
    kept = dict(zip(line["open"], line["kept"], strict=True))
    compared = set(line.get("compared", ()))
    witness.n_terms += 1
    if line["lives_on"]:
        _finish(witness, version, restored=line.get("restored", False))
    witness.begin_term(version, n_live=len(kept))
    _check_weights(witness, version)
    _check_change(witness, version)
    for uid in sorted((uid for uid in witness.prompts if uid >= next_uid), reverse=True):  # a row's later issues first
        _erase(witness, uid)
    n_known = len(witness.prompts)
    witness.check("I3", n_known == next_uid, "uids go back to {}, {} are known", next_uid, n_known)
    for uid, prompt in witness.prompts.items():
        if uid in kept:
            _reopen(witness, uid, prompt, kept[uid], version)
            _keep_comparison(witness, uid, prompt, is_kept=uid in compared)
        else:
            is_lost = prompt.batch is not None and prompt.batch >= version
            witness.check("I4", not is_lost, "batch {} is undone by a term at {}", prompt.batch, version, uid=uid)
            witness.check("I3", prompt.state != "live", "it vanished with its term", uid=uid)
    live = ((uid, prompt) for uid, prompt in witness.prompts.items() if prompt.state == "live")
    size_at = witness.scenario.samples_at
    complete = ((uid, prompt) for uid, prompt in live if len(prompt.accepted) == size_at(prompt.born, prompt.row[0]))
    compares = witness.scenario.compares
    witness.whole = {(prompt.born, uid) for uid, prompt in complete if prompt.is_compared or not compares}
    witness.is_same_head = True
    witness.saved = {saved: prompts for saved, prompts in witness.saved.items() if saved <= version}
    n_rows = len(witness.rows)
    witness.check("I4", line["position"] == n_rows, "row {} is next, {} rows are known", line["position"], n_rows)


def _finish(witness: "Witness", version: int, *, restored: bool) -> None:
    """A learner, or its copy, outlived a process: the batch counts as trained, although no head received the update."""
    begun = witness.learners.begun if witness.learners is not None else (0, "")
    trained = {uid for uid, _ in witness.samples_trained}
    for uid, prompt in witness.prompts.items():
        has_it = prompt.batch == version and uid in trained
        witness.check(
            "I4", restored or not has_it, "a learner that lives on at {} has trained it since", version, uid=uid
        )
    made = version in (witness.u, witness.u + 1) and (version == witness.u or version - 1 in witness.update_of)
    witness.check("I6", made, "a learner lives on at {}, {} updates are known", version, witness.u)
    if made and version > witness.u:
        witness.make(*begun)


def _check_weights(witness: "Witness", version: int) -> None:
    """The learners begin with the weights that the surviving history made."""
    begun = witness.learners.begun if witness.learners is not None else None
    survives = begun == (version, witness.weights.get(version))
    witness.check("I6", survives, "a term at {} begins with {}, version {} was made otherwise", version, begun, version)


def _check_change(witness: "Witness", version: int) -> None:
    """Learners of a new split begin at the version of those before them, unless the checkpoint was damaged since."""
    due, witness.handed_over = witness.handed_over, None
    if due is not None and all(fault.kind != "tear" for fault in witness.scenario.faults):
        witness.check("I4", version == due, "the split changed at version {}, its learners begin at {}", due, version)


def _erase(witness: "Witness", uid: int) -> None:
    prompt = witness.prompts.pop(uid)
    witness.learned.pop(uid, None)
    witness.n_undone += prompt.state == "trained"
    if prompt.issue:
        witness.rows[prompt.row] = "again"
    else:
        witness.rows.pop(prompt.row, None)
    _forget_training(witness, uid)


def _reopen(witness: "Witness", uid: int, prompt: Followed, kept: list[int], version: int) -> None:
    trained = prompt.batch is not None and prompt.batch < version
    witness.check(
        "I4", not trained, "batch {} has trained it, a term at {} opens it again", prompt.batch, version, uid=uid
    )
    witness.n_undone += prompt.state == "trained"
    _remember(witness, uid, prompt, version)
    known = all(prompt.accepted.get(sample, -1) >= 0 for sample in kept)
    witness.check("I3", known, "samples {} are kept, {} had counted", kept, sorted(prompt.accepted), uid=uid)
    failed = witness.without(prompt).intersection(kept)
    n_samples = witness.scenario.samples_at(prompt.born, prompt.row[0])
    may_stay = not failed or (witness.scenario.partial_groups and n_samples - len(failed) >= 2)
    witness.check("I10", may_stay, "samples {} are kept, whose verdicts are no numbers", sorted(failed), uid=uid)
    for sample in kept:
        lost = witness.lost_weights(("", uid, prompt.accepted.get(sample, -1), sample))
        witness.check("I5", not lost, "sample {} is kept, tokens of it were made by {}", sample, lost, uid=uid)
    prompt.state, prompt.batch, prompt.n_accounted, prompt.failed = "live", None, 0, ""
    witness.learned.pop(uid, None)
    prompt.accepted = {sample: prompt.accepted[sample] for sample in kept if sample in prompt.accepted}
    prompt.tokens = {sample: witness.n_tokens(uid, sample, attempt) for sample, attempt in prompt.accepted.items()}
    witness.rows[prompt.row] = "open"
    _forget_training(witness, uid)


def _keep_comparison(witness: "Witness", uid: int, prompt: Followed, *, is_kept: bool) -> None:
    """The verdict of its group is kept only with just the samples that it compared."""
    known = not is_kept or frozenset(prompt.accepted.items()) in prompt.compared
    witness.check("I4", known, "the verdict of its group is kept, and compared other samples", uid=uid)
    prompt.is_compared = is_kept


def _remember(witness: "Witness", uid: int, prompt: Followed, version: int) -> None:
    """Restore the accepted samples that the head checkpoint holds.

    If the same head still holds the prompt, newer samples win over those of the checkpoint; otherwise the checkpoint
    wins.
    """
    saved = witness.saved.get(version, {}).get(uid, {})
    has_both = witness.is_same_head and prompt.state in ("live", "training")
    prompt.accepted = {**saved, **prompt.accepted} if has_both else {**prompt.accepted, **saved}


def _forget_training(witness: "Witness", uid: int) -> None:
    witness.samples_trained = {sample for sample in witness.samples_trained if sample[0] != uid}
