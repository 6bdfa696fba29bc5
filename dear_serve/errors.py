"""One error tree: everything this project raises on purpose, with a code, a field and an exit status.

DearError                      exit 1
├── CheckFailedError           exit 1   a check (parity, contributions, hashes) did not hold
├── MissingDependencyError     exit 3   an optional part is not installed; the message has the pip line
├── OverloadError              exit 1   the server is busy; HTTP 503 with Retry-After
└── InputError                 exit 2   something the caller can mend; HTTP 4xx
    ├── ConfigError                     an option or a configuration file
    ├── ImageError                      a picture: not one, truncated, too large, too long and thin
    ├── TextError                       a text: empty, not text
    │   └── LabelError                  class names and templates
    ├── QueryError                      a search: attributes, weights, filter, id
    ├── DataError                       a data set on disk
    ├── BaseModelError                  a base model: unknown, unsupported, wrong weights
    ├── BundleError                     a bundle: absent, broken, made by something else
    └── GalleryError                    a gallery: absent, made with another bundle
"""

from __future__ import annotations

__all__ = [
    "BaseModelError",
    "BundleError",
    "CheckFailedError",
    "ConfigError",
    "DataError",
    "DearError",
    "GalleryError",
    "ImageError",
    "InputError",
    "LabelError",
    "MissingDependencyError",
    "OverloadError",
    "QueryError",
    "TextError",
]


class DearError(Exception):
    """Root of the tree.

    Args:
        message: one sentence that names the value and the remedy; shown to the user as it is, so it
            never holds a server path or the contents of a picture when it may travel over HTTP.
        code: machine-readable snake_case name (default: the class's `default_code`).
        field: the request field or option concerned, where there is one.
    """

    default_code = "error"
    exit_code = 1
    http_status = 500

    def __init__(self, message: str, *, code: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.field = field


class CheckFailedError(DearError):
    """A check of ours did not hold (parity, sum of contributions, hashes)."""

    default_code = "check_failed"


class MissingDependencyError(DearError):
    """An optional package or device is missing; the message holds the exact pip line."""

    default_code = "missing_dependency"
    exit_code = 3
    http_status = 501


class OverloadError(DearError):
    """Too much work is waiting; try again later."""

    default_code = "overloaded"
    http_status = 503


class InputError(DearError):
    """Something the caller can mend."""

    default_code = "bad_input"
    exit_code = 2
    http_status = 400


class ConfigError(InputError):
    """An option or configuration value that cannot be used."""

    default_code = "bad_config"


class ImageError(InputError):
    """A picture that cannot be used; codes are listed in `dear_serve.preprocess`."""

    default_code = "bad_image"


class TextError(InputError):
    """A text that cannot be used."""

    default_code = "bad_text"


class LabelError(TextError):
    """Class names or templates that cannot be used; codes are listed in `dear_serve.labels`."""

    default_code = "bad_labels"


class QueryError(InputError):
    """A search that cannot be run: attributes, weights, filter or id."""

    default_code = "bad_query"


class DataError(InputError):
    """A data set on disk that cannot be used."""

    default_code = "bad_data"


class BaseModelError(InputError):
    """A base model that is unknown, unsupported or whose weights are not the expected ones."""

    default_code = "bad_base"


class BundleError(InputError):
    """A bundle that is absent, broken or does not fit."""

    default_code = "bad_bundle"


class GalleryError(InputError):
    """A gallery that is absent, broken or was made with another bundle."""

    default_code = "bad_gallery"
