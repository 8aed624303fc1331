"""Schema of each message type: its header fields with their checks, and its frames."""

import dataclasses
import itertools
import math
import operator
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from areal_bus import messages
from areal_bus.messages import MAX_PAIRS, Finish, Longest, Message, Refund, Role, VerdictStatus

ENUMS: dict[str, type[StrEnum]] = {  # fields with enumerated values
    "Join.role": Role,
    "Trajectory.finish": Finish,
    "Scored.finish": Finish,
    "Scored.status": VerdictStatus,
    "GroupScored.status": VerdictStatus,
    "ShardItem.finish": Finish,
    "SampleFailed.reason": Refund,
}
KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Message) if kind is not messages.Disconnected}
ARRAYS = ["int32", "float32"]  # types of ids and log-probs

Fits = Callable[[Any], bool]
PLAIN = (str, bool, type(None))  # types without further checks


@dataclass(frozen=True, slots=True)
class Schema:
    """Schema of one message type."""

    kind: type
    plain: dict[str, Fits]  # header fields and their checks
    framed: tuple[str, ...]  # frame fields: ids and log-probs if there are any, then texts
    first_frame: int  # index of the first frame among the fields of the record; frames are adjacent
    texts: tuple[int, ...]  # indices of the text fields
    names_at: tuple[int, ...]  # indices of the lists of names, and of their frames
    turns_at: int | None  # index of the field `turns`, which is text
    longest: tuple[tuple[str, Longest], ...]  # limits of the header's texts; none is without
    strict: tuple[tuple[str, Fits], ...]  # part of `plain` that restricts values; also checked before sending
    plain_of: Callable[[Any], dict[str, Any]]  # header fields of a record
    framed_of: Callable[[Any], tuple[Any, ...]]
    has_tokens: bool  # the first two frames are ids and log-probs, sized by segments and spans
    has_fields: bool  # the last frame has numbers of each sampled token by name
    names: tuple[str, ...]  # header fields, in order
    shapes: frozenset[tuple[type, ...]]  # allowed tuples of value types
    value_checks: tuple[tuple[str, Fits], ...]  # part of `plain` that needs more than the type; not the size of an int
    is_flat: bool  # no header field is a map

    def fits_fast(self, fields: dict[str, Any], *, are_small: bool) -> bool:
        """Whether these are the fields in order and all values pass `plain`. `are_small`: ints are below 2^63.

        All types are compared at once; only fields in `value_checks` are checked one by one.
        """
        if tuple(fields) != self.names or tuple(map(type, fields.values())) not in self.shapes:
            return False
        for name, limit in self.longest:
            if len(fields[name]) > limit.n:
                return False
        for name, fits in self.value_checks if are_small else self.plain.items():  # noqa: SIM110 (all(...) takes twice as long)
            if not fits(fields[name]):
                return False
        return True


@cache
def schema_of(kind: type) -> Schema:
    hints = typing.get_type_hints(kind)
    limits = _limits(kind)
    all_names = [f.name for f in dataclasses.fields(kind)]
    framed = {f.name: f.metadata["frame"] for f in dataclasses.fields(kind) if "frame" in f.metadata}
    names = [name for name in all_names if name not in framed]
    words = {name: ENUMS[f"{kind.__name__}.{name}"] for name in names if f"{kind.__name__}.{name}" in ENUMS}
    plain = {name: _is_one_of(words[name]) if name in words else _fits(hints[name]) for name in names}
    plain |= {name: _is_text_up_to(limit.n) for name, limit in limits.items() if name not in words}
    if unlimited := [name for name in names if hints[name] is str and name not in limits]:
        raise TypeError(f"a text in the header needs a limit (messages.Longest); not so {kind.__name__}.{unlimited[0]}")
    has_tokens = list(framed)[:2] == ["ids", "logps"] and {"segments", "spans"} <= set(names)
    first = all_names.index(next(iter(framed))) if framed else 0
    if all_names[first : first + len(framed)] != list(framed):
        raise TypeError(f"the frames of a record must be adjacent fields; not so in {kind.__name__}")
    forms = list(framed.values())
    has_fields = has_tokens and forms[-1] == "fields"
    texts, arrays = forms[2 * has_tokens : len(forms) - has_fields], ARRAYS[: 2 * has_tokens]
    if forms[: 2 * has_tokens] != arrays or not {"text", "names"}.issuperset(texts):
        order = "ids and log-probs (with segments and spans), then texts, then fields"
        raise TypeError(f"frames must be {order}; not so in {kind.__name__}")
    options = [_types(hints[name]) for name in names]
    finite: dict[str, Fits] = {name: math.isfinite for name in names if hints[name] is float}
    unclear = {name: plain[name] for name in names if not {int, *PLAIN}.issuperset(_types(hints[name]))}
    pairs = [name for name in names if hints[name] == list[list[int]]]
    short: dict[str, Fits] = {name: lambda value: len(value) <= MAX_PAIRS for name in pairs}
    known = {name: frozenset(map(str, words[name])).__contains__ for name in words}
    return Schema(
        kind=kind,
        plain=plain,
        framed=tuple(framed),
        first_frame=first,
        texts=tuple(all_names.index(name) for name, form in framed.items() if form == "text"),
        names_at=tuple(all_names.index(name) for name, form in framed.items() if form == "names"),
        turns_at=all_names.index("turns") if "turns" in framed else None,
        longest=tuple((name, limit) for name, limit in limits.items() if name not in words),
        strict=tuple(({name: plain[name] for name in words} | finite | short).items()),
        plain_of=_fields_of(names),
        framed_of=_values_of(list(framed)),
        has_tokens=has_tokens,
        has_fields=has_fields,
        names=tuple(names),
        shapes=frozenset(itertools.product(*options)),
        value_checks=tuple((unclear | finite | known).items()),
        is_flat=not any(dict in option for option in options),
    )


def _limits(kind: type) -> dict[str, Longest]:
    """Limits of the text fields in the header, as `messages` annotates them."""
    hints = typing.get_type_hints(kind, include_extras=True).items()
    return {name: hint.__metadata__[0] for name, hint in hints if typing.get_origin(hint) is typing.Annotated}


def _fields_of(names: list[str]) -> Callable[[Any], dict[str, Any]]:
    """A function that returns these fields as a dict. Generated code takes a third of the time of `zip`."""
    made: Callable[[Any], dict[str, Any]] = eval(f"lambda record: {{{', '.join(f'{n!r}: record.{n}' for n in names)}}}")
    return made


def _values_of(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns these fields as a tuple."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda record: tuple([getattr(record, name) for name in names])


def _is_one_of(words: type[StrEnum]) -> Fits:
    known = frozenset(map(str, words))
    return lambda value: isinstance(value, str) and value in known


def _is_text_up_to(n: int) -> Fits:
    return lambda value: type(value) is str and len(value) <= n


def _types(hint: Any) -> list[type]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [one for arg in args for one in _types(arg)]
    return [int, float] if hint is float else [origin or hint]


def _fits(hint: Any) -> Fits:
    """Check of a declared type: int, float, bool, str, list[...], dict[str, float] or a union of them."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [_fits(arg) for arg in args]
        return lambda value: any(fits(value) for fits in options)
    if hint == list[list[int]]:
        return _are_pairs
    if origin is list:
        item = _fits(args[0])
        return lambda value: type(value) is list and all(map(item, value))
    if hint == dict[str, float]:  # metrics for people: NaN means no value
        return lambda value: (
            type(value) is dict and all(type(k) is str and type(x) in (float, int) for k, x in value.items())
        )
    if hint is float:
        return lambda value: type(value) is int or (type(value) is float and math.isfinite(value))
    if hint is int:
        return lambda value: type(value) is int and -(2**63) <= value < 2**63
    if hint in PLAIN:
        return lambda value: type(value) is hint
    raise TypeError(f"a header field of {messages.__name__} may not have the type {hint!r}")


def _are_pairs(value: Any) -> bool:
    """Whether this is a list of pairs of counts: (tokens given, tokens sampled) or (version, tokens)."""
    if type(value) is not list or len(value) > MAX_PAIRS:
        return False
    for pair in value:
        if type(pair) is not list or len(pair) != 2:
            return False
        one, two = pair
        if not (type(one) is int and type(two) is int and 0 <= one | two < 2**63):  # `|` is negative if either is
            return False
    return True
