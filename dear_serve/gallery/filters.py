"""Filters: a small, closed part of SQL's WHERE, parsed by us, run in memory or written again for LanceDB.

LanceDB takes any expression its engine knows, stops reading at a semicolon and quotes server paths in its
errors, so nothing a user wrote reaches it. The grammar (keywords in any case):

    or      := and (OR and)*
    and     := not (AND not)*
    not     := NOT* test
    test    := '(' or ')' | column [compare]
    compare := (= | == | != | <> | < | <= | > | >=) (value | column)
             | IS [NOT] NULL
             | [NOT] IN '(' value (',' value)* ')'
             | [NOT] BETWEEN value AND value
             | [NOT] LIKE text | [NOT] ILIKE text
    value   := 'text' ('' for a quote) | number | TRUE | FALSE
    column  := name | "name" | `name`

A column is a metadata key, or `id`, the picture's id, unless a metadata key has that name. A comparison with
an absent value (null) is not true, as in SQL.

LIKE and ILIKE are left to LanceDB; everything else runs over columns in memory, with the same result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import reduce
from typing import NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from dear_serve.errors import QueryError
from dear_serve.gallery.schema import Kind, metadata_column

__all__ = ["MAX_LENGTH", "Filter", "compile_filter"]

MAX_LENGTH = 2000
# LanceDB's own parser gives up, with a misleading message, from about 12 levels of AND inside OR.
_MAX_DEPTH = 8
_MAX_TESTS = 100
_KEYWORDS = {"and", "or", "not", "in", "is", "null", "between", "like", "ilike", "true", "false"}
_COMPARE = {"=": "=", "==": "=", "!=": "<>", "<>": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_FUNCTIONS: dict[str, Callable[..., pa.ChunkedArray]] = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_TOKEN = re.compile(
    r"""\s*(?:
      (?P<text>'(?:[^']|'')*')
    | (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])
    | (?P<quoted>"[^"]*"|`[^`]*`)
    | (?P<word>[^\W\d]\w*)
    | (?P<sign><=|>=|<>|!=|==|[=<>(),])
    )""",
    re.VERBOSE,
)


class _Token(NamedTuple):
    kind: str
    value: str


Columns: TypeAlias = Callable[[str], pa.ChunkedArray]
"""A table's column by its name."""

_Run: TypeAlias = Callable[[Columns], pa.ChunkedArray]


class Filter(NamedTuple):
    """A checked filter, or a part of one."""

    sql: str
    """For LanceDB."""
    run: _Run | None
    """Truth of each row over columns in memory, null where it is neither; None: LanceDB has to."""


class _Operand(NamedTuple):
    kind: Kind
    sql: str
    run: Callable[[Columns], pa.ChunkedArray | pa.Scalar]
    literal: str | float | bool | None = None


def _both(function: Callable[..., pa.ChunkedArray], *parts: Filter) -> _Run | None:
    """`function` of what two parts give; None unless both run in memory."""
    runs = [part.run for part in parts if part.run is not None]
    return (lambda c: function(*(run(c) for run in runs))) if len(runs) == len(parts) else None


def _bad(message: str) -> QueryError:
    return QueryError(f"filter: {message}", code="bad_filter", field="filter")


def _tokens(text: str) -> list[_Token]:
    found, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise _bad(f"cannot read {text[position : position + 20].strip()!a} at character {position + 1}")
        kind = str(match.lastgroup)
        value = match.group(kind)
        if kind == "word" and value.lower() in _KEYWORDS:
            kind, value = "keyword", value.lower()
        found.append(_Token(kind, value))
        position = match.end()
    return found


class _Parser:
    """Recursive descent over the tokens; every method returns the part it has read."""

    def __init__(self, text: str, kinds: Mapping[str, Kind]) -> None:
        self.tokens = _tokens(text)
        self.kinds = kinds
        self.position = 0
        self.depth = 0
        self.tests = 0

    def peek(self) -> _Token:
        return self.tokens[self.position] if self.position < len(self.tokens) else _Token("end", "the end")

    def take(self, *values: str) -> str | None:
        """The next token's value if it is one of these keywords or signs, and step over it."""
        token = self.peek()
        if token.kind in ("keyword", "sign") and token.value in values:
            self.position += 1
            return token.value
        return None

    def expect(self, value: str) -> None:
        if self.take(value) is None:
            raise _bad(f"{value.upper()} is expected before {self.peek().value[:40]!a}")

    def parse(self) -> Filter:
        whole = self.either()
        if self.peek().kind != "end":
            raise _bad(f"AND, OR or the end is expected before {self.peek().value[:40]!a}")
        return whole

    def either(self) -> Filter:
        parts = [self.all_of()]
        while self.take("or"):
            parts.append(self.all_of())
        return _joined(parts, " OR ", pc.or_kleene)

    def all_of(self) -> Filter:
        parts = [self.negated()]
        while self.take("and"):
            parts.append(self.negated())
        return _joined(parts, " AND ", pc.and_kleene)

    def negated(self) -> Filter:
        turn = False
        while self.take("not"):
            turn = not turn
        part = self.test()
        return Filter(f"(NOT {part.sql})", _both(pc.invert, part)) if turn else part

    def test(self) -> Filter:
        if self.take("("):
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                raise _bad(f"more than {_MAX_DEPTH} nested brackets; write it flatter")
            part = self.either()
            self.expect(")")
            self.depth -= 1
            return part
        self.tests += 1
        if self.tests > _MAX_TESTS:
            raise _bad(f"more than {_MAX_TESTS} tests; use IN (…)")
        return self.compare(self.column())

    def column(self) -> _Operand:
        token = self.peek()
        if token.kind not in ("word", "quoted"):
            raise _bad(
                f"a column is expected instead of {token.value[:40]!a}, such as price < 10 or name = 'x'"
            )
        self.position += 1
        name = token.value[1:-1] if token.kind == "quoted" else token.value
        if name in self.kinds:
            return _column(self.kinds[name], metadata_column(name))
        if name == "id":
            return _column("text", "id")
        known = ", ".join(sorted({*self.kinds, "id"}))
        raise _bad(f"no column {name[:64]!a}; known are {known}; text is written between single quotes")

    def value(self) -> _Operand:
        token = self.peek()
        if word := self.take("true", "false"):
            return _literal("truth", word.upper(), word == "true")
        if token.kind == "text":
            self.position += 1
            return _literal("text", token.value, token.value[1:-1].replace("''", "'"))
        if token.kind == "number":
            self.position += 1
            number = float(token.value)
            if not math.isfinite(number):
                raise _bad(f"number {token.value[:40]} is too large")
            # Always a float literal: the columns are float64.
            return _literal("number", repr(number), number)
        raise _bad(f"a value is expected instead of {token.value[:40]!a}")

    def value_like(self, column: _Operand) -> _Operand:
        return self.same_kind(column, self.value())

    @staticmethod
    def same_kind(column: _Operand, other: _Operand) -> _Operand:
        if column.kind != other.kind:
            name = column.sql[1:-1].removeprefix("m_")
            raise _bad(f"column {name!a} holds {column.kind} and cannot be compared with {other.kind}")
        return other

    def compare(self, column: _Operand) -> Filter:
        if sign := self.take(*_COMPARE):
            other = self.column() if self.peek().kind in ("word", "quoted") else self.value()
            return _compared(column, _COMPARE[sign], self.same_kind(column, other))
        if self.take("is"):
            negation = "NOT " if self.take("not") else ""
            self.expect("null")
            known = pc.is_valid if negation else pc.is_null
            return Filter(f"({column.sql} IS {negation}NULL)", lambda c: known(column.run(c)))
        negation = "NOT " if self.take("not") else ""
        if operator := self.take("in", "between", "like", "ilike"):
            part = self.operands(operator, column)
            sql = f"({column.sql} {negation}{part.sql})"
            return Filter(sql, _both(pc.invert, part) if negation else part.run)
        if negation or column.kind != "truth":
            raise _bad(f"a comparison is expected before {self.peek().value[:40]!a}")
        return Filter(column.sql, column.run)

    def operands(self, operator: str, column: _Operand) -> Filter:
        """What follows IN, BETWEEN, LIKE or ILIKE, with the operator."""
        if operator == "in":
            self.expect("(")
            values = [self.value_like(column)]
            while self.take(","):
                values.append(self.value_like(column))
            self.expect(")")
            return _member(column, values)
        if operator == "between":
            low = self.value_like(column)
            self.expect("and")
            high = self.value_like(column)
            parts = (_compared(column, ">=", low), _compared(column, "<=", high))
            return Filter(f"BETWEEN {low.sql} AND {high.sql}", _both(pc.and_kleene, *parts))
        if column.kind != "text":
            raise _bad(f"{operator.upper()} needs a text column")
        return Filter(f"{operator.upper()} {self.value_like(column).sql}", None)


def _column(kind: Kind, name: str) -> _Operand:
    return _Operand(kind, f"`{name}`", lambda columns: columns(name))


def _literal(kind: Kind, sql: str, value: str | float | bool) -> _Operand:
    scalar = pa.scalar(value)
    return _Operand(kind, sql, lambda _: scalar, value)


def _joined(parts: list[Filter], sign: str, function: Callable[..., pa.ChunkedArray]) -> Filter:
    """AND or OR of the parts."""

    def join(one: Filter, other: Filter) -> Filter:
        return Filter("", _both(function, one, other))

    if len(parts) == 1:
        return parts[0]
    return Filter(f"({sign.join(p.sql for p in parts)})", reduce(join, parts).run)


def _compared(column: _Operand, sign: str, other: _Operand) -> Filter:
    function = _FUNCTIONS[sign]
    return Filter(f"({column.sql} {sign} {other.sql})", lambda c: function(column.run(c), other.run(c)))


def _member(column: _Operand, values: list[_Operand]) -> Filter:
    """IN: neither true nor false for a row without a value, as in SQL."""
    known = pa.array([v.literal for v in values])

    def run(columns: Columns) -> pa.ChunkedArray:
        rows = column.run(columns)
        return pc.if_else(pc.is_valid(rows), pc.is_in(rows, value_set=known), None)

    return Filter(f"IN ({', '.join(v.sql for v in values)})", run)


def compile_filter(text: str, kinds: Mapping[str, Kind]) -> Filter:
    """A user's filter, checked.

    Args:
        text: the grammar above, at most 2,000 characters, 100 tests and 8 nested brackets.
        kinds: kind of each metadata key the gallery has.

    Raises QueryError (bad_filter) that says what is wrong; it never holds a path.
    """
    if not isinstance(text, str) or not text.strip():
        raise _bad("text such as price < 10 AND color_name = 'red' is expected")
    if len(text) > MAX_LENGTH:
        raise _bad(f"{len(text)} characters; at most {MAX_LENGTH}")
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise _bad("it holds characters that are not text")
    return _Parser(text, kinds).parse()
