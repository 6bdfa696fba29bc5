"""The rules of the architecture: who may import whom, what serving may not load, what is public, what is said."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("dear_serve", "training", "export", "service")
# Lowest first; a module imports only from its own place or from before it.
ORDER = (
    ("errors",), ("command",), ("config",), ("io_spec",), ("preprocess",), ("tokenizer",), ("backbone",), ("dear",),
    ("labels",), ("readout",), ("atomic", "manifest", "bundle"), ("runtime",), ("gallery",),
    ("client_answers",), ("client_calls",), ("client",),
    ("launch", "bento", "doctor", "demo"), ("cli_gallery",),
    ("cli",),
)  # fmt: skip
HEAVY = ("torch", "torchvision", "open_clip")
TORCH_FREE = (
    "service.app", "service.asgi", "service.start", "dear_serve.preprocess", "dear_serve.tokenizer",
    "dear_serve.labels", "dear_serve.bundle", "dear_serve.readout", "dear_serve.runtime.onnx_engine",
    "dear_serve.runtime.fake_engine", "dear_serve.runtime.predict", "dear_serve.gallery",
    "dear_serve.gallery.indexer", "dear_serve.dear.roles", "dear_serve.dear.mask", "dear_serve.cli",
    "dear_serve.launch", "dear_serve.bento", "dear_serve.client", "dear_serve.doctor", "dear_serve.demo",
)  # fmt: skip


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Absolute names of everything a file imports, anywhere in it."""
    found: set[str] = set()
    package = module_name(path).split(".")[: None if path.name == "__init__.py" else -1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found |= {source} | {f"{source}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_outer_packages_import_the_library_and_never_each_other(package):
    others = {p for p in PACKAGES if p != package and (p != "dear_serve" or package == "dear_serve")}
    wrong = {
        module_name(path): name
        for path in sources(package)
        for name in imports(path)
        if name.split(".")[0] in others
    }
    assert wrong == {}


def test_imports_inside_the_library_point_down():
    place = {name: i for i, names in enumerate(ORDER) for name in names}
    wrong = []
    for path in sources("dear_serve"):
        own = module_name(path).split(".")[1:2]
        if not own or own == ["assets"]:
            continue
        assert own[0] in place, f"{own[0]} has no place in the order"
        for name in imports(path):
            parts = name.split(".")
            inside = parts[0] == "dear_serve" and len(parts) > 1 and parts[1] in place
            if inside and place[parts[1]] > place[own[0]]:
                wrong.append((module_name(path), name))
    assert wrong == []


@pytest.mark.parametrize("module", TORCH_FREE)
def test_serving_needs_no_torch(module):
    code = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip().splitlines()[-1] == "[]"


def test_service_does_no_array_maths():
    wrong = [
        path.name for path in sources("service") if any(n.split(".")[0] == "numpy" for n in imports(path))
    ]
    assert wrong == []


def test_public_surface():
    """Every name in __all__ is there, and the library's own list is pinned."""
    import dear_serve

    assert sorted(dear_serve.__all__) == [
        "Bundle", "ClipConfig", "DearConfig", "DearError", "DearModel", "Gallery", "Predictor", "Roles", "Tokenizer",
        "__version__", "load_base", "open_bundle",
    ]  # fmt: skip
    for name in dear_serve.__all__:
        assert getattr(dear_serve, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dear_serve.nothing  # noqa: B018


@pytest.mark.parametrize("path", [p for name in PACKAGES for p in sources(name)], ids=module_name)
def test_every_module_says_what_it_is_for_and_exports_what_it_lists(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "no module docstring"
    listed = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    if listed and path.name != "__init__.py":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # BentoML's own, at import
            module = importlib.import_module(module_name(path))
        assert [n for n in listed[0] if not hasattr(module, n)] == []


def test_files_stay_readable():
    long = {
        module_name(p): n
        for name in PACKAGES
        for p in sources(name)
        if (n := p.read_text().count("\n")) > 400
    }
    assert long == {}


def test_every_public_function_is_documented():
    missing = []
    for path in [p for name in PACKAGES for p in sources(name)]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                missing.append(f"{module_name(path)}.{node.name}")
    assert missing == []


def readme_blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_readme_names_real_files_and_targets():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = readme_blocks("text")[0]
    named = re.findall(r"^(?:[│├└─ ]*)([\w./-]+\.(?:py|json|toml|md)|[\w-]+/)", tree, flags=re.MULTILINE)
    known = {p.name + ("/" if p.is_dir() else "") for p in ROOT.rglob("*") if ".venv" not in p.parts}
    assert len(named) > 30
    assert [n for n in named if n not in known] == []
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"make (\w+)", text)) <= set(targets)


def test_readme_shell_commands_exist():
    """Every command of the README's shell blocks parses: its options are ones the command knows."""
    commands = [
        line
        for block in readme_blocks("bash")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith(("python -m", "dear-"))
    ]
    assert len(commands) >= 6
    helps: dict[str, str] = {}
    for line in commands:
        words = line.split("#")[0].split()
        stem = (
            words[1:3]
            if words[0] == "python"
            else words[:1] + [w for w in words[1:2] if words[0] == "dear-serve"]
        )
        key = " ".join(stem)
        if key not in helps:
            if words[0] == "python":
                run = [sys.executable, *stem]
            else:
                module = {"dear-serve": "dear_serve.cli", "dear-export": "export.cli"}[words[0]]
                run = [sys.executable, "-m", module, *stem[1:]]
            helps[key] = subprocess.run(
                [*run, "--help"], capture_output=True, text=True, check=True, cwd=ROOT
            ).stdout
        for option in re.findall(r"\s(--[\w-]+)", line.split("#")[0]):
            assert option in helps[key], f"{line}: no option {option}"


def test_readme_python_blocks_run(demo, monkeypatch, capsys):
    """The Python blocks run one after the other where the demo has run."""
    blocks = readme_blocks("python")
    assert len(blocks) >= 2
    monkeypatch.chdir(demo.folder)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert "torch.Size([2, 5, 128])" in capsys.readouterr().out
