"""The bundle, a folder that holds an adapted model: its paths, manifest, hashes and atomic writes. No torch.

Safetensors and JSON only; nothing is ever unpickled. `dear.json`, the manifest, names every other file
with its size and sha256. A bundle is written beside its place and renamed into it (`dear_serve.atomic`):
readers see the old bundle or the new one, whole, even if the writer is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from dear_serve import __version__
from dear_serve.atomic import FolderWriter, recover_folder
from dear_serve.dear.roles import Roles
from dear_serve.errors import BundleError, ConfigError
from dear_serve.labels import validate_labels, validate_templates
from dear_serve.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    BaseRef,
    BundlePaths,
    Calibration,
    FileEntry,
    LabelSet,
    Manifest,
    Readout,
)

__all__ = [
    "FORMAT_VERSION",
    "BaseRef",
    "Bundle",
    "BundlePaths",
    "BundleWriter",
    "Calibration",
    "FileEntry",
    "LabelSet",
    "Manifest",
    "Readout",
    "load_arrays",
    "save_arrays",
    "sha256_file",
]

# A folder that is replaced while it is being read shows a mixture; then it is read again.
_OPEN_ATTEMPTS = 5

Arrays = dict[str, npt.NDArray[Any]]


def sha256_file(path: Path) -> str:
    """sha256 of a file's content in hexadecimal, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def save_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write a safetensors file with the permissions of any other (safetensors' own writer gives the owner's alone)."""
    path.write_bytes(save({name: np.ascontiguousarray(a) for name, a in arrays.items()}))


def load_arrays(path: Path) -> Arrays:
    """Arrays of a safetensors file by name. Raises BundleError if it is absent or not one."""
    try:
        return dict(load_file(path))
    except FileNotFoundError as error:
        raise BundleError(f"{path.name} is missing from the bundle; make the bundle again") from error
    except SafetensorError as error:
        raise BundleError(
            f"{path.name} is not a safetensors file ({error}); make the bundle again"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An opened bundle: manifest read and, unless told otherwise, every file checked."""

    manifest: Manifest
    paths: BundlePaths
    stamp: tuple[int, ...] | None = None
    """Which manifest file this is (device, inode, time in ns), to notice that the folder has been replaced."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool = True) -> Bundle:
        """Open the bundle in folder `path`.

        Args:
            path: the folder; a replacement of it that was killed half-way is mended first.
            verify: also read every file and compare its sha256; sizes are always compared.

        Raises:
            BundleError: no bundle there, an unknown format version, or a file that is missing or is not what
                the manifest says (the message names the file and both values).
        """
        paths = BundlePaths(Path(path))
        try:
            recover_folder(paths.root.resolve())
        except OSError as error:
            raise BundleError(
                f"{path} was left half replaced and cannot be mended here ({error.strerror}); "
                f"rename the newest .{paths.root.name}.old-* beside it to {paths.root.name}"
            ) from error
        for _ in range(_OPEN_ATTEMPTS - 1):
            stamp = _stamp(paths)
            try:
                bundle = cls._open_once(paths, stamp, verify=verify)
            except (BundleError, FileNotFoundError):
                if _stamp(paths) == stamp:
                    break  # nobody replaced it meanwhile: the error below is true
            else:
                if bundle.is_current():
                    return bundle
        return cls._open_once(paths, _stamp(paths), verify=verify)

    @classmethod
    def _open_once(cls, paths: BundlePaths, stamp: tuple[int, ...] | None, *, verify: bool) -> Bundle:
        bundle = cls(manifest=_read_manifest(paths), paths=paths, stamp=stamp)
        for name, entry in bundle.manifest.files.items():
            _check_file(paths.root / name, name, entry, verify=verify)
        bundle.basis()
        bundle.roles()
        _check_adapter(bundle)
        return bundle

    def is_current(self) -> bool:
        """Whether the folder still holds what was opened; False once another bundle has taken its place."""
        return self.stamp is None or self.stamp == _stamp(self.paths)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.paths.root.resolve().name

    @property
    def sha256(self) -> str:
        """`Manifest.identity`: what a gallery remembers of the bundle that made its vectors."""
        return self.manifest.identity()

    def file(self, name: str) -> Path:
        """Path of a listed file, such as "onnx/image.onnx"; BundleError if the manifest does not list it."""
        if name not in self.manifest.files:
            raise BundleError(f"{MANIFEST_NAME} lists no {name}; run: dear-export {self.paths.root}")
        return self.paths.root / name

    def roles(self) -> Roles:
        """The fixed head roles; BundleError if they belong to another base or another J.

        Roles that were not computed from a base (`Roles.uniform`) name none and fit every base of their shape.
        """
        roles = Roles.load(self.file("roles.json"))
        base, vision = self.manifest.base, self.manifest.base.clip.vision
        for what, found, expected in (
            ("base weights", roles.base_sha256 or base.sha256, base.sha256),
            ("first block", roles.first_block, self.manifest.dear.first_block),
            ("blocks", roles.layers, vision.layers),
            ("heads a block", roles.heads_per_layer, vision.heads),
        ):
            if found != expected:
                raise BundleError(f"roles.json is for {what} {found}; {MANIFEST_NAME} says {expected}")
        return roles

    def basis(self) -> dict[str, npt.NDArray[np.float32]]:
        """Q (r, D) float32 of each span readout by attribute; BundleError on a wrong name, shape or dtype."""
        spans = [r.attribute for r in self.manifest.readouts if r.kind == "span"]
        if not spans:
            return {}
        arrays = load_arrays(self.file("readouts.safetensors"))
        width = self.manifest.base.clip.embed_dim
        for name in spans:
            array = arrays.get(name)
            if array is None:
                raise BundleError(
                    f"readouts.safetensors lacks {name!r}; it holds {', '.join(sorted(arrays)) or 'nothing'}"
                )
            if (
                array.ndim != 2
                or array.shape[1] != width
                or not 1 <= array.shape[0] <= width
                or array.dtype != np.float32
            ):
                raise BundleError(
                    f"basis of {name!r} is {array.dtype} {array.shape}; float32 (r, {width}) is needed"
                )
        return {name: arrays[name] for name in spans}

    def replace_folder(
        self,
        name: Literal["onnx", "trt"],
        fill: Callable[[Path], None],
        *,
        update: Callable[[Manifest], Manifest] | None = None,
    ) -> Bundle:
        """Add or replace a sub-folder and the manifest, both or neither.

        Args:
            name: the sub-folder.
            fill: writes the new content into the empty folder it is given; if it raises, nothing changes.
            update: makes the new manifest out of the old one (`files` is then set here).

        Returns:
            The bundle as it is now, opened.

        Raises:
            BundleError: the other files are not what the manifest says, or another bundle has taken its place.
        """
        with BundleWriter(self.paths.root) as writer:
            self._keep(writer, without=f"{name}/")
            folder = writer.paths.root / name
            folder.mkdir()
            fill(folder)
            return self._replace(writer, update(self.manifest) if update else self.manifest)

    def store_label_set(
        self, name: str, labels: Sequence[str] | None, templates: Sequence[str] = ()
    ) -> Bundle:
        """Keep labels under a name, in place of those that were there, or take the name out; nothing else changes.

        Args:
            name: letters, digits and . _ -, at most 100. labels: None takes the set out. templates: none: the bundle's.

        Raises LabelError (labels, templates), ConfigError (the name), BundleError as `replace_folder`.
        """
        sets = {key: kept for key, kept in self.manifest.label_sets.items() if key != name}
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name):
            raise ConfigError(f"{name!r:.80} is no name; use letters, digits and . _ -", field="name")
        if labels is not None:
            checked = validate_labels(labels)
            sets[name] = LabelSet(
                labels=checked, templates=validate_templates(templates) if templates else ()
            )
        elif name not in self.manifest.label_sets:
            known = ", ".join(sets) or "it has none"
            raise ConfigError(f"{self.name} has no label set {name!r}; known: {known}", field="name")
        with BundleWriter(self.paths.root) as writer:
            self._keep(writer)
            return self._replace(writer, replace(self.manifest, label_sets=sets))

    def _keep(self, writer: BundleWriter, *, without: str | None = None) -> None:
        """Every file, but those whose path starts so, linked into the new bundle."""
        for relative, entry in self.manifest.files.items():
            if without is None or not relative.startswith(without):
                _link(self.paths.root / relative, writer.paths.root / relative)
                _check_file(writer.paths.root / relative, relative, entry, verify=True)

    def _replace(self, writer: BundleWriter, manifest: Manifest) -> Bundle:
        if not self.is_current():
            raise BundleError(f"{self.name} was replaced by another bundle meanwhile; run this again on it")
        return writer.commit(manifest)


def _stamp(paths: BundlePaths) -> tuple[int, ...] | None:
    try:
        stat = paths.manifest.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


def _link(source: Path, target: Path) -> None:
    """Hard link, or a copy where the file system has none: unchanged files cost nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _read_manifest(paths: BundlePaths) -> Manifest:
    try:
        data = json.loads(paths.manifest.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BundleError(
            f"{paths.root} holds no {MANIFEST_NAME}; make a bundle with: python -m training.run DATA"
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BundleError(f"{paths.manifest} is not JSON ({error}); make the bundle again") from error
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise BundleError(
            f"{paths.manifest} has format_version {version!r}; this library reads {FORMAT_VERSION}: "
            "make the bundle again, or install the dear-serve that wrote it"
        )
    try:
        return Manifest.from_dict(data)
    except ConfigError as error:
        raise BundleError(f"{paths.manifest}: {error.message}", field=error.field) from error


def _check_file(path: Path, name: str, entry: FileEntry, *, verify: bool) -> None:
    if not path.is_file():
        raise BundleError(
            f"{name} is missing from the bundle {path.parents[name.count('/')]}; make the bundle again"
        )
    size = path.stat().st_size
    if size != entry.size:
        raise BundleError(
            f"{name} has {size} bytes; {MANIFEST_NAME} says {entry.size}: the file was cut or changed"
        )
    if verify:
        found = sha256_file(path)
        if found != entry.sha256:
            raise BundleError(
                f"{name} has sha256 {found}; {MANIFEST_NAME} says {entry.sha256}: the file was changed"
            )


def _check_adapter(bundle: Bundle) -> None:
    """Shapes of the learned tensors against the manifest, from the file's header alone."""
    manifest, name = bundle.manifest, "adapter.safetensors"
    dear, clip = manifest.dear, manifest.base.clip
    expected = {
        "attribute_tokens.tokens": (len(dear.attributes), clip.vision.width),
        "attribute_projection": (clip.vision.width, clip.embed_dim),
        "text_tokens.tokens": (dear.text_tokens, clip.text.width),
        "fusion.weights": (len(dear.attributes) + 1,),
    }
    try:
        with safe_open(bundle.file(name), framework="numpy") as tensors:
            found = {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise BundleError(f"{name} is not a safetensors file ({error}); make the bundle again") from error
    for key, shape in expected.items():
        if found.get(key) != shape:
            raise BundleError(
                f"{name} holds {key} of shape {found.get(key)}; {MANIFEST_NAME} implies {shape}"
            )


class BundleWriter:
    """Context manager that makes or replaces a bundle as a whole.

    Write the files into `paths` (a temporary folder beside the target), then call `commit`. Leaving without
    it, or by an exception, leaves the old bundle, if there was one, untouched.

    Args:
        path: folder of the bundle to be; something there that is not a bundle or an empty folder is refused.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._target = Path(path)
        self._writer = FolderWriter(self._target)
        self.paths = BundlePaths(self._writer.temporary)

    def __enter__(self) -> BundleWriter:
        target = self._target
        if (
            target.exists()
            and not (target / MANIFEST_NAME).is_file()
            and not (target.is_dir() and not any(target.iterdir()))
        ):
            raise BundleError(f"{target} exists and is not a bundle; choose another path or remove it")
        try:
            self._writer.__enter__()
        except OSError as error:
            raise BundleError(
                f"cannot write beside {target} ({error.strerror}); choose another path"
            ) from error
        return self

    def commit(self, manifest: Manifest) -> Bundle:
        """List every file written (size, hash) in `manifest`, write it, and put the bundle in its place.

        Raises BundleError, and changes nothing, if the bundle could not be opened (shapes, roles, readouts).
        """
        root = self.paths.root
        files = {
            path.relative_to(root).as_posix(): FileEntry(sha256=sha256_file(path), size=path.stat().st_size)
            for path in sorted(root.rglob("*"))
            if path.is_file() and path != self.paths.manifest
        }
        complete = replace(manifest, files=files, library_version=__version__)
        text = json.dumps(complete.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
        self.paths.manifest.write_text(text + "\n", encoding="utf-8")
        bundle = Bundle.open(root, verify=False)  # what could not be opened must not replace what can
        self._writer.commit()
        return replace(bundle, paths=BundlePaths(self._target))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)
