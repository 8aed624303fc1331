"""The page of a server (`areal-bus serve`): one row a client."""

from areal_bus.process.commands import as_here
from areal_serve.report.clients import Client
from tools.report.facts.run_facts import RunFacts
from tools.report.page.charts import PlotLine, line_chart, number
from tools.report.page.parts import Card, Page, PageTable, Section, of_place
from tools.report.page.run_page import incidents_section, settings_section, subtitle
from tools.report.verdict.remarks import Verdict, percent, seconds

COLUMNS = ("client", "steps", "passes", "tokens trained", "tokens sampled", "lag, mean", "lag, largest", "time",
           "in training", "in sampling", "neither", "trainer", "errors")  # fmt: skip


def server_page(facts: RunFacts, verdict: Verdict) -> Page:
    """The page, in the order in which a reader asks."""
    answers = [("What limits the clients?", verdict.limit), ("Do they learn?", verdict.learning)]
    answers += [("Is it healthy?", verdict.health_summary)]
    health = Section("health", "Health", remarks=verdict.health)
    sections = [health, clients_section(facts), incidents_section(facts), settings_section(facts.config)]
    title = f"Report of the server {facts.name}"
    return Page(title, subtitle(facts), answers, list(map(as_here, verdict.advice)), figures(facts), sections)


def figures(facts: RunFacts) -> list[tuple[str, str]]:
    clients = facts.clients.of.values()
    known = [client.lags[2] for client in clients if client.lags[0]]
    return [
        ("clients", str(len(clients))),
        ("duration", seconds(facts.wall_s)),
        ("optimizer steps", str(sum(client.n_steps for client in clients))),
        ("tokens trained", number(sum(client.n_trained for client in clients))),
        ("tokens sampled", number(sum(client.n_sampled for client in clients))),
        ("largest lag trained", f"{max(known)}" if known else "not known"),
        ("restarts of the front", str(facts.incidents.n_of["restart"])),
    ]


def clients_section(facts: RunFacts) -> Section:
    intro = (
        "A client is a session. Time: from its first call to its last result; the shares are of this time with a call "
        "of training, a sample, or neither in flight. Trainer: it worked on calls of this client. Lag: optimizer steps "
        "since the oldest known sample of a pass."
    )
    section = Section("clients", "Clients", intro)
    rows = [row(name, client) for name, client in facts.clients.of.items()]
    section.tables.append(PageTable(COLUMNS, rows, right=frozenset(range(1, len(COLUMNS)))))
    learning = {name: client.loss for name, client in facts.clients.of.items() if len(client.loss) > 1}
    if learning:
        lines = [PlotLine(name, of_place(i), loss.bins()) for i, (name, loss) in enumerate(learning.items())]
        chart = line_chart(lines, "Loss per trained token", x_label="pass")
        legend = [(line.name, line.colour) for line in lines]
        section.cards.append(Card("Loss per trained token (cross_entropy)", chart, "", legend))
    return section


def row(name: str, client: Client) -> list[str]:
    n, total, largest = client.lags
    shares = [one / client.wall_s if client.wall_s else 0.0 for one in (
        client.waits["training"].seconds, client.waits["sampling"].seconds, client.own_s)]  # fmt: skip
    counts = [str(client.n_steps), str(client.n_passes), number(client.n_trained), number(client.n_sampled)]
    lags = [number(total / n), str(largest)] if n else ["not known"] * 2
    times = [seconds(client.wall_s), *map(percent, shares), seconds(client.trainer_s)]
    return [name, *counts, *lags, *times, str(client.n_errors)]
