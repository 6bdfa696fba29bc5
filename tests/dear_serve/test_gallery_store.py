"""The gallery on disk: exact scores, upserts, filters, several processes, kills."""

from __future__ import annotations

import lancedb
import numpy as np
import pyarrow as pa
import pytest

from dear_serve.errors import GalleryError, InputError, QueryError
from dear_serve.gallery import Gallery, GallerySpec, Invented, Query

SPEC = GallerySpec(bundle_sha256="b" * 64, base_sha256="a" * 64, columns={"class": 8, "color": 3})


def random_vectors(n, seed=0, spec=SPEC):
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal((n, r)).astype(np.float32) for k, r in spec.columns.items()}


def fill(gallery, ids, *, vectors=None, metadata=None, seed=0):
    n = len(ids)
    gallery.add(
        ids,
        vectors or random_vectors(n, seed),
        metadata or [{} for _ in ids],
        [b"jpeg"] * n,
        [f"hash-{i}" for i in ids],
    )


@pytest.fixture
def gallery(tmp_path):
    return Gallery.open(tmp_path / "gallery", create_for=SPEC)


def cosines(rows, query):
    rows, query = rows.astype(np.float64), query.astype(np.float64)
    return rows @ query / np.linalg.norm(rows, axis=1) / np.linalg.norm(query)


def test_scores_equal_brute_force(gallery):
    n = 500
    vectors = random_vectors(n)
    ids = [f"p{i:03}" for i in range(n)]
    fill(gallery, ids, vectors=vectors)
    query = {k: v[0] for k, v in random_vectors(1, seed=1).items()}
    basis = np.random.default_rng(2).standard_normal((2, 8)).astype(np.float32)
    invented = Invented(name="rust", basis=basis, query=basis @ query["class"], weight=0.7)
    hits = gallery.search(
        Query(vectors=query, weights={"class": 0.5, "color": 2.0}, invented=(invented,), top_k=20)
    )
    parts = {k: cosines(vectors[k], query[k]) for k in SPEC.columns}
    parts["rust"] = cosines(vectors["class"] @ basis.T, invented.query)
    expected = 0.5 * parts["class"] + 2.0 * parts["color"] + 0.7 * parts["rust"]
    best = np.argsort(-expected)[:20]
    assert [h.id for h in hits] == [ids[i] for i in best]
    for hit, i in zip(hits, best, strict=True):
        assert hit.score == pytest.approx(expected[i], abs=1e-5)
        assert hit.scores == pytest.approx({k: v[i] for k, v in parts.items()}, abs=1e-5)
        assert hit.score == pytest.approx(
            0.5 * hit.scores["class"] + 2 * hit.scores["color"] + 0.7 * hit.scores["rust"]
        )
        assert hit.thumbnail == b"jpeg"


def test_ties_come_in_the_order_of_ids_and_top_k_only_cuts(gallery):
    one = {k: v[:1] for k, v in random_vectors(1).items()}
    ids = [f"p{i:03}" for i in np.random.default_rng(3).permutation(200)]
    fill(gallery, ids[:150], vectors={k: np.repeat(v, 150, axis=0) for k, v in one.items()})
    fill(gallery, ids[150:], vectors={k: np.repeat(v, 50, axis=0) for k, v in one.items()})
    fill(gallery, ["best"], vectors={"class": one["class"], "color": -one["color"]})
    query = {"class": one["class"][0] + 1, "color": -one["color"][0]}
    for top_k in (1, 7, 201, 1000):
        hits = gallery.search(Query(vectors=query, weights={"class": 1.0, "color": 1.0}, top_k=top_k))
        assert [h.id for h in hits] == ["best", *sorted(ids)][:top_k]
    assert len({h.score for h in hits}) == 2


def test_weight_zero_needs_no_vector(gallery):
    fill(gallery, ["a"])
    hits = gallery.search(
        Query(vectors={"color": np.ones(3, np.float32)}, weights={"class": 0.0, "color": 1.0})
    )
    assert list(hits[0].scores) == ["color"]


def test_a_picture_without_the_invented_attribute_scores_zero(gallery):
    vectors = {"class": np.eye(8, dtype=np.float32)[:2], "color": np.ones((2, 3), np.float32)}
    fill(gallery, ["a", "b"], vectors=vectors)
    basis = np.eye(8, dtype=np.float32)[1:2]
    rust = Invented(name="rust", basis=basis, query=np.ones(1, np.float32))
    hits = gallery.search(Query(vectors={}, weights={}, invented=(rust,)))
    assert [(h.id, h.score) for h in hits] == [("b", 1.0), ("a", 0.0)]


def test_an_empty_gallery_answers(gallery):
    query = Query(vectors={"class": np.ones(8, np.float32)})
    assert gallery.search(query) == []
    assert gallery.stats().pictures == len(gallery) == 0
    fill(gallery, [], vectors=random_vectors(0))
    assert gallery.hashes() == {}
    assert gallery.get([]) == []


def test_upsert_replaces_the_whole_row(gallery):
    fill(gallery, ["a", "b"], metadata=[{"price": 1, "name": "x"}, {"price": 2}])
    new = random_vectors(1, seed=9)
    gallery.add(["a"], new, [{"price": 2.5}], [b"new"], ["h2"])
    assert len(gallery) == 2
    record = gallery.get(["a"])[0]
    assert (record.metadata, record.thumbnail, record.hash) == ({"price": 2.5}, b"new", "h2")
    stored = gallery.vectors(["b", "a"])
    unit = new["class"][0] / np.linalg.norm(new["class"][0])
    np.testing.assert_allclose(stored["class"][1], unit, atol=1e-7)
    assert stored["color"].shape == (2, 3)
    query = Query(vectors={"class": new["class"][0]}, filter="name IS NULL", top_k=5)
    assert [h.id for h in gallery.search(query)] == ["a", "b"]


AWKWARD = ["a' OR '1'='1", "'; drop table pictures", 'x"y`z\\', "é/日本.png", "a\nb", "%", "--"]


def test_an_id_is_data(gallery):
    fill(gallery, ["plain", *AWKWARD])
    for i in AWKWARD:
        assert gallery.get([i])[0].id == i
    for left, i in zip(range(len(AWKWARD), 0, -1), AWKWARD, strict=True):
        gallery.delete(i)
        assert len(gallery) == left
    assert [r.id for r in gallery.get(["plain"])] == ["plain"]


@pytest.mark.parametrize("unknown", ["nope", "a' OR '1'='1", "", 3])
def test_unknown_ids_are_named(gallery, unknown):
    fill(gallery, ["a"])
    for call in (gallery.delete, lambda i: gallery.get(["a", i]), lambda i: gallery.vectors([i])):
        with pytest.raises(QueryError) as caught:
            call(unknown)
        assert caught.value.code == "unknown_id"
    assert len(gallery) == 1


def test_exclusions_leave_the_picture_searched_by_out(gallery):
    fill(gallery, ["a", "b", "c"])
    vectors = {k: v[0] for k, v in gallery.vectors(["b"]).items()}
    assert gallery.search(Query(vectors=vectors))[0].id == "b"
    assert {h.id for h in gallery.search(Query(vectors=vectors, exclude=("b", "unknown")))} == {"a", "c"}


ROWS = [
    {"price": 5, "color_name": "red", "in stock": True, "größe": "it's"},
    {"price": 9.5, "color_name": "blue", "in stock": False, "größe": "x\\y"},
    {"price": 20, "color_name": "red", "in stock": None, "id": 7},
    {"price": None, "color_name": "%;--"},
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("price < 10 AND color_name = 'red'", "a"),
        ("price < 10 OR price >= 20", "abc"),
        ("NOT price < 10", "c"),
        ("price IS NULL", "d"),
        ("price IN (5, 20.0)", "ac"),
        ("price NOT IN (5, 20)", "b"),
        ("price BETWEEN 6 AND 1e1", "b"),
        ("price = 1e300", ""),
        ("price > -1.5e-7", "abc"),
        ("color_name LIKE 'r_d'", "ac"),
        ("color_name NOT LIKE '%e%'", "d"),
        ("color_name ILIKE 'RED'", "ac"),
        ("color_name LIKE '%\\'", ""),
        ("color_name = '%;--'", "d"),
        ("color_name = ''' OR 1=1 --'", ""),
        ('"in stock"', "a"),
        ("`in stock` = false", "b"),
        ("größe = 'it''s'", "a"),
        ("größe = 'x\\y'", "b"),
        ("id = 7", "c"),
    ],
)
def test_filters_choose_rows(gallery, text, expected):
    fill(gallery, list("abcd"), metadata=ROWS)
    hits = gallery.search(Query(vectors={"class": np.ones(8, np.float32)}, filter=text, top_k=10))
    assert sorted(h.id for h in hits) == list(expected)


@pytest.mark.parametrize(
    "text", ["price <", "1=1; drop table pictures", "v_class IS NULL", "`thumbnail` IS NULL"]
)
def test_bad_filters_leave_the_gallery_alone(gallery, text, tmp_path):
    fill(gallery, list("abcd"), metadata=ROWS)
    with pytest.raises(QueryError) as caught:
        gallery.search(Query(vectors={"class": np.ones(8, np.float32)}, filter=text))
    assert caught.value.code == "bad_filter"
    assert str(tmp_path) not in caught.value.message
    assert len(gallery) == 4


def test_the_longest_filters_run(gallery):
    fill(gallery, list("abcd"), metadata=ROWS)
    for text, expected in (
        (" or ".join(["price=5"] * 100), ["a"]),
        ("(not " * 8 + "price=5" + ")" * 8, ["a"]),
        ("(price=1 and not (price=2 or " * 4 + "price=3" + "))" * 4, []),
        ("price in (" + ",".join("20" for _ in range(600)) + ")", ["c"]),
        ("color_name like '" + "%r" * 900 + "'", []),
    ):
        hits = gallery.search(Query(vectors={"class": np.ones(8, np.float32)}, filter=text))
        assert [hit.id for hit in hits] == expected


@pytest.mark.parametrize(
    "row",
    [
        "text",
        {"a.b": 1},
        {"": 1},
        {1: 1},
        {"a`b": 1},
        {"_x": 1},
        {"k" * 65: 1},
        {"k": [1]},
        {"k": {"a": 1}},
        {"k": float("nan")},
        {"k": float("inf")},
        {"k": 2**53 + 1},
        {"k": b"bytes"},
        {"k": "x" * 4097},
        {"k": "\0"},
        {"k": "\ud800"},
        {"price": "text"},
        {"price": True},
        {f"k{i}": 1 for i in range(65)},
        {f"k{i}": 1 for i in range(64)},
    ],
)
def test_bad_metadata_is_refused_and_nothing_added(gallery, row):
    fill(gallery, ["a"], metadata=[{"price": 1}])
    with pytest.raises(InputError) as caught:
        fill(gallery, ["b", "c"], metadata=[{}, row])
    assert caught.value.code == "bad_metadata"
    assert len(gallery) == 1


def test_metadata_keys_named_like_our_columns_are_kept_apart(gallery):
    row = {"id": "x", "v_class": 1, "hash": True, "metadata": "m", "Price": 1, "price": 2, "thumbnail": None}
    fill(gallery, ["a"], metadata=[row])
    assert gallery.get(["a"])[0].metadata == row
    hits = gallery.search(
        Query(vectors={"class": np.ones(8, np.float32)}, filter="v_class = 1 AND hash AND Price = 1")
    )
    assert [h.id for h in hits] == ["a"]


@pytest.mark.parametrize("ids", [["a", "a"], [""], ["x" * 513], [3], ["\0"], ["\ud800"]])
def test_bad_ids_are_refused(gallery, ids):
    with pytest.raises(InputError) as caught:
        fill(gallery, ids)
    assert caught.value.code == "bad_ids"


def test_lists_of_other_lengths_are_refused(gallery):
    with pytest.raises(InputError, match=r"lengths \[1, 2\]"):
        gallery.add(["a"], random_vectors(1), [{}], [b""], ["h", "h"])


@pytest.mark.parametrize(
    "change",
    [
        {"class": np.zeros((1, 8), np.float32)},
        {"class": np.full((1, 8), np.nan, np.float32)},
        {"class": np.ones((1, 7), np.float32)},
        {"class": np.ones((2, 8), np.float32)},
        {"shape": np.ones((1, 8), np.float32)},
    ],
)
def test_bad_vectors_are_refused(gallery, change):
    with pytest.raises(InputError) as caught:
        fill(gallery, ["a"], vectors={**random_vectors(1), **change})
    assert caught.value.code == "bad_vector"


def test_another_bundle_is_refused_with_both_hashes(tmp_path, gallery):
    for change, name in (({"bundle_sha256": "c" * 64}, "bundle"), ({"base_sha256": "d" * 64}, "base model")):
        other = GallerySpec(**{**SPEC.__dict__, **change})
        with pytest.raises(GalleryError) as caught:
            Gallery.open(tmp_path / "gallery", create_for=other)
        assert caught.value.code == "other_bundle"
        assert f"made with {name}" in caught.value.message
        assert all(v in caught.value.message for v in (*change.values(), "dear-serve index"))
    other = GallerySpec(**{**SPEC.__dict__, "columns": {"class": 8}})
    with pytest.raises(GalleryError, match="set of vectors"):
        Gallery.open(tmp_path / "gallery", create_for=other)


def test_what_is_not_a_gallery_is_refused(tmp_path):
    with pytest.raises(GalleryError) as caught:
        Gallery.open(tmp_path / "none")
    assert caught.value.code == "no_gallery"
    assert not (tmp_path / "none").exists()
    foreign = lancedb.connect(tmp_path / "foreign")
    foreign.create_table("pictures", data=pa.table({"id": ["a"]}))
    with pytest.raises(GalleryError, match="not a gallery"):
        Gallery.open(tmp_path / "foreign")
    (tmp_path / "broken" / "pictures.lance").mkdir(parents=True)
    with pytest.raises(GalleryError, match="cannot be opened") as caught:
        Gallery.open(tmp_path / "broken")
    assert str(tmp_path) not in caught.value.message
    newer = GallerySpec(**{**SPEC.__dict__, "format_version": 99})
    with pytest.raises(GalleryError, match="format 99"):
        Gallery.open(tmp_path / "newer", create_for=newer)


def test_a_creation_cut_short_is_done_again(tmp_path):
    (tmp_path / "gallery" / "pictures.lance" / "data").mkdir(parents=True)
    assert len(Gallery.open(tmp_path / "gallery", create_for=SPEC)) == 0


@pytest.mark.parametrize("columns", [{"color": 3}, {"class": 0}, {"class": 8, "a.b": 1}, {"class": 8, "": 1}])
def test_bad_specifications_are_refused(columns):
    with pytest.raises(GalleryError):
        GallerySpec(bundle_sha256="b", base_sha256="a", columns=columns)


def test_stats_say_what_is_there(gallery):
    fill(gallery, ["a"], metadata=[{"price": 1, "name": "x", "new": True, "absent": None}])
    gallery.search(Query(vectors={"color": np.ones(3, np.float32)}, weights={"color": 1.0}))
    stats = gallery.stats()
    assert stats.pictures == 1
    assert stats.metadata == {"price": "number", "name": "text", "new": "truth"}
    assert stats.columns == {"class": 8, "color": 3}
    assert (stats.bundle_sha256, stats.base_sha256) == ("b" * 64, "a" * 64)
    assert stats.bytes_in_memory >= 3 * 4


def test_compaction_changes_no_answer(gallery):
    for i in range(5):
        fill(gallery, [f"p{i}"], seed=i)
    gallery.delete("p3")
    query = Query(vectors={"class": np.ones(8, np.float32)})
    before = gallery.search(query)
    gallery.compact()
    assert gallery.search(query) == before
