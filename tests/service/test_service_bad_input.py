"""Bad input over HTTP: each a 4xx in the error contract (checked by the client of conftest), none a 500."""

from __future__ import annotations

import base64
import json
import struct
import zlib

import pytest


def png_header(width: int, height: int) -> bytes:
    """A PNG that announces its size, with next to no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 10)) + chunk(b"IEND", b"")


PICTURES = {
    "not_an_image": b"hello, this is text",
    "empty_image": b"",
    "too_many_pixels": png_header(30_000, 30_000),
    "extreme_aspect_ratio": png_header(1, 20_000),
}


@pytest.mark.parametrize("route", ["/classify", "/embed/image", "/search", "/gallery/add"])
@pytest.mark.parametrize("code", PICTURES)
def test_a_bad_picture_alone(search_client, route, code):
    fields = {"ids": '["a"]'} if route == "/gallery/add" else {}
    files = [("images", ("x", PICTURES[code]))]
    answer = search_client.post(route, files=files, data=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["field"] == "images[0]"


def test_truncated_jpeg(client, picture):
    data = picture("red", "JPEG", (200, 200))
    answer = client.post("/classify", files=[("images", ("x.jpg", data[: len(data) // 2]))])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "truncated_image")


def image() -> str:
    return base64.b64encode(PICTURES["too_many_pixels"]).decode()


CLASSIFY = [
    ({"labels": ["cat", ""]}, "empty_label"),
    ({"labels": ["cat", "  "]}, "empty_label"),
    ({"labels": []}, "no_labels"),
    ({"labels": ["cat", "dog", "cat"]}, "duplicate_label"),
    ({"labels": [f"l{i}" for i in range(1001)]}, "too_many_labels"),
    ({"labels": "cat"}, "bad_field"),
    ({"labels": [1]}, "bad_field"),
    ({"labels": [None]}, "bad_field"),
    ({"labels": {"cat": 1}}, "bad_field"),
    ({"labels": ["x" * 10_001]}, "text_too_long"),
    ({"templates": ["no place"], "labels": ["a"]}, "bad_template"),
    ({"templates": [], "labels": ["a"]}, "bad_template"),
    ({"templates": ["{}"] * 101}, "too_many_templates"),
    (
        {"labels": [f"l{i}" for i in range(200)], "templates": [f"{i} {{}}" for i in range(51)]},
        "too_many_prompts",
    ),
    ({"mode": "magic"}, "unknown_mode"),
    ({"mode": 3}, "unknown_mode"),
    ({"mode": None}, "unknown_mode"),
    ({"top_k": 0}, "bad_field"),
    ({"top_k": -3}, "bad_field"),
    ({"top_k": 1.5}, "bad_field"),
    ({"top_k": "5"}, "bad_field"),
    ({"top_k": True}, "bad_field"),
    ({"top_k": 10**40}, "bad_field"),
    ({"model": "another"}, "unknown_model"),
    ({"model": 1}, "bad_field"),
    ({"labls": ["cat"]}, "unknown_field"),
    ({"__class__": 1}, "unknown_field"),
    ({"images": []}, "missing_field"),
    ({"images": None}, "missing_field"),
    ({"images": "AAAA"}, "bad_field"),
    ({"images": [1]}, "bad_field"),
    ({"images": ["%%%"]}, "bad_base64"),
    ({"images": ["data:image/png,plain"]}, "bad_base64"),
    ({"images": ["data:;base64,@@"]}, "bad_base64"),
    ({"images": ["http://localhost/a.png"]}, "url_refused"),
    ({"images": ["file:///etc/passwd"]}, "url_refused"),
    ({"images": [""]}, "empty_image"),
    ({"images": ["é"]}, "bad_base64"),
    ({"images": ["AAAA"] * 65}, "too_many_images"),
]


@pytest.mark.parametrize(("fields", "code"), CLASSIFY, ids=range(len(CLASSIFY)))
def test_classify(client, picture, fields, code):
    answer = client.post("/classify", json={"images": [base64.b64encode(picture()).decode()], **fields})
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"", "bad_json"),
        (b"{", "bad_json"),
        (b"[]", "bad_json"),
        (b"null", "bad_json"),
        (b"\xff\xfe", "bad_json"),
        (b'{"texts": ["\\ud800"]}', "bad_json"),
        (b"[" * 100_000, "bad_json"),
        (b'{"texts":' + b"[" * 5000 + b"]" * 5000 + b"}", "bad_json"),
        (b'{"texts": NaN}', "bad_json"),
        (b'{"texts": Infinity}', "bad_json"),
        (b'{"texts": ' + b"9" * 5000 + b"}", "bad_json"),
        (b'{"texts": ["a"], "texts2": ["b"]}', "unknown_field"),
        (b'{"texts": []}', "missing_field"),
        (b"{}", "missing_field"),
        (b'{"texts": [""]}', "empty_text"),
        (b'{"texts": ["\\u0000"]}', None),
        (b'{"texts": [" \\n\\t"]}', "empty_text"),
        (json.dumps({"texts": ["a"] * 257}).encode(), "too_many_texts"),
    ],
)
def test_json(client, text, code):
    answer = client.post("/embed/text", content=text, headers={"content-type": "application/json"})
    if code is None:  # a control character: either is fine, a 500 is not
        assert answer.status_code in (200, 400)
    else:
        assert answer.status_code in (400, 422)
        assert answer.json()["error"]["code"] == code


@pytest.mark.parametrize(
    "text", ["a\0b", "\u202e abc", "<|startoftext|>", "%s %d {0}", "../../x", "' OR 1=1 --"]
)
def test_text_is_text(client, text):
    assert client.post("/embed/text", json={"texts": [text]}).status_code == 200


@pytest.mark.parametrize(
    ("kind", "content", "status", "code"),
    [
        ("text/plain", b"x", 415, "unsupported_media_type"),
        ("application/x-www-form-urlencoded", b"a=1", 415, "unsupported_media_type"),
        ("", b"x", 415, "unsupported_media_type"),
        ("multipart/form-data", b"x", 400, "bad_form"),
        ("multipart/form-data; boundary=b", b"x", 400, "bad_form"),
        ("multipart/form-data; boundary=b", b"--b\r\nX: y\r\n\r\nz\r\n--b--", 400, "bad_form"),
        ("multipart/form-data; boundary=", b"--\r\n\r\n", 400, "bad_form"),
        ("multipart/form-data; boundary=b; charset=nope", b"--b--\r\n", 422, "missing_field"),
    ],
)
def test_content_types(client, kind, content, status, code):
    answer = client.post("/classify", content=content, headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"labels": "cat, dog"}, "bad_json"),
        ({"labels": '["cat"'}, "bad_json"),
        ({"labels": '"cat"'}, "bad_field"),
        ({"top_k": "many"}, "bad_json"),
        ({"top_k": "NaN"}, "bad_json"),
        ({"mode": '"adapted"'}, "unknown_mode"),
        ({"nothing": "1"}, "unknown_field"),
        ({"labels": ['["a"]', '["b"]']}, "bad_field"),
        ({"images": "AAAA"}, "bad_field"),
    ],
)
def test_form_fields(client, picture, fields, code):
    answer = client.post("/classify", files=[("images", ("x", picture()))], data=fields)
    assert answer.json()["error"]["code"] == code


def test_form_files(client, picture, make_client):
    answer = client.post("/classify", files=[("picture", ("x", picture()))])
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "unknown_field")
    answer = make_client(images=2).post("/classify", files=[("images", ("x", picture()))] * 3)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "too_many_images")
    many = {f"f{i}": "1" for i in range(40)}
    assert client.post("/classify", files=[("images", ("x", picture()))], data=many).status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/model/", 404, "not_found"),
        ("POST", "/model", 405, "method_not_allowed"),
        ("GET", "/classify", 405, "method_not_allowed"),
        ("PUT", "/gallery/a", 405, "method_not_allowed"),
        ("DELETE", "/gallery/a", 404, "no_gallery"),
        ("GET", "/gallery/stats", 404, "no_gallery"),
    ],
)
def test_paths(client, method, path, status, code):
    answer = client.ask(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_without_a_gallery(client, picture):
    for path in ("/search", "/gallery/add"):
        answer = client.post(path, json={"images": ["AAAA"], **({"ids": ["a"]} if "add" in path else {})})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_gallery")
