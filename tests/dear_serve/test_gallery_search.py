"""Search in memory: what is read again, indexes and their recall, negatives, diversity, pages, many at once."""

from __future__ import annotations

import numpy as np
import pytest

from dear_serve.errors import QueryError
from dear_serve.gallery import Gallery, GallerySpec, Invented, Query
from dear_serve.gallery import coarse as coarse_module
from dear_serve.gallery import snapshot as snapshot_module
from dear_serve.gallery import store as store_module
from dear_serve.gallery.coarse import CoarseIndex
from dear_serve.gallery.diverse import diverse_order
from dear_serve.gallery.filters import compile_filter

SPEC = GallerySpec(bundle_sha256="b" * 64, base_sha256="a" * 64, columns={"class": 96, "color": 3})


def clustered(n, width, seed):
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).standard_normal((40, width))
    values = centers[rng.integers(0, 40, n)] + 0.7 * rng.standard_normal((n, width))
    return (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)


def vectors_of(n, seed=0):
    return {k: clustered(n, r, seed) for k, r in SPEC.columns.items()}


def add(gallery, ids, vectors=None, metadata=None):
    n = len(ids)
    gallery.add(ids, vectors or vectors_of(n), metadata or [{} for _ in ids], [b""] * n, ["h"] * n)


@pytest.fixture
def gallery(tmp_path):
    return Gallery.open(tmp_path / "gallery", create_for=SPEC)


def brute(vectors, query, allowed=None):
    scores = sum(w * (vectors[n] @ query.vectors[n]) for n, w in query.weights.items())
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    return np.argsort(-scores, kind="stable")


def test_only_what_changed_is_read(gallery, monkeypatch):
    read = []
    real = snapshot_module.Snapshot._read

    def counting(self, name, start, width):
        read.append((name, start, self.rows))
        return real(self, name, start, width)

    monkeypatch.setattr(snapshot_module.Snapshot, "_read", counting)
    vectors = vectors_of(300)
    ids = [f"{i:03}" for i in range(300)]
    add(gallery, ids[:200], {k: v[:200] for k, v in vectors.items()})
    query = Query(vectors={"class": vectors["class"][250]}, top_k=400)
    gallery.search(query)
    add(gallery, ids[200:], {k: v[200:] for k, v in vectors.items()})
    assert gallery.search(query)[0].id == "250"
    gallery.delete("250")
    gallery.add(["000"], {k: v[250:251] for k, v in vectors.items()}, [{}], [b""], ["h"])
    hits = gallery.search(query)
    assert hits[0].id == "000"
    assert sorted(h.id for h in hits) == [i for i in ids if i != "250"]
    assert read == [("class", 0, 200), ("class", 200, 300), ("class", 300, 301)]
    gallery.compact()
    assert [h.id for h in gallery.search(query)] == [h.id for h in hits]
    assert read[-1] == ("class", 0, 299)


def test_rows_that_died_do_not_pile_up(gallery):
    for _ in range(5):
        add(gallery, ["a", "b", "c"])
        gallery.search(Query(vectors={"color": np.ones(3, np.float32)}, weights={"color": 1.0}))
    assert len(gallery) == 3
    assert gallery._latest().rows <= 6


def test_an_index_finds_the_nearest_and_follows_changes(gallery, monkeypatch):
    monkeypatch.setattr(coarse_module, "_WORTH", 1)
    n = 12_000
    vectors, ids = vectors_of(n), [f"{i:05}" for i in range(n)]
    add(gallery, ids, vectors, [{"price": i} for i in range(n)])
    gallery.prepare()
    stats = gallery.stats().indexes
    assert set(stats) == {"class"}
    assert stats["class"].candidates <= n / 8
    looked_for = vectors_of(20, seed=5)
    for weights, low in (({"class": 1.0}, 0), ({"class": 0.5, "color": 1.0}, 0), ({"class": 1.0}, 6000)):
        found = 0
        for i in range(20):
            query = Query(
                vectors={k: v[i] for k, v in looked_for.items()},
                weights=weights,
                filter=f"price >= {low}" if low else None,
            )
            hits = gallery.search(query)
            expected = brute(vectors, query, np.arange(n) >= low)[:10]
            found += len({h.id for h in hits} & {ids[e] for e in expected})
            exact = {
                ids[e]: sum(w * float(vectors[k][e] @ query.vectors[k]) for k, w in weights.items())
                for e in expected
            }
            assert all(h.score == pytest.approx(exact[h.id], abs=1e-5) for h in hits if h.id in exact)
        assert found / 200 >= 0.95
    add(gallery, ["new"], {k: v[:1] for k, v in looked_for.items()})
    gallery.delete(ids[7])
    query = Query(vectors={k: v[0] for k, v in looked_for.items()}, top_k=1)
    assert gallery.search(query)[0].id == "new"
    query = Query(vectors={k: v[7] for k, v in vectors.items()}, top_k=1)
    assert gallery.search(query)[0].id != ids[7]
    gallery.compact()
    assert gallery.search(query)[0].id != ids[7]
    assert set(gallery.stats().indexes) == {"class"}


def test_an_index_is_built_in_the_background(gallery, monkeypatch):
    monkeypatch.setattr(coarse_module, "_WORTH", 1)
    add(gallery, [f"{i:05}" for i in range(3000)])
    query = Query(vectors={"class": vectors_of(1)["class"][0]})
    first = [h.id for h in gallery.search(query)]
    for thread in snapshot_module.threading.enumerate():
        if thread.name == "index class":
            thread.join()
    snapshot = gallery._latest()
    assert set(snapshot.indexes()) == {"class"}
    assert first == [h.id for h in gallery.search(query)]


def test_vectors_without_structure_get_no_index():
    values = np.random.default_rng(0).standard_normal((5000, 256)).astype(np.float32)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    assert not CoarseIndex(values).useful


def test_the_index_of_ids_changes_no_answer(gallery, monkeypatch):
    monkeypatch.setattr(store_module, "_INDEX_IDS", 20)
    ids = [f"{i:02}" for i in range(30)]
    add(gallery, ids)
    gallery.compact()
    assert [i.columns for i in gallery._table.list_indices()] == [["id"]]
    gallery.add(["05", "30"], vectors_of(2), [{"n": 1}, {"n": 2}], [b"new"] * 2, ["h"] * 2)
    gallery.delete("06")
    gallery.compact()
    gallery.add(["05"], vectors_of(1), [{"n": 3}], [b"newer"], ["h"])
    assert sorted(gallery.hashes()) == sorted({*ids, "30"} - {"06"})
    assert [(r.id, r.thumbnail) for r in gallery.get(["05", "07", "30"])] == [
        ("05", b"newer"),
        ("07", b""),
        ("30", b"new"),
    ]
    with pytest.raises(QueryError, match="06"):
        gallery.get(["06"])


def test_pages_are_one_list(gallery):
    add(gallery, [f"{i:02}" for i in range(50)])
    vectors = {"color": np.ones(3, np.float32)}
    whole = gallery.search(Query(vectors=vectors, weights={"color": 1.0}, top_k=50, exclude=("03",)))
    pages = [
        gallery.search(Query(vectors=vectors, weights={"color": 1.0}, top_k=20, offset=o, exclude=("03",)))
        for o in (0, 20, 40, 60)
    ]
    assert [h.id for page in pages for h in page] == [h.id for h in whole]
    assert len(whole) == 49


def test_negatives_push_away(gallery):
    eye = np.eye(96, dtype=np.float32)
    vectors = {
        "class": np.stack([eye[0] + eye[1], eye[0] + eye[2], eye[0]]),
        "color": np.ones((3, 3), np.float32),
    }
    add(gallery, ["near", "other", "plain"], vectors)
    basis = eye[:2]
    invented = (Invented(name="own", basis=basis, query=basis @ eye[0]),)
    query = Query(vectors={"class": eye[0]}, negatives=({"class": eye[1]},), negative_weight=0.5)
    scores = {h.id: h.score for h in gallery.search(query)}
    assert scores["plain"] == pytest.approx(1.0)
    assert scores["other"] == pytest.approx(0.5**0.5, abs=1e-6)
    assert scores["near"] == pytest.approx(0.5 * 0.5**0.5, abs=1e-6)
    query = Query(
        vectors={}, weights={}, invented=invented, negatives=({"class": eye[1]},), negative_weight=1.0
    )
    scores = {h.id: h.score for h in gallery.search(query)}
    assert scores["near"] == pytest.approx(0.0, abs=1e-6)
    assert scores["other"] == pytest.approx(1.0)


def test_a_diverse_answer_has_every_kind(gallery):
    base = np.eye(96, dtype=np.float32)
    rows = [base[0] * 2 + base[k] * (1 + 0.01 * i) for k in (1, 2, 3) for i in range(10)]
    vectors = {"class": np.stack(rows), "color": np.ones((30, 3), np.float32)}
    add(gallery, [f"{k}-{i}" for k in "abc" for i in range(10)], vectors)
    query = {"vectors": {"class": base[0] * 2 + base[1]}, "top_k": 3}
    assert {h.id[0] for h in gallery.search(Query(**query))} == {"a"}
    diverse = gallery.search(Query(**query, diversity=0.6))
    assert {h.id[0] for h in diverse} == set("abc")
    assert diverse[0].id == gallery.search(Query(**query))[0].id
    second = gallery.search(Query(vectors=query["vectors"], top_k=2, offset=1, diversity=0.6))
    assert [h.id for h in second] == [h.id for h in diverse[1:]]


def test_diversity_0_is_the_order_of_relevance():
    rng = np.random.default_rng(0)
    relevance = np.sort(rng.random(20))[::-1]
    vectors = rng.standard_normal((20, 4)).astype(np.float32)
    assert diverse_order(relevance, vectors, diversity=0, count=30).tolist() == list(range(20))


def test_many_searches_are_as_single_ones(gallery):
    add(gallery, [f"{i:02}" for i in range(50)])
    queries = [
        Query(vectors={"class": v}, top_k=k)
        for k, v in zip((1, 5, 60), vectors_of(3, 4)["class"], strict=True)
    ]
    assert gallery.search_many(queries) == [gallery.search(q) for q in queries]
    assert gallery.search_many([]) == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"offset": -1}, "bad_offset"),
        ({"offset": 10_001}, "bad_offset"),
        ({"offset": True}, "bad_offset"),
        ({"offset": 995, "diversity": 0.5}, "bad_offset"),
        ({"diversity": 1.5}, "bad_diversity"),
        ({"diversity": float("nan")}, "bad_diversity"),
        ({"negative_weight": -1}, "bad_negative_weight"),
        ({"negatives": ({},)}, "bad_negative"),
        ({"negatives": ({"class": np.ones(96, np.float32)},) * 17}, "bad_negative"),
        ({"negatives": ({"class": np.zeros(96, np.float32)},)}, "bad_vector"),
    ],
)
def test_bad_queries_are_refused(gallery, change, code):
    with pytest.raises(QueryError) as caught:
        gallery.search(Query(vectors={"class": np.ones(96, np.float32)}, **change))
    assert caught.value.code == code


FILTERS = [
    "price < 3", "price <> 2 or name = 'b'", "not (price >= 2 and new)", "new", "not new", "name is null",
    "price is not null and price not in (1, 2)", "name not in ('a')", "price between 1 and 2", "price = cost",
    "price not between 1 and 2", "id > 'r5' and id <> 'r8'", "new = false or name > 'a'", "cost is null",
]  # fmt: skip


@pytest.mark.parametrize("text", FILTERS)
def test_filters_in_memory_are_as_lancedb_runs_them(gallery, text):
    rng = np.random.default_rng(1)
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    rows = [
        {
            "price": pick(None, 1, 2, 3),
            "cost": pick(None, 1, 2),
            "name": pick(None, "a", "b"),
            "new": pick(None, True, False),
        }
        for _ in range(40)
    ]
    ids = [f"r{i}" for i in range(40)]
    add(gallery, ids[:30], metadata=rows[:30])
    gallery.delete("r3")
    snapshot = gallery._latest()
    snapshot.allowed(text)
    add(gallery, ids[30:], metadata=rows[30:])
    snapshot = gallery._latest()
    compiled = compile_filter(text, snapshot.kinds)
    assert compiled.run is not None
    np.testing.assert_array_equal(snapshot.allowed(text), snapshot._select(compiled.sql))
