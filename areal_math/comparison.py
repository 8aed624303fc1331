r"""Compares a given answer with the row's (gold) answer. Not symmetric: the given answer may add a unit or a name.

In doubt they differ: units must be equal if both have one, brackets and bases must be equal, and the given answer must
not leave computations that the gold answer has evaluated.
"""

import re
from fractions import Fraction

from areal_math import expressions
from areal_math.expressions import Formula, values
from areal_math.kinds import Answer, Equation, InBase, Inequality, Matrix, Quantity, Ratio, Several, Words

COLLECTIONS = ("", "{}")  # a list of solutions may be written as a set
TURNED_POINT = re.compile(r"\(y,x\)|\((?!x,y,z)[xyz],[xyz],[xyz]\)")  # (y,x)=(2,3) is not the point (2,3)


def equal(gold: Answer, given: Answer) -> bool:
    if isinstance(given, Equation) and not isinstance(gold, Equation):
        return named(given) and equal(gold, given.right)
    if isinstance(gold, Equation) and not isinstance(given, Equation):
        return bool(gold.name) and equal(gold.right, given)
    if isinstance(gold, Inequality) and not isinstance(given, Inequality):
        return equal(gold.interval, given)
    if isinstance(given, Inequality) and isinstance(gold, Several):
        return certainly_interval(gold) and equal(gold, given.interval)
    if isinstance(gold, Several) or isinstance(given, Several):
        return several(gold, given)
    if isinstance(gold, Ratio) or isinstance(given, Ratio):
        return ratios(gold, given)
    return type(gold) is type(given) and same_kind(gold, given)


def same_kind(gold: Answer, given: Answer) -> bool:
    match gold, given:
        case Quantity(), Quantity():
            return quantities(gold, given)
        case Equation(), Equation():
            return equations(gold, given)
        case Matrix(), Matrix():
            return matrices(gold, given)
        case Inequality(), Inequality():
            return gold.name == given.name and several(gold.interval, given.interval)
        case (Words(), Words()) | (InBase(), InBase()):
            return gold == given
    return False


def named(given: Equation) -> bool:
    """Whether the left side only names the value: a name that the value does not have in it, or an equal number."""
    if given.name:
        return given.name not in symbols(given.right) and not TURNED_POINT.fullmatch(given.name)
    return given.left is not None and not given.left.names


def symbols(answer: Answer) -> frozenset[str]:
    return answer.formula.names if isinstance(answer, Quantity) else frozenset()


def quantities(gold: Quantity, given: Quantity) -> bool:
    if gold.unit and given.unit and gold.unit != given.unit:
        return False
    same = expressions.equal(gold.formula, given.formula)
    if gold.percent == given.percent:
        return same
    if gold.percent:  # 0.7 and 70 both match 70%: the question may ask for a percentage
        return same or (gold.formula.literal is not None and given.formula.literal == gold.formula.literal / 100)
    number, share = given.formula.literal, gold.formula.literal
    if gold.unit or number is None or share is None:
        return False
    whole = share.denominator == 1
    asked = same and (
        whole or share > 1
    )  # the question may ask for a percentage: 12.5% matches 12.5, 0.5% does not match 0.5
    return asked or (number / 100 == share and (not whole or share == 1))  # 50% matches 1/2, 1000% does not match 10


def equations(gold: Equation, given: Equation) -> bool:
    """Whether two equations are equal up to a factor, or give the same name the same value."""
    if gold.name and (gold.name == given.name or graphs(gold.name, given.name)):
        return equal(gold.right, given.right)
    sides = [side.formula if isinstance(side, Quantity) else None for side in (gold.right, given.right)]
    if gold.left is None or given.left is None or sides[0] is None or sides[1] is None:
        return False
    one, other = difference(gold.left, sides[0]), difference(given.left, sides[1])
    if one.names != other.names or not one.names:
        return False
    pairs = list(zip(values(one), values(other), strict=True))
    if any(a is None or b is None or not a or not b for a, b in pairs):
        return False
    (first, second), *rest = [(complex(a), complex(b)) for a, b in pairs if a is not None and b is not None]
    return all(expressions.close(a * second, b * first) for a, b in rest)


def graphs(one: str, other: str) -> bool:
    """Whether one is y and the other a function of x: y = 2x and f(x) = 2x are the same graph."""
    return "y" in (one, other) and any(re.fullmatch(r"[fgh]\(x\)", name) for name in (one, other))


def difference(left: Formula, right: Formula) -> Formula:
    return expressions.add(left, expressions.negative(right))


def ratios(gold: Answer, given: Answer) -> bool:
    """Whether the parts are proportional. A ratio of two parts equals a fraction, but no whole number."""
    ours, theirs = as_ratio(gold), as_ratio(given)
    if ours is None or theirs is None or len(ours.parts) != len(theirs.parts):
        return False
    return all(a * theirs.parts[0] == b * ours.parts[0] for a, b in zip(ours.parts, theirs.parts, strict=True))


def as_ratio(answer: Answer) -> Ratio | None:
    if isinstance(answer, Quantity) and not answer.unit and not answer.percent and not answer.formula.decimal:
        number = answer.formula.literal
        if number is not None and number > 0 and number.denominator > 1 and not answer.formula.unevaluated:
            return Ratio((Fraction(number.numerator), Fraction(number.denominator)))
    return answer if isinstance(answer, Ratio) else None


def several(gold: Answer, given: Answer) -> bool:
    ours, theirs = as_several(gold), as_several(given)
    if ours is None or theirs is None or len(ours.items) != len(theirs.items):
        return False
    if {ours.brackets, theirs.brackets} == {"", "()"}:
        ours, theirs = as_point(ours), as_point(theirs)
    both = (ours.brackets, theirs.brackets)
    if (both[0] in COLLECTIONS and both[1] in COLLECTIONS) or both == ("∪", "∪"):
        return same_items(ours.items, theirs.items)
    return both[0] == both[1] and all(map(equal, ours.items, theirs.items))


def as_point(answer: Several) -> Several:
    """x=2, y=3 as (2, 3): only for names in alphabetical order, because the order of others is not known.

    "x=2 or y=3" is no point.
    """
    equations = [item for item in answer.items if isinstance(item, Equation)]
    names = [item.name for item in equations]
    in_order = all(len(name) == 1 for name in names) and names == sorted(set(names))
    if answer.brackets or answer.either or len(equations) < len(answer.items) or not in_order:
        return answer
    return Several("()", tuple(item.right for item in equations))


def as_several(answer: Answer) -> Several | None:
    """A single answer as a list of one; None for words, which cannot be an item."""
    if isinstance(answer, Several):
        return answer
    return None if isinstance(answer, Words) else Several("", (answer,))


def same_items(golds: tuple[Answer, ...], givens: tuple[Answer, ...]) -> bool:
    left = list(givens)
    for gold in golds:
        found = next((i for i, given in enumerate(left) if equal(gold, given)), None)
        if found is None:
            return False
        del left[found]
    return True


def matrices(gold: Matrix, given: Matrix) -> bool:
    return (
        gold.brackets == given.brackets
        and [len(row) for row in gold.rows] == [len(row) for row in given.rows]
        and all(
            equal(a, b)
            for one, other in zip(gold.rows, given.rows, strict=True)
            for a, b in zip(one, other, strict=True)
        )
    )


def certainly_interval(answer: Several) -> bool:
    r"""Whether it is an interval and not a point: (1, 2) may be a point, [1, 2) and (1, \infty) may not."""
    if answer.brackets == "∪":
        return True
    return answer.brackets in ("[)", "(]", "[]") or (
        answer.brackets == "()"
        and any(isinstance(item, Quantity) and "infty" in item.formula.names for item in answer.items)
    )
