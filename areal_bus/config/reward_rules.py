"""Rules across the settings of [reward]: weighted terms, forms of a completion and the judge."""

import re
from collections.abc import Collection
from string import Formatter

from areal_bus.config.rewards import RewardConfig
from areal_bus.messages import MAX_PARTS

WEIGHTED, JUDGE = "weighted", "judge"
URL = re.compile(r"https?://[^\s/]+(/\S*)?")

Rule = tuple[bool, str]  # (whether it is violated, error text)


def reward_rules(reward: RewardConfig, others: Collection[str] = ()) -> list[Rule]:
    """`others`: reward functions beside reward.function."""
    functions = {reward.function, *others}
    return [*_terms(reward, functions), *_format(reward), *_judge(reward, functions)]


def _terms(reward: RewardConfig, functions: Collection[str]) -> list[Rule]:
    labels = [term.label for term in reward.terms]
    twice = [label for label in labels if labels.count(label) > 1]
    is_weighted = WEIGHTED in functions
    return [
        (
            is_weighted and not reward.terms,
            'reward.function = "weighted" is the sum of reward.terms: add a table [[reward.terms]]',
        ),
        (
            bool(reward.terms) and not is_weighted,
            f'reward.terms are read by reward.function = "weighted" only: it is {reward.function!r}',
        ),
        (len(labels) > MAX_PARTS, f"reward.terms has at most {MAX_PARTS} tables: there are {len(labels)}"),
        (bool(twice), f"each of reward.terms needs a name of its own: set name where {twice[:1]} occurs again"),
        (
            WEIGHTED in [term.function for term in reward.terms],
            'a term cannot be "weighted" itself: name its terms in reward.terms',
        ),
        (
            bool(labels) and not any(term.weight for term in reward.terms),
            "one of reward.terms needs a weight other than 0: all weights are 0",
        ),
    ]


def _format(reward: RewardConfig) -> list[Rule]:
    pattern = reward.format.pattern
    return [
        (
            bool(error := pattern_error(pattern)),
            f"reward.format.pattern must be a regular expression: {pattern!r}: {error}",
        )
    ]


def _judge(reward: RewardConfig, functions: Collection[str]) -> list[Rule]:
    judge = reward.judge
    is_used = JUDGE in (*functions, *(term.function for term in reward.terms))
    return [
        (
            is_used and not URL.fullmatch(judge.url),
            f'the reward "judge" needs reward.judge.url = "https://HOST/v1": it is {judge.url!r}',
        ),
        (is_used and not judge.model, 'the reward "judge" needs reward.judge.model, the name of a model at its URL'),
        (
            bool(error := template_error(judge.prompt)),
            f"reward.judge.prompt must be a template with {{completion}} ({{{{ and }}}} for braces): {error}",
        ),
    ]


def template_error(template: str) -> str:
    """Why this is no template of a judge's prompt; empty for one."""
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        return str(error)
    if unnamed := [name for name in names if not name or name[0].isdigit()]:
        return f"{{{unnamed[0]}}} has no name"
    return "" if "completion" in names else "{completion} is missing"


def pattern_error(pattern: str) -> str:
    """Why this is no regular expression; empty for one."""
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    return ""
