"""Requests that nobody should send, for `fuzz_service`: harmed pictures and forms, JSON made from the description."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import quote

from PIL import Image, features

TEXTS = (
    "", " ", "a", "a rose", "rose\x00", "\u202e", "\ud83d", "🌹" * 50, "{}", "{0.__class__}", "%s%n", "<|endoftext|>",
    "../../etc/passwd", "http://localhost/x.png", "file:///etc/passwd", "'; DROP TABLE pictures; --", "1e999", "NaN",
    "price < 10", "price <<< 1", "price = (SELECT 1)", "x" * 20_000, "data:image/png;base64,AAAA", "null", "[]",
)  # fmt: skip
NUMBERS = (0, 1, -1, 5, 64, 1001, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, 5e-324)
TYPES = (
    "application/json",
    "multipart/form-data",
    "text/plain",
    "",
    "image/png",
    "application/json; charset=utf-16",
)


@dataclass(frozen=True)
class Attempt:
    """One request, and what kind of harm it does."""

    kind: str
    method: str
    path: str
    content: bytes = field(default=b"", repr=False)
    type: str = "application/json"


@cache
def encoded_pictures() -> list[bytes]:
    """A small picture in every format and mode that people have."""
    noise = random.Random(0)
    base = Image.frombytes("RGB", (96, 64), noise.randbytes(96 * 64 * 3))
    plans: list[tuple[Image.Image, str, dict[str, Any]]] = [
        (base, "JPEG", {}), (base, "JPEG", {"progressive": True}), (base.convert("CMYK"), "JPEG", {}),
        (base, "PNG", {}), (base.convert("RGBA"), "PNG", {}), (base.convert("P"), "PNG", {}),
        (base.convert("I;16"), "PNG", {}), (base.convert("1"), "PNG", {}), (base, "BMP", {}),
        (base.convert("P"), "GIF", {"save_all": True, "append_images": [base.convert("P")]}),
        (base, "TIFF", {}), (base, "TIFF", {"compression": "tiff_lzw"}), (base, "TIFF", {"compression": "jpeg"}),
        (base, "ICO", {}), (base, "PPM", {}), (base, "TGA", {}), (base, "JPEG2000", {}),
    ]  # fmt: skip
    plans += [(base, kind.upper(), {}) for kind in ("webp", "avif") if features.check(kind)]
    found = []
    for picture, kind, options in plans:
        stream = io.BytesIO()
        picture.save(stream, kind, **options)
        found.append(stream.getvalue())
    return found


def mutated(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """`data` after one to three kinds of harm; one in twenty as it was."""
    if rng.random() < 0.05:
        return data
    for _ in range(rng.randint(1, 3)):
        data = rng.choice(_HARMS)(rng, data, rng.choice(others))
    return data


def _flip(rng: random.Random, data: bytes, _: bytes) -> bytes:
    # Headers matter most: half of the flips are in the first hundred bytes.
    out = bytearray(data)
    for _step in range(rng.choice((1, 2, 8, 64)) if out else 0):
        reach = min(100, len(out)) if rng.random() < 0.5 else len(out)
        out[rng.randrange(reach)] = rng.randrange(256)
    return bytes(out)


def _cut(rng: random.Random, data: bytes, _: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def _remove(rng: random.Random, data: bytes, _: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.randrange(1, 64) :]


def _stretch(rng: random.Random, data: bytes, _: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start : start + 200] * rng.randrange(2, 40) + data[start:]


def _number(rng: random.Random, data: bytes, _: bytes) -> bytes:
    """A length or a size in the header that cannot be."""
    if len(data) < 40:
        return data
    start = rng.randrange(4, 36)
    return data[:start] + rng.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4))) + data[start + 4 :]


_HARMS: tuple[Callable[[random.Random, bytes, bytes], bytes], ...] = (
    _flip, _flip, _cut, _splice, _remove, _stretch, _number,
)  # fmt: skip


def picture_attempt(rng: random.Random, pictures: list[bytes]) -> Attempt:
    """One to three harmed pictures, as a form or in JSON."""
    path = rng.choice(("classify", "classify", "embed/image", "search", "gallery/add"))
    sent = [mutated(rng, rng.choice(pictures), pictures) for _ in range(rng.choice((1, 1, 2, 3)))]
    fields: dict[str, Any] = {}
    if path == "gallery/add":
        fields["ids"] = [f"fuzz-{rng.randrange(50)}-{i}" for i in range(len(sent))]
    if path == "classify" and rng.random() < 0.3:
        fields |= {"labels": ["a rose", "a tulip"], "heatmaps": rng.random() < 0.3}
    if rng.random() < 0.3:
        images = [base64.b64encode(p).decode() for p in sent]
        if rng.random() < 0.3:
            images[0] = _cut(rng, images[0].encode(), b"").decode() + rng.choice(TEXTS)
        return Attempt("picture in JSON", "POST", path, _json({**fields, "images": images}))
    return _form(rng, "picture in a form", path, fields, sent)


def form_attempt(rng: random.Random, pictures: list[bytes]) -> Attempt:
    """A form that is broken itself: its bytes, its fields, or what it says it is."""
    fields = {rng.choice(("labels", "mode", "top_k", "attributes", "ids", "filter", "x")): rng.choice(TEXTS)}
    whole = _form(
        rng, "form", rng.choice(("classify", "search", "gallery/add")), fields, [rng.choice(pictures)]
    )
    content = mutated(rng, whole.content, pictures)
    return Attempt("form", "POST", whole.path, content, rng.choice((whole.type, whole.type, *TYPES)))


def json_attempt(rng: random.Random, description: dict[str, Any]) -> Attempt:
    """A request as the description has it, with values of the right type, the wrong one, or bytes harmed."""
    paths = [
        (path, method, operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
        if path not in ("/metrics", "/admin/reload")
    ]
    path, method, operation = rng.choice(paths)
    path = path.replace("{id}", quote(_text(rng).encode("utf-8", "surrogatepass"), safe=""))[1:]
    if "requestBody" not in operation:
        query = (
            f"?model={rng.choice(('', 'x', '%00', '%F0%9F%8C%B9', 'a' * 5000))}" if rng.random() < 0.3 else ""
        )
        return Attempt("path", method.upper(), path + query)
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    content = _json(_value(rng, schema, description, 0))
    if rng.random() < 0.3:
        content = mutated(rng, content, [content])
    return Attempt("JSON", "POST", path, content, rng.choice(("application/json",) * 40 + TYPES))


def _text(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return rng.choice(TEXTS)
    return "".join(
        chr(rng.choice((rng.randrange(128), rng.randrange(0x10000)))) for _ in range(rng.randrange(20))
    )


def _value(rng: random.Random, schema: dict[str, Any], description: dict[str, Any], depth: int) -> Any:
    """Something that fits the schema, mostly."""
    if "$ref" in schema:
        schema = description["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    if rng.random() < 0.04 or depth > 4:
        return rng.choice((None, True, _text(rng), rng.choice(NUMBERS), [], {}, [[[]]], {"a": {"b": [1]}}))
    if "anyOf" in schema:
        return _value(rng, rng.choice(schema["anyOf"]), description, depth)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        chosen = {
            name: _known(rng, name) or _value(rng, part, description, depth + 1)
            for name, part in schema["properties"].items()
            if name in schema.get("required", ()) or rng.random() < 0.3
        }
        return chosen | ({_text(rng): 1} if rng.random() < 0.05 else {})
    if kind == "object":
        return {rng.choice(("class", "color", "shape", "name", "phrases", "weight", _text(rng))): rng.choice(
            (rng.choice(NUMBERS), _text(rng), [_text(rng), _text(rng)])) for _ in range(rng.randrange(4))}  # fmt: skip
    if kind == "array":
        part = schema.get("items", {})
        return [_value(rng, part, description, depth + 1) for _ in range(rng.choice((0, 1, 2, 3, 70)))]
    plain = {"string": lambda: _text(rng), "boolean": lambda: rng.random() < 0.5, "null": lambda: None}
    return plain.get(str(kind), lambda: rng.choice(NUMBERS))()


def _known(rng: random.Random, name: str) -> Any:
    """What gets past the first checks, half of the time; "" otherwise."""
    if rng.random() < 0.5:
        return ""
    if name == "images":
        return [base64.b64encode(rng.choice(encoded_pictures())).decode()]
    return {"texts": ["a rose"], "labels": ["a", "b"], "ids": ["fuzz-1-0"], "attributes": {"color": 1}}.get(
        name, ""
    )


def _json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _form(rng: random.Random, kind: str, path: str, fields: dict[str, Any], pictures: list[bytes]) -> Attempt:
    texts = {name: v if isinstance(v, str) else json.dumps(v) for name, v in fields.items()}
    parts = [
        f'Content-Disposition: form-data; name="{name}"\r\n\r\n'.encode()
        + text.encode("utf-8", "surrogatepass")
        for name, text in texts.items()
    ]
    name = rng.choice(("a.png", "../../x.py", 'é"x', "", "a" * 3000))
    parts += [
        f'Content-Disposition: form-data; name="images"; filename="{name}"\r\n\r\n'.encode() + p
        for p in pictures
    ]
    body = b"".join(b"--edge\r\n" + part + b"\r\n" for part in parts) + b"--edge--\r\n"
    return Attempt(kind, "POST", path, body, "multipart/form-data; boundary=edge")


def attempts(count: int, seed: int, description: dict[str, Any]) -> Iterator[Attempt]:
    """Requests of our own making: six tenths harmed pictures, a tenth broken forms, the rest JSON and paths."""
    rng, pictures = random.Random(seed), encoded_pictures()
    for _ in range(count):
        drawn = rng.random()
        if drawn < 0.6:
            yield picture_attempt(rng, pictures)
        elif drawn < 0.7:
            yield form_attempt(rng, pictures)
        else:
            yield json_attempt(rng, description)


def schemathesis_attempts(count: int, description: dict[str, Any], address: str) -> list[Attempt]:
    """What schemathesis makes of the description, valid and not; derandomized."""
    import hypothesis
    import requests
    import schemathesis
    from schemathesis import GenerationMode

    operations = [r.ok() for r in schemathesis.openapi.from_dict(description).get_all_operations()]
    operations = [o for o in operations if o.path not in ("/admin/reload", "/metrics")]
    found: list[Attempt] = []
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    for operation in operations:
        for mode in modes:
            settings = hypothesis.settings(
                max_examples=-(-count // (len(operations) * len(modes))), derandomize=True, database=None,
                deadline=None, phases=[hypothesis.Phase.generate],
                suppress_health_check=list(hypothesis.HealthCheck),
            )  # fmt: skip

            def keep(case: Any) -> None:
                prepared = requests.Request(**_request_of(case, address)).prepare()
                body = prepared.body or b""
                found.append(
                    Attempt(
                        "schemathesis",
                        str(prepared.method),
                        str(prepared.url).removeprefix(address),
                        body.encode() if isinstance(body, str) else body,
                        prepared.headers.get("Content-Type", ""),
                    )
                )

            try:
                settings(hypothesis.given(case=operation.as_strategy(generation_mode=mode))(keep))()
            except hypothesis.errors.Unsatisfiable:
                continue  # nothing is invalid about a route without parameters
    return found[:count]


def _request_of(case: Any, address: str) -> dict[str, Any]:
    told = case.as_transport_kwargs(base_url=address.rstrip("/"))
    return {
        k: v for k, v in told.items() if k in ("method", "url", "headers", "params", "json", "data", "files")
    }
