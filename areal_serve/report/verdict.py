"""The verdict on a server (`areal-bus serve`): what its clients wait for, and whether their loss falls."""

from math import fsum

from areal_serve.report.clients import Client
from tools.report.facts.run_facts import RunFacts
from tools.report.verdict.health import remarks_on
from tools.report.verdict.learning import reward_change
from tools.report.verdict.remarks import Grade, Remark, Verdict, counted, percent, seconds

QUEUED = 0.5  # the trainer works on a client's calls for less than this share of the wait for them
WAITS = ("training", "sampling")


def judge_server(facts: RunFacts) -> Verdict:
    limit, health = what_limits(list(facts.clients.of.values())), remarks_on(facts, failed_calls(facts))
    return Verdict(limit, whether_they_learn(facts), health)


def failed_calls(facts: RunFacts) -> Remark | None:
    bad = {name: client for name, client in facts.clients.of.items() if client.n_errors}
    if not bad:
        return None
    name, client = next(iter(bad.items()))
    n, evidence = sum(one.n_errors for one in bad.values()), f"The last one of {name}: {client.error}"
    return Remark(Grade.NOTE, f"The server answered {counted(n, 'call')} of clients with an error.", evidence)


def what_limits(clients: list[Client]) -> Remark:
    """The largest part of the clients' time: waits for training or samples, or neither."""
    wall_s = fsum(client.wall_s for client in clients)
    if wall_s <= 0:
        return Remark(Grade.NOTE, "What limits the clients is not known: no call has ended.")
    shares = {kind: fsum(client.waits[kind].seconds for client in clients) / wall_s for kind in WAITS}
    own = fsum(client.own_s for client in clients) / wall_s
    parts = f"{percent(shares['training'])}, a sample for {percent(shares['sampling'])}, neither for {percent(own)}"
    evidence = f"Of {seconds(wall_s)} of {counted(len(clients), 'client')} training was in flight for {parts}."
    largest = max(WAITS, key=lambda kind: shares[kind])
    if own >= shares[largest]:
        advice = "Send the next calls before the results of the last ones; compute rewards while samples are decoded."
        return Remark(Grade.NOTE, "The clients' own code limits them.", evidence, (advice,))
    return _by_training(clients, evidence) if largest == "training" else _by_sampling(evidence)


def _by_training(clients: list[Client], evidence: str) -> Remark:
    worked_s = fsum(client.trainer_s for client in clients)
    busy = worked_s / fsum(client.waits["training"].seconds for client in clients)
    evidence += f" The trainer worked on these calls for {percent(busy)} of that wait."
    if busy < QUEUED:
        advice = ("Start a server for each client: models take turns in one trainer.",)
        return Remark(Grade.NOTE, "Calls of training wait for others.", evidence, advice)
    advice = ("Compute larger micro-batches (learner.max_tokens_per_mb), or use a faster device.",)
    return Remark(Grade.NOTE, "Training limits the clients.", evidence, advice)


def _by_sampling(evidence: str) -> Remark:
    advice = (
        "Start more samplers (-np), or let each decode more samples together (rollout.max_concurrent_rollouts).",
        "Ask for all samples of a step at once, and train while they are decoded.",
    )
    return Remark(Grade.NOTE, "Sampling limits the clients.", evidence, advice)


def whether_they_learn(facts: RunFacts) -> Remark:
    """By the loss of supervised passes: rewards stay in the client."""
    changes = {name: found for name, one in facts.clients.of.items() if (found := reward_change(one.loss)) is not None}
    if not changes:
        evidence = "The server sees no rewards; a loss is compared after 6 passes with cross_entropy."
        return Remark(Grade.NOTE, "Not known here: the client has its rewards.", evidence)
    went = [f"Loss per token of {name} went {one.figures}, first against last fifth." for name, one in changes.items()]
    evidence = " ".join(went)
    n_fell, n_rose = (sum(one.direction == way for one in changes.values()) for way in (-1, 1))
    if n_rose:
        advice = ("Lower the learning rate of the client whose loss rises.",)
        return Remark(Grade.BAD, f"The loss of {counted(n_rose, 'client')} rises.", evidence, advice)
    if n_fell == len(changes):
        return Remark(Grade.GOOD, f"The loss of {counted(n_fell, 'client')} falls.", evidence)
    return Remark(Grade.NOTE, "No clear sign of learning.", evidence)
