"""The page of one run."""

import re
import time
from collections.abc import Sequence

from areal_bus.process.commands import as_here
from tools.alarms.alarm_reader import Finding
from tools.breakdown import flops
from tools.report.facts.curves import MAX_BINS
from tools.report.facts.notable_samples import Notable
from tools.report.facts.run_facts import RunFacts
from tools.report.facts.settings_rows import setting_rows
from tools.report.page.charts import Layer, histogram, number, stacked_chart
from tools.report.page.curve_cards import curve_cards, first_cards
from tools.report.page.episodes_page import MAX_TEXT, card, link_of, pages_of, shortened
from tools.report.page.parts import Card, Page, PageTable, SampleCard, Section, Text, of_place
from tools.report.page.time_cards import edges_of, generator_section, push_section, time_section, utilisation_table
from tools.report.page.token_section import REFUNDS, token_section
from tools.report.verdict.learning import parts
from tools.report.verdict.remarks import Verdict, seconds
from tools.run import Line


def run_page(facts: RunFacts, verdict: Verdict) -> Page:
    """The page, in the order in which a reader asks."""
    answers = [
        ("What limits the run?", verdict.limit),
        ("Does it learn?", verdict.learning),
        ("Is it healthy?", verdict.health_summary),
    ]
    timing = time_section(facts)
    if (utilisation := utilisation_table(facts)) is not None:
        timing.tables.append(utilisation)
    sections = [
        Section("health", "Health", remarks=verdict.health),
        alarms_section(facts),
        curves_section(facts),
        timing,
        push_section(facts),
        generator_section(facts),
        token_section(facts),
        ages_section(facts),
        refunds_section(facts),
        incidents_section(facts),
        samples_section(facts),
        settings_section(facts.config),
    ]
    if (recorded := profiles_section(facts)) is not None:
        sections.insert(-1, recorded)
    first = first_cards(facts.curves)
    title = f"Report of {facts.name}"
    advice, pages = list(map(as_here, verdict.advice)), pages_of(facts.name, listed_samples(facts))
    return Page(title, subtitle(facts), answers, advice, figures(facts), sections, first, pages=pages)


def subtitle(facts: RunFacts) -> str:
    """Folder, times and state."""
    began, ended = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) for at in (facts.first_wall, facts.last_wall)
    )
    going = facts.status is not None and facts.status.state in ("alive", "stalled")
    state = "It is still running: start the command again for a newer page." if going else ""
    return f"{facts.where.folder}. Journal from {began} to {ended}, {seconds(facts.wall_s)}. {state}".rstrip()


def figures(facts: RunFacts) -> list[tuple[str, str]]:
    found = [("updates", str(facts.n_versions)), ("duration", seconds(facts.wall_s))]
    reward = facts.curve("rollout/reward").values
    if reward:
        late = parts(reward)[1]
        found.append(("reward, last fifth", number(sum(late) / len(late))))
    if name := next((name for name in ("eval/avg_at_k", "eval/accuracy") if len(facts.curve(name))), ""):
        what = name.removeprefix("eval/").replace("_at_k", "@k")
        found.append((f"held-out {what}", number(facts.curve(name).values[-1])))
    if facts.n_tokens:
        found.append(("tokens trained", number(facts.n_tokens)))
    speed = facts.curve("perf/tokens_per_s").values
    if speed:
        found.append(("tokens/s, mean", number(sum(speed) / len(speed))))
    lag = facts.curve("staleness/lag_max").values
    if lag:
        found.append(("largest lag trained", f"{max(lag):.0f} (eta {facts.setting('rollout.max_head_offpolicyness')})"))
    found.append(("restarts", str(facts.incidents.n_of["restart"])))
    model = flops.model_line(facts.where)
    if model is not None:
        n = number(float(model["n_params"]))
        found.append(("model", f"{n} parameters, {model.get('dtype')}, {model.get('device')}"))
    return found


def curves_section(facts: RunFacts) -> Section:
    bins = f"Beyond {MAX_BINS} updates a point is the mean of several; a band shows their range."
    intro = f"By version; reward and held-out score are above. {bins}"
    section = Section("curves", "Curves", intro, curve_cards(facts.curves))
    if not section.cards:
        section.intro, section.note = "", "No update and no evaluation yet."
    return section


def ages_section(facts: RunFacts) -> Section:
    section = Section("ages", "Ages of the trained data", "How many versions older than the batch's clock.")
    trained, masked = facts.ages.tokens()
    trajectories = facts.ages.trajectories()
    if trained or masked:
        names = [("trained", of_place(0)), ("masked", of_place(1))]
        counts = {age: (float(trained[age]), float(masked[age])) for age in (trained + masked)}
        chart = histogram(counts, names, "Tokens by age", "versions behind")
        section.cards.append(Card("Tokens", chart, number(sum(trained.values())), names if masked else ()))
    if trajectories:
        chart = histogram({age: (float(n),) for age, n in trajectories.items()}, [("trajectories", of_place(0))],
                          "Trajectories by the age of their oldest token", "versions behind")  # fmt: skip
        section.cards.append(Card("Trajectories, by their oldest token", chart, number(sum(trajectories.values()))))
    if not section.cards:
        section.note = "No trajectory was trained."
    return section


def refunds_section(facts: RunFacts) -> Section:
    """Prompts that left without being trained."""
    section = Section("refunds", "Refunds by reason", "Prompts that were admitted and not trained.")
    found = facts.incidents
    if not found.refunds:
        section.note = f"None of {found.n_admitted} admitted prompts."
        return section
    reasons = [reason for reason, _ in found.refunds.most_common()]
    edges = edges_of(found.by_step)
    first = int(edges[0] // found.by_step.width)
    layers = [
        Layer(reason, of_place(i), [found.by_step.sums[reason].get(first + k, 0.0) for k in range(len(edges) - 1)])
        for i, reason in enumerate(reasons)
    ]
    chart = stacked_chart(edges, layers, "Refunds by version", unit="", of_all=False)
    legend = [(layer.name, layer.colour) for layer in layers]
    section.cards.append(Card("Refunded prompts", chart, str(sum(found.refunds.values())), legend))
    rows = [
        [reason, str(found.refunds[reason]), f"{found.refunds[reason] / max(found.n_admitted, 1):.1%}",
         REFUNDS.get(reason, "")] for reason in reasons
    ]  # fmt: skip
    columns = ["reason", "prompts", "of the admitted", "meaning"]
    section.tables.append(PageTable(columns, rows, right=frozenset({1, 2})))
    return section


def incidents_section(facts: RunFacts) -> Section:
    section = Section("incidents", "Restarts and other incidents")
    found = facts.incidents
    rows = [[f"+{seconds(one.wall - facts.first_wall)}", one.kind, one.who, one.text[:MAX_TEXT]] for one in found.kept]
    if rows:
        section.tables.append(PageTable(["time", "what", "who", "details"], rows))
    n_more = found.n_of.total() - len(found.kept)
    notes = [f"{n_more} more are not listed." if n_more else "" if rows else "None."]
    notes += [f"The head refused {found.n_refused} late or impossible messages."] if found.n_refused else []
    section.note = " ".join(filter(None, notes))
    return section


def samples_section(facts: RunFacts) -> Section:
    section = Section("samples", "Samples to read")
    each = (
        ("Slowest", "sampled in {:.3g} s", facts.notable.slowest()),
        ("Surprisingly good: best against their group", "{:.3g} above the others' mean", facts.notable.better()),
        ("Surprisingly bad: worst against their group", "{:.3g} below the others' mean", facts.notable.worse()),
    )  # fmt: skip
    for title, form, found in each:
        cards = [sample_card(facts, one, form) for one in found]
        section.samples += [(title, cards)] if cards else []
    section.samples += [second_opinion(facts)] if facts.notable.n_checked or facts.notable.n_unchecked else []
    if not facts.texts:
        section.note = "The texts were not kept: set journal.samples = true."
    return section


def second_opinion(facts: RunFacts) -> tuple[str, list[SampleCard]]:
    """Samples on which the grader of reward.check disagrees, the last ones first."""
    found = facts.notable
    grader = facts.setting("reward.check.function")
    title = f"Second opinion ({grader}): {found.n_disagreements} of {found.n_checked} differ"
    title += f"; it failed on {found.n_unchecked} more" if found.n_unchecked else ""
    return title, [disagreement(line) for line in reversed(found.disagreements)]


def disagreement(line: Line) -> SampleCard:
    grades = [f"{word} {number(float(line[key]))}" for word, key in (("reward", "reward"), ("check", "check_reward"))]
    judged = [f"{'right' if line[key] else 'wrong'}" for key in ("correct", "check_correct") if line[key] is not None]
    texts = [Text(name, shortened(str(line[name]))) for name in ("prompt", "completion", "row")]
    told = f"{', '.join(grades)}" + (f" ({' and '.join(judged)})" if len(judged) > 1 else "")
    return SampleCard(f"uid {line['uid']} sample {line['sample']}", told, texts=texts)


def sample_card(facts: RunFacts, one: Notable, form: str) -> SampleCard:
    """One sample; without texts where the run keeps none."""
    uid, number_of, attempt = one.key
    sample, measure = facts.texts.get(one.key), form.format(one.measure)
    if sample is None:
        return SampleCard(f"uid {uid} sample {number_of}", f"{measure}; attempt {attempt}; text not kept")
    return card(sample, facts=[measure], link=link_of(sample))


def settings_section(config: Line) -> Section:
    """What differs from the defaults, then everything."""
    section = Section("settings", "Settings")
    rows = setting_rows(config)
    if not rows:
        section.note = "The run has no config.json."
        return section
    changed = [[row.key, row.value, row.default, row.meaning] for row in rows if row.is_changed]
    columns = ["key", "value", "default", "meaning"]
    section.tables.append(PageTable(columns, changed, f"{len(changed)} of {len(rows)} keys differ from their defaults"))
    everything: Sequence[Sequence[str]] = [[row.key, row.value, row.default] for row in rows]
    section.tables.append(PageTable(columns[:3], everything, f"All {len(rows)} keys", is_folded=True))
    return section


SAMPLES = 3  # of each alarm
PROFILE = re.compile(r"profiles/[A-Za-z0-9._-]+\.json\.gz")


def alarms_section(facts: RunFacts) -> Section:
    """Each alarm with its rule, what was seen, what to try, and samples to read."""
    section = Section("alarms", "Alarms")
    found = facts.alarms.findings() if facts.alarms is not None else []
    rows = [[one.name, str(one.since), _until(one), one.seen, one.rule, as_here(one.advice)] for one in found]
    if rows:
        columns = ["alarm", "since version", "until", "seen", "rule", "what to try"]
        section.tables.append(PageTable(columns, rows, right=frozenset({1, 2})))
    for one in found:
        cards = [card(sample, link=link_of(sample)) for sample in one.samples[:SAMPLES]]
        section.samples += [(f"{one.name}: samples to read", cards)] if cards else []
    unseen = facts.alarms.unseen() if facts.alarms is not None else {}
    section.note = "" if rows else "No alarm was raised."
    if unseen:
        section.note = f"{section.note} Not checked, because the journal lacks its data: {', '.join(unseen)}.".strip()
    return section


def listed_samples(facts: RunFacts) -> list[Line]:
    """The samples whose cards have a link to a page of their own."""
    found = facts.alarms.findings() if facts.alarms is not None else []
    return [*facts.texts.values(), *(sample for one in found for sample in one.samples[:SAMPLES])]


def _until(one: Finding) -> str:
    return "holds" if one.is_active else str(one.last)


def profiles_section(facts: RunFacts) -> Section | None:
    """Links to the recordings, relative to the run's folder; None without one."""
    found = [line for line in facts.profiles if PROFILE.fullmatch(str(line.get("file", "")))]
    if not found:
        return None
    section = Section("profiles", "Profiles", "Recordings by torch.profiler: open them in ui.perfetto.dev.")
    for line in found:
        about = f"{line['role']}-{line['rank']}.{line['inc']}, steps {line.get('first')} to {line.get('last')}"
        section.links.append((str(line["file"]), about))
    return section
