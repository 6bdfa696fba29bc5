"""Every route of the server, BentoML's probes included: what it is called, what it takes, what it answers."""

from __future__ import annotations

from . import schemas
from .openapi import Operation

__all__ = ["OPERATIONS"]

OPERATIONS = (
    Operation(
        method="POST",
        path="/classify",
        name="classify",
        summary="Which of these labels is each picture, and why",
        request=schemas.ClassifyRequest,
        answer=schemas.ClassifyAnswer,
    ),
    Operation(
        method="POST",
        path="/embed/image",
        name="embed_image",
        summary="Features of pictures",
        request=schemas.EmbedImageRequest,
        answer=schemas.EmbedAnswer,
    ),
    Operation(
        method="POST",
        path="/embed/text",
        name="embed_text",
        summary="Features of texts",
        request=schemas.EmbedTextRequest,
        answer=schemas.EmbedAnswer,
    ),
    Operation(
        method="POST",
        path="/search",
        name="search",
        summary="Pictures alike in the attributes you weigh",
        request=schemas.SearchRequest,
        answer=schemas.SearchAnswer,
    ),
    Operation(
        method="POST",
        path="/gallery/add",
        name="gallery_add",
        summary="Keep pictures; durable when answered",
        request=schemas.GalleryAddRequest,
        answer=schemas.GalleryAddAnswer,
    ),
    Operation(
        method="DELETE",
        path="/gallery/{id}",
        name="gallery_delete",
        summary="Forget a picture",
        answer=schemas.DeleteAnswer,
    ),
    Operation(method="GET", path="/gallery/stats", name="gallery_stats", summary="What the gallery holds"),
    Operation(
        method="GET",
        path="/label_sets",
        name="label_sets",
        summary="The label sets of the bundles and those sent to this server",
        answer=schemas.LabelSetsAnswer,
    ),
    Operation(
        method="POST",
        path="/label_sets",
        name="label_set_add",
        summary="Keep a label set under a name until the server stops",
        request=schemas.LabelSetRequest,
        answer=schemas.LabelSetAnswer,
    ),
    Operation(
        method="DELETE",
        path="/label_sets/{id}",
        name="label_set_delete",
        summary="Forget a label set that was sent to this server",
        answer=schemas.DeleteAnswer,
    ),
    Operation(
        method="GET",
        path="/model",
        name="model",
        summary="Classes, attributes, roles, engine, hashes; of another bundle with ?model=NAME",
        query=("model",),
    ),
    Operation(
        method="POST",
        path="/admin/reload",
        name="reload",
        summary="Open a bundle's folder anew, without dropping requests; needs a server with a key",
        request=schemas.ReloadRequest,
        answer=schemas.ReloadAnswer,
    ),
    Operation(method="GET", path="/metrics", name="metrics", summary="Prometheus metrics"),
    Operation(method="GET", path="/docs.json", name="docs", summary="This description"),
    Operation(method="GET", path="/", name="page", summary="The page"),
    Operation(
        method="GET", path="/web/{id}", name="page_file", summary="A style sheet, script or icon of the page"
    ),
    Operation(method="GET", path="/livez", name="livez", summary="The process is alive"),
    Operation(method="GET", path="/readyz", name="readyz", summary="The bundles are loaded and warm"),
)
"""In the order of the description."""
