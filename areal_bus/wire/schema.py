"""How each kind of record travels: which fields the header has and what fits them, which are frames; knows no bytes."""

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
from areal_bus.messages import Finish, Message, Refund, Role, VerdictStatus

WORDS: dict[str, type[StrEnum]] = {  # fields that hold one of a few words
    "Join.role": Role,
    "Trajectory.finish": Finish,
    "Scored.finish": Finish,
    "Scored.status": VerdictStatus,
    "ShardItem.finish": Finish,
    "SampleFailed.reason": Refund,
}
KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Message) if kind is not messages.Disconnected}
ARRAYS = ["int32", "float32"]  # what ids and log-probs are

Fits = Callable[[Any], bool]
PLAIN = (str, bool, type(None))  # types all of whose values fit


@dataclass(frozen=True, slots=True)
class Schema:
    """How one kind of record travels."""

    kind: type
    plain: dict[str, Fits]  # header fields, with a check of their type
    framed: tuple[str, ...]  # fields that are frames: ids and log-probs, where there are any, and texts
    first_frame: int  # where these, all together, stand among the record's fields
    texts: tuple[int, ...]  # where the texts stand
    strict: tuple[tuple[str, Fits], ...]  # of `plain`: not every value of the type fits; checked before sending, too
    plain_of: Callable[[Any], dict[str, Any]]  # the fields of a record
    framed_of: Callable[[Any], tuple[Any, ...]]
    has_tokens: bool  # segments and spans say how long its first two frames, ids and log-probs, are
    names: tuple[str, ...]  # of the header fields, in order
    shapes: frozenset[tuple[type, ...]]  # the types that their values may have
    untold: tuple[tuple[str, Fits], ...]  # of `plain`: the type tells too little, an int's size aside
    is_flat: bool  # no map is a header field

    def fits_at_a_glance(self, fields: dict[str, Any], *, are_small: bool) -> bool:
        """Whether these are the fields, in order, and each value fits by `plain`; if `are_small`, ints are under 2^63.

        Types are compared all at once, so that little is left to look at value by value.
        """
        if tuple(fields) != self.names or tuple(map(type, fields.values())) not in self.shapes:
            return False
        for name, fits in self.untold if are_small else self.plain.items():  # noqa: SIM110 (all(...) takes twice as long)
            if not fits(fields[name]):
                return False
        return True


@cache
def schema_of(kind: type) -> Schema:
    hints = typing.get_type_hints(kind)
    all_names = [f.name for f in dataclasses.fields(kind)]
    framed = {f.name: f.metadata["frame"] for f in dataclasses.fields(kind) if "frame" in f.metadata}
    names = [name for name in all_names if name not in framed]
    words = {name: WORDS[f"{kind.__name__}.{name}"] for name in names if f"{kind.__name__}.{name}" in WORDS}
    plain = {name: _is_one_of(words[name]) if name in words else _fits(hints[name]) for name in names}
    has_tokens = list(framed)[:2] == ["ids", "logps"] and {"segments", "spans"} <= set(names)
    first = all_names.index(next(iter(framed))) if framed else 0
    if all_names[first : first + len(framed)] != list(framed):
        raise TypeError(f"the frames of a record stand together; not so in {kind.__name__}")
    if list(framed.values()) != (ARRAYS if has_tokens else []) + ["text"] * (len(framed) - 2 * has_tokens):
        raise TypeError(f"frames are ids and log-probs, with segments and spans, and texts; not so in {kind.__name__}")
    options = [_types(hints[name]) for name in names]
    finite: dict[str, Fits] = {name: math.isfinite for name in names if hints[name] is float}
    unclear = {name: plain[name] for name in names if not {int, *PLAIN}.issuperset(_types(hints[name]))}
    known = {name: frozenset(map(str, words[name])).__contains__ for name in words}
    return Schema(
        kind=kind,
        plain=plain,
        framed=tuple(framed),
        first_frame=first,
        texts=tuple(range(first + 2 * has_tokens, first + len(framed))),
        strict=tuple(({name: plain[name] for name in words} | finite).items()),
        plain_of=_fields_of(names),
        framed_of=_values_of(list(framed)),
        has_tokens=has_tokens,
        names=tuple(names),
        shapes=frozenset(itertools.product(*options)),
        untold=tuple((unclear | finite | known).items()),
        is_flat=not any(dict in option for option in options),
    )


def _fields_of(names: list[str]) -> Callable[[Any], dict[str, Any]]:
    """A getter of these fields, by name. Written out, a dict is made in a third of the time that `zip` takes."""
    made: Callable[[Any], dict[str, Any]] = eval(f"lambda record: {{{', '.join(f'{n!r}: record.{n}' for n in names)}}}")
    return made


def _values_of(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A getter of these fields."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda record: tuple([getattr(record, name) for name in names])


def _is_one_of(words: type[StrEnum]) -> Fits:
    known = frozenset(map(str, words))
    return lambda value: isinstance(value, str) and value in known


def _types(hint: Any) -> list[type]:
    """What the type of a value that fits can be."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [one for arg in args for one in _types(arg)]
    return [int, float] if hint is float else [origin or hint]


def _fits(hint: Any) -> Fits:
    """A check of one declared type: int, float, bool, str, list[...], dict[str, float] or a union of them."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [_fits(arg) for arg in args]
        return lambda value: any(fits(value) for fits in options)
    if hint == list[list[int]]:
        return _are_pairs
    if origin is list:
        item = _fits(args[0])
        return lambda value: type(value) is list and all(map(item, value))
    if hint == dict[str, float]:  # figures for people: NaN says that there is none
        return lambda value: (
            type(value) is dict and all(type(k) is str and type(x) in (float, int) for k, x in value.items())
        )
    if hint is float:
        return lambda value: type(value) is int or (type(value) is float and math.isfinite(value))
    if hint is int:
        return lambda value: type(value) is int and -(2**63) <= value < 2**63
    if hint in PLAIN:
        return lambda value: type(value) is hint
    raise TypeError(f"{messages.__name__} may not use {hint!r} in a header")


def _are_pairs(value: Any) -> bool:
    """(tokens given, tokens sampled) or (version, tokens), each two counts."""
    if type(value) is not list:
        return False
    for pair in value:
        if type(pair) is not list or len(pair) != 2:
            return False
        one, two = pair
        if not (type(one) is int and type(two) is int and 0 <= one | two < 2**63):  # negative if either is
            return False
    return True
