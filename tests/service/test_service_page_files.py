"""How the files of the page are served; what they do is in test_service_page."""

from __future__ import annotations


def test_files_of_the_page(client):
    page = client.get("/")
    assert "'unsafe" not in page.headers["content-security-policy"]
    for name, kind in (
        ("main.js", "text/javascript"),
        ("style.css", "text/css"),
        ("icon.svg", "image/svg+xml"),
    ):
        file = client.get(f"/web/{name}")
        assert file.status_code == 200
        assert file.headers["content-type"].startswith(kind)
        assert file.headers["cache-control"] == "no-cache"
        known = client.get(f"/web/{name}", headers={"if-none-match": file.headers["etag"]})
        assert (known.status_code, known.content) == (304, b"")
    for name in ("nothing.js", "..%2Fapp.py", "../app.py", "%2Fetc%2Fpasswd", "index.html/"):
        assert client.get(f"/web/{name}").json()["error"]["code"] == "not_found"
