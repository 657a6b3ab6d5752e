"""One SQL expression, checked: it looks at nothing but a manifest's row.

DuckDB parses the text and hands back its syntax tree; only expressions that give the same answer
for the same row for ever are let through. What is refused here would otherwise be refused later,
or would make a selection depend on the time, on chance or on the machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fsmount.errors import PlanError
from fsmount.select.columns import unlike

Params = Sequence[Any] | Mapping[str, Any] | None

RELATION = "__fsmount_rows__"
PLACE = "__fsmount_place__"
Rows = npt.NDArray[np.int64]

_CLASSES = {
    "BETWEEN", "CASE", "CAST", "COLLATE", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT",
    "FUNCTION", "LAMBDA", "LAMBDA_REF", "OPERATOR", "PARAMETER", "TYPE",
}  # fmt: skip
# Functions of the session or of DuckDB's build whatever their stability is said to be. Those that
# take no argument are found by that, and those of PostgreSQL's catalog by their schema.
_NOT_OF_THE_ROW = {
    "create_sort_key", "current_schemas", "current_setting", "get_block_size", "getenv",
    "getvariable", "hash", "icu_sort_key", "in_search_path", "index_key", "json_deserialize_sql",
    "json_serialize_plan", "json_serialize_sql", "list_approx_count_distinct", "md5_number",
    "stats", "vector_type",
}  # fmt: skip
_CONSTRUCTORS = {"list_pack", "list_value", "map", "pi"}  # with no argument, always the same value
_LIST_AGGREGATES = {
    "aggregate", "array_aggr", "array_aggregate", "list_aggr", "list_aggregate",
}  # fmt: skip
# Words that are functions of the clock or the session unless a column has their name.
_VALUE_FUNCTIONS = {
    "current_catalog", "current_date", "current_role", "current_schema", "current_time",
    "current_timestamp", "current_user", "localtime", "localtimestamp", "session_user", "user",
}  # fmt: skip
# Functions whose time and result are linear in their arguments; any other is run where time and
# memory have a limit.
_LINEAR = {
    "!__postfix", "!~~", "!~~*", "!~~~", "%", "&", "&&", "*", "**", "+", "-", "->", "->>", "/",
    "//", "<<", "<@", ">>", "@", "@>", "^", "^@", "|", "||", "~", "~~", "~~*", "~~~", "abs",
    "array_contains", "array_extract", "array_has", "array_length", "cardinality", "ceil",
    "ceiling", "char_length", "character_length", "concat", "contains", "date_part", "date_trunc",
    "datepart", "datetrunc", "day", "dayofweek", "dayofyear", "decode", "element_at", "encode",
    "ends_with", "epoch", "exp", "floor", "greatest", "hour", "ifnull", "instr", "isfinite",
    "isinf", "isnan", "json_array_length", "json_exists", "json_extract", "json_extract_path",
    "json_extract_path_text", "json_extract_string", "json_type", "json_valid", "json_value",
    "lcase", "least", "left", "len", "length", "like_escape", "list_avg", "list_contains",
    "list_count", "list_element", "list_extract", "list_has", "list_has_all", "list_has_any",
    "list_indexof", "list_max", "list_min", "list_pack", "list_position", "list_sum",
    "list_value", "ln", "log", "log10", "log2", "lower", "ltrim", "map_extract", "md5", "minute",
    "mod", "month", "not_like_escape", "nullif", "octet_length", "position", "pow", "power",
    "prefix", "quarter", "regexp_extract", "regexp_full_match", "regexp_matches", "right",
    "round", "row", "rtrim", "second", "sha256", "sign", "split", "split_part", "sqrt",
    "starts_with", "str_split", "string_split", "strlen", "strpos", "strptime", "struct_extract",
    "struct_pack", "substr", "substring", "suffix", "trim", "trunc", "try_strptime", "typeof",
    "ucase", "unicode", "upper", "week", "weekday", "year",
}  # fmt: skip
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "threads": "2",
    "memory_limit": "2GiB",
}


@dataclass(frozen=True, slots=True)
class Expression:
    """A checked expression and the names it may be referring to columns by."""

    sql: str
    names: tuple[str, ...]  # sorted; the first part of every reference, as written
    lambda_names: frozenset[str]  # those that a lambda introduces
    bounded: bool  # whether its cost is linear in the rows that it looks at


class Engine:
    """DuckDB, shut off from files, network and clock; use as a context manager. Not thread-safe."""

    def __init__(self) -> None:
        self._connection = duckdb.connect(":memory:", config=_CONFIG)
        self._connection.execute("SET GLOBAL TimeZone = 'UTC'").fetchall()
        self._connection.execute("SET GLOBAL lock_configuration = true").fetchall()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def parse(self, where: str) -> Expression:
        """Check `where`; raises PlanError with DuckDB's message or naming what is refused."""
        tree = self._tree(where)
        self._check(where, tree)
        refs = {name for node in _nodes(tree) for name in _column_of(node)}
        lambdas = {
            ref["column_names"][0]
            for node in _nodes(tree)
            if node["class"] == "LAMBDA"
            for ref in _nodes(node["lhs"])
            if ref["class"] == "COLUMN_REF"
        }
        calls = {node["function_name"].lower() for node in _nodes(tree) if "function_name" in node}
        introduced = frozenset(lambdas) - _VALUE_FUNCTIONS
        return Expression(where, tuple(sorted(refs)), introduced, bounded=calls <= _LINEAR)

    def matches(self, table: pa.Table, expression: Expression, params: Params) -> Rows:
        """The ascending int64 places of the rows of `table` for which `expression` is true."""
        place = unlike(PLACE, table.column_names)
        places = pa.array(np.arange(table.num_rows, dtype=np.int64))
        sql = f"SELECT {place} FROM {RELATION} WHERE CAST((\n{expression.sql}\n) AS BOOLEAN)"  # noqa: S608
        try:
            with self._connection.cursor() as cursor:
                cursor.register(RELATION, table.append_column(place, places))
                found = cursor.execute(sql, params).fetchnumpy()[place]
        except duckdb.Error as error:
            raise refusal(expression.sql, _message(error)) from None
        return np.sort(np.asarray(found, np.int64))

    def _tree(self, where: str) -> dict[str, Any]:
        """The syntax tree of `where`, which must mean the same in parentheses and without."""
        bare = self._statements(where, f"SELECT 1 WHERE {where}\n")
        enclosed = self._statements(where, f"SELECT 1 WHERE (\n{where}\n)")
        if len(bare) != 1 or _meaning(bare) != _meaning(enclosed):
            raise refusal(where, "it is not one expression")
        tree: dict[str, Any] = bare[0]["node"]["where_clause"]
        return tree

    def _statements(self, where: str, sql: str) -> list[dict[str, Any]]:
        try:
            rows = self._connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql])
            answer = json.loads(rows.fetchall()[0][0])
        except duckdb.Error as error:
            raise refusal(where, _message(error)) from None
        if answer["error"]:
            raise refusal(where, f"Parser Error: {answer['error_message']}")
        statements: list[dict[str, Any]] = answer["statements"]
        return statements

    def _check(self, where: str, tree: Any, vetted: frozenset[str] = frozenset()) -> None:
        calls: dict[str, int] = {}
        for node in _nodes(tree):
            if node["class"] not in _CLASSES:
                raise refusal(where, f"{_word(node['class'])} can't be part of it")
            if node["class"] == "FUNCTION":
                arguments = node["arguments"] if "arguments" in node else node["children"]
                name = node["function_name"].lower()
                calls[name] = min(len(arguments), calls.get(name, len(arguments)))
                if name in _LIST_AGGREGATES and not _exact_aggregate(arguments):
                    raise refusal(where, f"{name}() needs the name of an exact aggregate")
            if node["class"] == "COLUMN_REF" and node["column_names"][0].lower() == RELATION:
                raise refusal(where, f"{RELATION} is no column")
        for name in sorted(calls.keys() - vetted):
            self._check_function(where, name, calls[name], vetted | {name})

    def _check_function(
        self, where: str, name: str, arguments: int, vetted: frozenset[str]
    ) -> None:
        found = self._connection.execute(
            "SELECT function_type, stability, macro_definition, "
            "coalesce(len(parameters), 0) = 0 AND varargs IS NULL, schema_name "
            "FROM duckdb_functions() WHERE lower(function_name) = ?",
            [name],
        ).fetchall()
        entries = [entry[:4] for entry in found if entry[4] == "main"]
        if {kind for kind, *_ in entries} & {"aggregate", "window"}:
            raise refusal(where, f"{name}() looks at more than one row")
        scalars = {stability for kind, stability, *_ in entries if kind == "scalar"}
        macros = [definition for kind, _, definition, _ in entries if kind == "macro"]
        elsewhere = name in _NOT_OF_THE_ROW or name.startswith("__internal_")
        elsewhere |= name not in _CONSTRUCTORS and any(bare for *_, bare in entries)
        elsewhere |= name == "age" and arguments < 2  # to the current date
        consistent = "CONSISTENT" in scalars or (macros and not scalars)
        if found and (elsewhere or not consistent):
            raise refusal(where, f"{name}() is not a function of the row alone")
        for definition in macros:
            self._check_macro(where, name, definition, vetted)

    def _check_macro(self, where: str, name: str, definition: str, vetted: frozenset[str]) -> None:
        tree = self._tree(definition)
        refs = (node["column_names"][0].lower() for node in _nodes(tree) if "column_names" in node)
        if not _VALUE_FUNCTIONS.isdisjoint(refs):
            raise refusal(where, f"{name}() is not a function of the row alone")
        try:
            self._check(definition, tree, vetted)
        except PlanError:
            raise refusal(where, f"{name}() is not a function of the row alone") from None


def refusal(where: str, why: str) -> PlanError:
    """The error that says, on one line, why `where` can't select."""
    return PlanError(f"where {' '.join(where.split())!r}: {' '.join(why.split())}")


def _message(error: Exception) -> str:
    """DuckDB's message, without its advice and its excerpt of a query that no user typed."""
    return str(error).split("\nLINE ")[0].split("\n\nPossible solutions:")[0]


def _column_of(node: dict[str, Any]) -> list[str]:
    """The first part of the name that a node may be referring to a column by, if it does.

    `name.upper()` is written like a function of a schema.
    """
    if node["class"] == "COLUMN_REF":
        return [node["column_names"][0]]
    if node["class"] != "FUNCTION":
        return []
    path = [part for part in (node["catalog"], node["schema"]) if part]
    return [] if path[:1] in ([], ["main"], ["system"]) else path[:1]


def _exact_aggregate(arguments: Sequence[dict[str, Any]]) -> bool:
    """Whether a list's aggregate is named by a constant, and is the same in every build."""
    if len(arguments) < 2:
        return False
    argument = arguments[1].get("expression", arguments[1])
    if argument["class"] != "CONSTANT":
        return False
    value = argument["literal"].get("text") if "literal" in argument else argument["value"]
    name = value.get("value") if isinstance(value, dict) else value
    return not str(name).lower().startswith(("approx_", "reservoir_"))


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Every node of a syntax tree that is an expression."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if "class" in node:
                yield node
            stack += node.values()
        elif isinstance(node, list):
            stack += node


def _meaning(tree: Any) -> Any:
    """A syntax tree without the places of its words in the text."""
    if isinstance(tree, dict):
        return {k: _meaning(v) for k, v in tree.items() if not k.startswith("query_location")}
    return [_meaning(part) for part in tree] if isinstance(tree, list) else tree


def _word(kind: str) -> str:
    words = {"STAR": "*", "SUBQUERY": "a subquery", "WINDOW": "a window function"}
    return words.get(kind, kind.lower().replace("_", " "))
