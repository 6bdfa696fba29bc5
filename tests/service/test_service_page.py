"""The page in headless Chromium, on the fake engine: two journeys, errors shown to a person, nothing from elsewhere.

Screenshots are written to the folder that DEAR_SCREENSHOTS names, else to pytest's temporary one.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dear_serve.bundle import Bundle
from dear_serve.gallery import Gallery, gallery_spec
from dear_serve.runtime.predict import Predictor
from service.asgi import create_asgi_app
from service.models import Models
from service.settings import Settings

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

KEY = "s3cret"
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 860}
COLORS = ("red", "lime", "blue", "orange", "teal", "pink")


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory) -> Path:
    folder = Path(os.environ.get("DEAR_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def server(fake_bundle: Bundle, picture, listen, tmp_path_factory) -> Iterator[dict[str, str]]:
    """Addresses of an open server with two bundles and a gallery, and of one with a key."""
    with (
        Predictor.open(fake_bundle.paths.root, engine="fake") as predictor,
        Predictor.open(fake_bundle.paths.root, engine="fake") as other,
    ):
        gallery = Gallery.open(
            tmp_path_factory.mktemp("page") / "gallery", create_for=gallery_spec(predictor)
        )
        pictures = [picture(color) for color in COLORS]
        features, _ = predictor.image_features(pictures)
        ids = [f"{color}.png" for color in COLORS]
        gallery.add(ids, predictor.readout(features), [{"price": i} for i in range(6)], pictures, ids)
        models = Models({"tiny": predictor, "other": other}, gallery=gallery)
        bundles = {"tiny": fake_bundle.paths.root, "other": fake_bundle.paths.root}
        apps = {
            "open": create_asgi_app(models, Settings(bundles=bundles, workers=4)),
            "locked": create_asgi_app(models, Settings(bundles=bundles, workers=4, api_key=KEY)),
        }
        with listen(apps["open"]) as opened, listen(apps["locked"]) as locked:
            yield {"open": opened, "locked": locked}
        for app in apps.values():
            app.state.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"])
        yield opened
        opened.close()


class Tab:
    """A page that remembers what it asked for and what it complained about."""

    def __init__(self, browser, address: str, **options) -> None:
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(10_000)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        self.host = urlsplit(address).netloc
        self.page.goto(address)

    def settled(self) -> None:
        """Nothing is being asked for any more."""
        playwright.expect(self.page.locator("[aria-busy=true]")).to_have_count(0)

    def close(self, *, complaints: int = 0) -> None:
        hosts = {
            urlsplit(url).netloc for url in self.requests if urlsplit(url).scheme not in ("data", "blob")
        }
        width = self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        self.context.close()
        assert hosts == {self.host}
        assert len(self.complaints) == complaints, self.complaints
        assert width <= 0, "the page can be scrolled sideways"


def upload(tab: Tab, zone: str, data: bytes, name: str = "picture.png") -> None:
    tab.page.locator(f"#{zone} input").set_input_files(
        [{"name": name, "mimeType": "image/png", "buffer": data}]
    )


@pytest.mark.parametrize(("name", "size", "scheme"), [("phone", PHONE, "dark"), ("desk", DESK, "light")])
def test_classify_journey(browser, server, screenshots, picture, name, size, scheme):
    tab = Tab(browser, server["open"], viewport=size, color_scheme=scheme)
    page, expect = tab.page, playwright.expect
    expect(page.locator("#samples-row button").first).to_be_visible()
    page.screenshot(path=screenshots / f"start-{name}.png", full_page=True)
    upload(tab, "drop-classify", picture("teal", size=(200, 120)))
    expect(page.locator(".adapted .guess").first).to_contain_text("%")
    expect(page.locator(".zero .guess").first).to_contain_text("%")
    bars = page.locator(".adapted .bar i")
    widths = [float(bars.nth(i).evaluate("e => e.style.width").rstrip("%")) for i in range(bars.count())]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 0

    # Why: the parts that are shown sum to the logit that is shown.
    values = page.locator("#why .value").all_inner_texts()
    *parts, total = [float(v.replace("−", "-")) for v in values]
    assert len(parts) >= 3
    assert sum(parts) == pytest.approx(total, abs=0.01 * len(values))

    # Where an attribute looks lies over the centre square of the picture.
    page.get_by_role("group", name="Where does it look?").get_by_role("button", name="color").click()
    heat = page.locator(".heat")
    expect(heat).to_be_visible()
    box, frame = heat.bounding_box(), page.locator("#drop-classify .shown").bounding_box()
    assert box["width"] == pytest.approx(box["height"], abs=1)
    assert box["height"] == pytest.approx(frame["height"], abs=1)
    assert box["x"] + box["width"] / 2 == pytest.approx(frame["x"] + frame["width"] / 2, abs=1)

    # Labels of one's own, from the keyboard.
    labels = page.locator("#label-input")
    labels.fill("a red thing")
    labels.press("Enter")
    labels.fill("a <b>blue</b> thing")
    labels.press("Enter")
    expect(page.locator(".adapted .guess")).to_have_count(2)
    assert set(page.locator("#label-chips .chip").all_inner_texts()) >= {
        "a red thing\n✕",
        "a <b>blue</b> thing\n✕",
    }
    tab.settled()
    page.screenshot(path=screenshots / f"classify-{name}.png", full_page=True)
    labels.press("Backspace")
    expect(page.locator(".adapted .guess")).to_have_count(1)
    tab.close()


@pytest.mark.parametrize(("name", "size", "scheme"), [("phone", PHONE, "light"), ("desk", DESK, "dark")])
def test_search_journey(browser, server, screenshots, picture, name, size, scheme):
    tab = Tab(browser, server["open"], viewport=size, color_scheme=scheme)
    page, expect = tab.page, playwright.expect
    page.get_by_role("tab", name="Classify").press("ArrowRight")
    expect(page.get_by_role("tab", name="Search")).to_be_focused()
    upload(tab, "drop-search", picture("blue"))
    hits = page.locator(".hit")
    expect(hits).to_have_count(6)
    expect(hits.first).to_contain_text("blue.png")  # the picture itself is the most like it

    asked = []
    page.on(
        "request",
        lambda request: asked.append(request.post_data_json) if request.url.endswith("search") else None,
    )
    hits.nth(1).get_by_role("button", name="more like this in color").click()
    expect(hits).to_have_count(5)  # without the picture itself
    assert asked[-1]["attributes"] == {"color": 1}
    tab.settled()
    page.screenshot(path=screenshots / f"search-{name}.png", full_page=True)

    # A slider moved by key searches again, with its weight.
    page.get_by_role("slider", name="shape").press("ArrowRight")
    expect(page.locator("#query")).to_contain_text("color, shape")
    assert asked[-1]["attributes"] == {"color": 1, "shape": 0.05}
    hits.first.get_by_role("button", name="Not this").click()
    expect(page.locator("#query .away")).to_be_visible()
    assert len(asked[-1]["negative"]["ids"]) == 1
    page.get_by_label("or say what you look for").fill("something teal")
    page.keyboard.press("Enter")
    expect(page.locator("#query")).to_contain_text("“something teal”")
    hits.first.get_by_role("button", name="Classify").click()
    expect(page.locator(".adapted .guess").first).to_contain_text("%")
    tab.close()


GIVE = """([data, kind, target]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const given = new DataTransfer();
  given.items.add(new File([bytes], "given.png", { type: "image/png" }));
  const init = { bubbles: true, cancelable: true };
  const event = kind === "paste" ? new ClipboardEvent(kind, { ...init, clipboardData: given })
    : new DragEvent(kind, { ...init, dataTransfer: given });
  document.querySelector(target).dispatchEvent(event);
}"""


def test_paste_and_drop(browser, server, picture):
    tab = Tab(browser, server["open"], viewport=DESK)
    page, expect = tab.page, playwright.expect
    data = base64.b64encode(picture("pink")).decode()
    expect(page.locator("#labels-hint")).to_contain_text("trained classes")
    page.evaluate(GIVE, [data, "paste", "body"])
    expect(page.locator(".adapted .guess").first).to_contain_text("%")
    page.get_by_role("button", name="Find alike in the gallery").click()
    expect(page.locator(".hit").first).to_contain_text("pink.png")
    page.evaluate(GIVE, [base64.b64encode(picture("orange")).decode(), "drop", "#drop-search"])
    expect(page.locator(".hit").first).to_contain_text("orange.png")
    # The theme is kept over a reload.
    page.get_by_role("button", name="Color theme").click()
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    tab.close()


def test_role_map_and_choice_of_model(browser, server, screenshots):
    tab = Tab(browser, server["open"] + "#model", viewport=DESK)
    page, expect = tab.page, playwright.expect
    expect(page.locator(".head")).to_have_count(4)
    page.get_by_role("button", name="Block 3, head 2: scene, mixed").click()
    expect(page.locator("#model-body")).to_contain_text("Block 3, head 2: scene")
    page.screenshot(path=screenshots / "model-desk.png", full_page=True)
    with page.expect_response("**/model?model=other"):
        page.get_by_role("combobox", name="Model").select_option("other")
    page.get_by_role("tab", name="Search").click()
    expect(page.locator("#no-gallery")).to_be_visible()  # the gallery is the other bundle's
    tab.close()


def test_errors_are_shown_to_a_person(browser, server, screenshots, picture):
    tab = Tab(browser, server["open"], viewport=PHONE)
    page, expect = tab.page, playwright.expect
    alert = page.get_by_role("alert")
    page.locator("#go-classify").click()
    expect(alert).to_contain_text("Choose a picture first")
    upload(tab, "drop-classify", b"this is not a picture", "notes.txt")
    expect(alert).to_contain_text("picture")
    expect(page.locator("#go-classify")).to_be_enabled()
    page.screenshot(path=screenshots / "error-phone.png", full_page=True)
    page.get_by_role("button", name="Close this message").click()
    expect(alert).to_be_hidden()
    page.get_by_role("tab", name="Search").click()
    page.get_by_text("Filter and variety").click()
    page.locator("#filter").fill("price <<< nonsense")
    page.locator("#text").fill("something red")
    page.locator("#go-search").click()
    expect(alert).to_contain_text("ilter")
    # Chromium itself reports each refused request, two of the picture and one of the filter.
    assert all("Failed to load resource" in text for text in tab.complaints)
    tab.close(complaints=3)


def test_key_is_asked_for(browser, server, picture):
    tab = Tab(browser, server["locked"], viewport=DESK)
    page, expect = tab.page, playwright.expect
    expect(page.get_by_role("dialog")).to_be_visible()
    page.locator("#key").fill(KEY)
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#about")).to_contain_text("fake")
    upload(tab, "drop-classify", picture("red"))
    expect(page.locator(".adapted .guess").first).to_contain_text("%")
    tab.close(complaints=1)
