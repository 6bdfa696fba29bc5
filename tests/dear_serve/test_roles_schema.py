"""roles.json: its schema, what is read and refused, and phrases of attributes of one's own."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dear_serve.backbone import ASSETS
from dear_serve.dear.roles import Description, HeadRole, Roles
from dear_serve.errors import BundleError, ConfigError

SCHEMA = json.loads((ASSETS / "roles.schema.json").read_text(encoding="utf-8"))
KINDS = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float)}


def problems(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """What JSON Schema would say, for the keywords that the schema uses."""
    if not isinstance(value, KINDS[schema["type"]]) or isinstance(value, bool):
        return [f"{where} is no {schema['type']}"]
    out = []
    if "enum" in schema and value not in schema["enum"]:
        out.append(f"{where} is {value!r}")
    if "minimum" in schema and value < schema["minimum"]:
        out.append(f"{where} is below {schema['minimum']}")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        out.append(f"{where} does not match")
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            out.append(f"{where} has {len(value)} items")
        for i, item in enumerate(value):
            out += problems(item, schema["items"], f"{where}[{i}]")
    return out + (_of_object(value, schema, where) if isinstance(value, dict) else [])


def _of_object(value: dict[str, Any], schema: dict[str, Any], where: str) -> list[str]:
    known, rest = schema.get("properties", {}), schema["additionalProperties"]
    out = [f"{where} lacks {key}" for key in schema.get("required", []) if key not in value]
    for key, item in value.items():
        if key not in known and rest is False:
            out.append(f"{where} has {key}")
        else:
            out += problems(item, known.get(key, rest), f"{where}.{key}")
    return out


def example() -> Roles:
    return Roles(
        base="tiny",
        base_sha256="0" * 64,
        layers=3,
        heads_per_layer=1,
        first_block=3,
        attributes=("color", "rust"),
        thresholds=(0.5, 1),
        heads=(
            HeadRole(
                layer=3,
                head=0,
                role="attribute",
                concept="rust",
                entropy=0,
                descriptions=(Description(text="no rust", variance=0.5),),
            ),
        ),
        phrases={"rust": ("no rust", "heavy rust")},
    )


def test_saved_roles_follow_the_schema(tmp_path: Path) -> None:
    example().save(tmp_path / "roles.json")
    data = json.loads((tmp_path / "roles.json").read_text())
    assert problems(data, SCHEMA) == []
    assert Roles.load(tmp_path / "roles.json") == example()
    shipped = json.loads((ASSETS / "dear-mini" / "roles.json").read_text(encoding="utf-8"))
    assert problems(shipped, SCHEMA) == []
    for key, value in {
        "version": 2,
        "thresholds": [1.0],
        "base_sha256": "x",
        "extra": 1,
        "layers": "3",
    }.items():
        assert problems({**data, key: value}, SCHEMA), key


def test_schema_and_classes_name_the_same_fields() -> None:
    head = SCHEMA["properties"]["heads"]["items"]
    description = head["properties"]["descriptions"]["items"]
    for cls, schema in ((Roles, SCHEMA), (HeadRole, head), (Description, description)):
        fields = {f.name: f for f in dataclasses.fields(cls)}
        assert set(fields) == set(schema["properties"])
        needed = {
            n
            for n, f in fields.items()
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        }
        assert needed == set(schema["required"])


def test_files_without_phrases_are_as_they_were(tmp_path: Path) -> None:
    plain = dataclasses.replace(example(), phrases={})
    plain.save(tmp_path / "roles.json")
    assert "phrases" not in json.loads((tmp_path / "roles.json").read_text())
    assert Roles.load(tmp_path / "roles.json") == plain


@pytest.mark.parametrize(
    "phrases", [{"rust": ["no rust"]}, {"rust": ["x", "x"]}, {"shape": ["round", "square"]}]
)
def test_phrases_must_be_of_an_attribute_and_differ(phrases: dict[str, list[str]], tmp_path: Path) -> None:
    data = {**example().to_dict(), "phrases": phrases}
    with pytest.raises(ConfigError, match="phrases of"):
        Roles.from_dict(data)
    (tmp_path / "roles.json").write_text(json.dumps(data))
    with pytest.raises(BundleError, match="does not hold head roles"):
        Roles.load(tmp_path / "roles.json")


def test_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="version 2"):
        Roles.from_dict({**example().to_dict(), "version": 2})
