"""Requests and filters: what is accepted, what each refusal says."""

from __future__ import annotations

import numpy as np
import pytest

from dear_serve.errors import QueryError
from dear_serve.gallery import Invented, PhraseAttribute, Query, build_query, parse_attributes
from dear_serve.gallery.filters import compile_filter

KNOWN = ("class", "color", "shape")
KINDS = {"price": "number", "color_name": "text", "in stock": "truth", "cost": "number", "größe": "text"}


def test_absent_attributes_mean_the_class_feature():
    request = parse_attributes(None, KNOWN)
    assert request.weights == {"class": 1.0}
    assert request.invented == ()


def test_weights_and_lists_are_the_same_request():
    by_name = parse_attributes({"class": 0.5, "shape": 2}, KNOWN)
    as_list = parse_attributes([{"name": "class", "weight": 0.5}, {"name": "shape", "weight": 2.0}], KNOWN)
    assert by_name == as_list
    assert by_name.weights == {"class": 0.5, "shape": 2.0}


def test_a_list_mixes_known_and_own_attributes():
    rust = {"name": "rust", "phrases": ["no rust", "heavy rust"]}
    request = parse_attributes([{"name": "color"}, rust], KNOWN)
    assert request.weights == {"color": 1.0}
    assert request.invented == (PhraseAttribute(name="rust", phrases=("no rust", "heavy rust"), weight=1.0),)


PHRASES = ["a", "b"]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ({"colour": 1.0}, "unknown_attribute"),
        ([{"name": "nope"}], "unknown_attribute"),
        ({"color": -1}, "bad_weights"),
        ({"color": float("nan")}, "bad_weights"),
        ({"color": float("inf")}, "bad_weights"),
        ({"color": 10**400}, "bad_weights"),
        ({"color": True}, "bad_weights"),
        ({"color": "1"}, "bad_weights"),
        ({"color": None}, "bad_weights"),
        ({"color": 0, "shape": 0.0}, "bad_weights"),
        ({}, "bad_weights"),
        ([], "bad_weights"),
        ("color", "bad_attributes"),
        (3, "bad_attributes"),
        (["color"], "bad_attributes"),
        ([{"weight": 1}], "bad_attributes"),
        ([{"name": "  "}], "bad_attributes"),
        ([{"name": "color", "wieght": 1}], "bad_attributes"),
        ([{"name": "color"}, {"name": "color"}], "bad_attributes"),
        ([{"name": "rust", "phrases": "no rust"}], "bad_attributes"),
        ([{"name": "rust", "phrases": ["one"]}], "bad_attributes"),
        ([{"name": "rust", "phrases": ["a", " "]}], "bad_attributes"),
        ([{"name": "rust", "phrases": ["a", 1]}], "bad_attributes"),
        ([{"name": "rust", "phrases": ["a", "a"]}], "bad_attributes"),
        ([{"name": "rust", "phrases": [str(i) for i in range(65)]}], "bad_attributes"),
        ([{"name": "color", "phrases": PHRASES}], "bad_attributes"),
        ([{"name": "r" * 65, "phrases": PHRASES}], "bad_attributes"),
        ([{"name": f"r{i}", "phrases": PHRASES} for i in range(17)], "bad_attributes"),
        ([{"name": "rust", "phrases": PHRASES, "weight": -1}], "bad_weights"),
        ([{"name": "rust", "phrases": PHRASES, "weight": 0}], "bad_weights"),
    ],
)
def test_bad_attributes_are_refused(value, code):
    with pytest.raises(QueryError) as caught:
        parse_attributes(value, KNOWN)
    assert caught.value.code == code
    assert caught.value.field == "attributes"


def test_build_query_projects_the_class_vector():
    request = parse_attributes([{"name": "rust", "phrases": PHRASES, "weight": 2.0}], KNOWN)
    basis = np.array([[1, 0, 0], [0, 1, 0]], dtype=np.float32)
    vectors = {"class": np.array([3, 4, 5], dtype=np.float32)}
    query = build_query(request, vectors, {"rust": basis}, filter="price < 1", top_k=3, exclude=("x",))
    assert query.invented[0].query.tolist() == [3, 4]
    assert (query.invented[0].weight, query.filter, query.top_k, query.exclude) == (
        2.0,
        "price < 1",
        3,
        ("x",),
    )
    query.check({"class": 3})


COLUMNS = {"class": 3, "color": 2}
ONE = np.ones(3, dtype=np.float32)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"top_k": 0}, "bad_top_k"),
        ({"top_k": 1001}, "bad_top_k"),
        ({"top_k": True}, "bad_top_k"),
        ({"top_k": 2.0}, "bad_top_k"),
        ({"weights": {"nope": 1.0}}, "unknown_attribute"),
        ({"weights": {"color": 1.0}}, "unknown_attribute"),
        ({"weights": {"class": -1.0}}, "bad_weights"),
        ({"weights": {"class": 0.0}}, "bad_weights"),
        ({"vectors": {"class": ONE[:2]}}, "bad_vector"),
        ({"vectors": {"class": 0 * ONE}}, "bad_vector"),
        ({"vectors": {"class": np.float32("nan") * ONE}}, "bad_vector"),
        ({"invented": (Invented(name="color", basis=ONE[None], query=ONE[:1]),)}, "bad_attributes"),
        ({"invented": (Invented(name="rust", basis=ONE, query=ONE[:1]),)}, "bad_vector"),
        ({"invented": (Invented(name="rust", basis=ONE[None], query=ONE),)}, "bad_vector"),
        ({"invented": (Invented(name="rust", basis=ONE[None], query=ONE[:1], weight=-1.0),)}, "bad_weights"),
    ],
)
def test_bad_queries_are_refused(options, code):
    with pytest.raises(QueryError) as caught:
        Query(**{"vectors": {"class": ONE}, **options}).check(COLUMNS)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("text", "sql"),
    [
        ("price < 10 AND color_name = 'red'", "((`m_price` < 10.0) AND (`m_color_name` = 'red'))"),
        ("price=-1e2", "(`m_price` = -100.0)"),
        ("price == .5 or price != 1.", "((`m_price` = 0.5) OR (`m_price` <> 1.0))"),
        ("not not price <> 1", "(`m_price` <> 1.0)"),
        ("NOT (price >= 1)", "(NOT (`m_price` >= 1.0))"),
        ("price < cost", "(`m_price` < `m_cost`)"),
        ('"in stock"', "`m_in stock`"),
        ("`in stock` = false", "(`m_in stock` = FALSE)"),
        ("größe in ('s', 'it''s; drop')", "(`m_größe` IN ('s', 'it''s; drop'))"),
        ("price not between 1 and 2 and price is not null", None),
        ("color_name like 'r%' and color_name not ilike '_b'", None),
        ("id = 'a'", "(`id` = 'a')"),
    ],
)
def test_filters_become_sql_of_ours(text, sql):
    compiled = compile_filter(text, KINDS).sql
    assert sql is None or compiled == sql


def test_a_metadata_key_named_id_comes_first():
    assert compile_filter("id = 3", {"id": "number"}).sql == "(`m_id` = 3.0)"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        None,
        7,
        "price <",
        "price",
        "price < 10 AND",
        "price < 'abc'",
        "color_name = 3",
        "color_name = price",
        "price like '1%'",
        "price between 1",
        "price in ()",
        "price in (select 1)",
        "price in (1",
        "(price < 1",
        "price < 1)",
        "price < 1 price < 2",
        "price not 1",
        "price = null",
        "price is 3",
        "price = 1e999",
        "price = 0x10",
        "nope = 1",
        'color_name = "red"',
        "v_class = 1",
        "m_price = 1",
        "1=1",
        "1=1; drop table pictures",
        "price < 1; drop table pictures",
        "price < 1 -- rest",
        "price < 1 /* rest */",
        "repeat('a', 1000000000) = 'a'",
        "color_name = repeat('a', 1000000000)",
        "color_name || 'a' = 'b'",
        "price::text = '1'",
        "case when price < 1 then true end",
        "color_name = 'unfinished",
        "color_name = 'a\0b'",
        "color_name = '\ud800'",
        "price < 1 OR " * 200 + "price < 1",
        "price=1 or " * 101 + "price=1",
        "(" * 9 + "price < 1" + ")" * 9,
        "(" * 1000,
    ],
)
def test_bad_filters_are_refused(text):
    with pytest.raises(QueryError) as caught:
        compile_filter(text, KINDS)
    assert caught.value.code == "bad_filter"
    assert caught.value.field == "filter"
    assert caught.value.message.startswith("filter: ")


def test_an_unknown_column_names_the_known_ones():
    with pytest.raises(
        QueryError, match=r"no column 'colour'; known are color_name, cost, größe, id, in stock"
    ):
        compile_filter("colour = 'red'", KINDS)


def test_many_nots_and_brackets_within_bounds_pass():
    assert compile_filter("not " * 400 + "price < 1", KINDS).sql == "(`m_price` < 1.0)"
    assert compile_filter("(" * 8 + "price < 1" + ")" * 8, KINDS).sql == "(`m_price` < 1.0)"
