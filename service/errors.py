"""The error contract: every refusal is `{"error": {"code", "message", "field"}}`.

Codes made here, beside those of `dear_serve`:

    bad_json, bad_form       400   the body cannot be read
    unsupported_media_type   415   neither JSON nor multipart/form-data
    missing_field, unknown_field, unknown_mode, bad_field   422   does not fit the route (`field` says where)
    too_many_images, ..._labels, ..._templates, ..._prompts, ..._texts, text_too_long   422   over a limit
    bad_base64, url_refused  400   a picture that is not base64 or is a web address
    body_too_large           413   more bytes than the server's limit
    read_timeout             408   the body did not arrive in time
    unauthorized             401   the key is missing or wrong
    admin_off                403   the server has no key, so nobody may reload its bundles
    not_found, no_gallery, unknown_id, unknown_model, unknown_label_set   404
    label_set_exists         409   a bundle has a label set of that name
    reload_failed            409   the folder's new content cannot be served; the old one goes on
    no_explain               422   the bundle has no graph for heat maps
    client_gone              499   for the log and the metrics: the caller hung up
    bundle_replaced          503   the folder holds another bundle than the one that is served
    method_not_allowed       405
    overloaded               503   with Retry-After
    internal                 500   ours; the log has the details under the request id
"""

from __future__ import annotations

from typing import Any

from dear_serve.errors import (
    BaseModelError,
    BundleError,
    ConfigError,
    DataError,
    DearError,
    GalleryError,
    InputError,
)

__all__ = ["INTERNAL", "STATUS", "ApiError", "error_body", "status_of"]

STATUS: dict[str, int] = {
    "unsupported_media_type": 415,
    "missing_field": 422,
    "unknown_field": 422,
    "unknown_mode": 422,
    "bad_field": 422,
    "too_many_images": 422,
    "too_many_labels": 422,
    "too_many_templates": 422,
    "too_many_prompts": 422,
    "too_many_texts": 422,
    "text_too_long": 422,
    "body_too_large": 413,
    "image_too_large": 413,
    "read_timeout": 408,
    "unauthorized": 401,
    "admin_off": 403,
    "unknown_label_set": 404,
    "label_set_exists": 409,
    "reload_failed": 409,
    "too_many_label_sets": 422,
    "client_gone": 499,
    "not_found": 404,
    "no_gallery": 404,
    "unknown_id": 404,
    "unknown_model": 404,
    "method_not_allowed": 405,
}

INTERNAL = "the server could not answer; its log has the reason under this answer's X-Request-ID"

# About the server's own files: nothing the caller can mend, and their messages name paths.
_OURS = (BaseModelError, BundleError, ConfigError, DataError, GalleryError)
_TOLD = {"no_explain": 422, "bundle_replaced": 503}  # those of them that the caller should hear of
_MESSAGES = {
    "no_explain": "this bundle has no graph for heat maps; leave them out, or export the bundle again",
    "bundle_replaced": "the bundle is being replaced; try again in a moment",
}


class ApiError(InputError):
    """A request that the service itself refuses; `code` is one of the module docstring."""

    default_code = "bad_request"


def status_of(error: BaseException) -> int:
    """The HTTP status for `error`: 4xx for what the caller can mend, 500 for what isn't a DearError."""
    if not isinstance(error, DearError):
        return 500
    if isinstance(error, _OURS):
        return _TOLD.get(error.code, 500)
    return STATUS.get(error.code, error.http_status)


def error_body(error: BaseException, *, field: str | None = None) -> dict[str, Any]:
    """`{"error": {"code", "message", "field"}}`; what isn't for the caller becomes a generic message."""
    if not isinstance(error, DearError) or status_of(error) == 500:
        return {"error": {"code": "internal", "message": INTERNAL, "field": None}}
    message = _MESSAGES.get(error.code, error.message)
    return {"error": {"code": error.code, "message": message, "field": error.field or field}}
