"""The report's page in a real headless Chromium, opened from disk as a reader would."""

from itertools import pairwise

import pytest
from chromium import launched, needs_chromium, opener, own_pages
from sample_findings import HOSTILE, findings

from consequent_lab.report.page import page as make_page

pytestmark = needs_chromium

DESKTOP = {"viewport": {"width": 1400, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
POINTS = 30


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_bytes(make_page(findings(POINTS)).encode())
    return path.as_uri()


@pytest.fixture(scope="module")
def browser():
    with launched() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def opening(browser, address):
    return opener(browser, address)


@pytest.fixture
def opened(opening):
    with own_pages(opening, **DESKTOP) as open_own_page:
        yield open_own_page


@pytest.fixture(scope="module")
def common(opening):
    """One page for tests that leave each other's parts alone: opening it takes seconds."""
    open_page, _ = opening
    return open_page(**DESKTOP)


@pytest.fixture
def shared(common, opening):
    _, check = opening
    yield common
    check()


def figure(page, name):
    """Scrolls to a figure, which has it drawn."""
    found = page.locator(f"#figure-{name}")
    found.scroll_into_view_if_needed()
    found.locator(".plot .curve").first.wait_for()
    return found


def curves(part):
    return part.locator(".plot .curve").count()


def marks(part, panel=0, direction="x"):
    """Returns the numbers that are written along an axis."""
    anchor = {"x": "middle", "y": "end"}[direction]
    texts = part.locator(".plot").nth(panel).locator(f".axes text[text-anchor={anchor}]:not([class])")
    return [float(text.replace(",", "").replace("−", "-")) for text in texts.all_text_contents()]


def test_all_figures_are_drawn(opened):
    page = opened()
    expected = {"loss-surface": 3 + 3, "output-paths": 4 + 2, "resnet20": 36 + 12, "hostile": 1, "begun": 2}
    for name, count in expected.items():
        assert curves(figure(page, name)) == count
        for path in page.locator(f"#figure-{name} .curve .line").all():
            assert path.get_attribute("d").startswith("M"), "a line that goes somewhere"
            assert "NaN" not in path.get_attribute("d")
    assert page.locator("#figure-loss-surface .contour").count() > 2 * 16
    assert page.get_by_text("No runs yet.").count() == 1 + 1, "for the whole of a figure, and for a panel"


def test_curves_are_where_their_numbers_are(shared):
    """A straight line from (1, 3) to (2, 4) goes from one corner of its frame to the other, a little room aside."""
    odd = figure(shared, "hostile")
    (left, bottom), (right, top) = (
        [float(number) for number in point.split(" ")]
        for point in odd.locator(".curve .line").get_attribute("d").removeprefix("M").split("L")
    )
    frame = odd.locator(".frame").get_attribute("d")
    edges = [float(number) for number in frame.replace("M", "").replace("V", " ").replace("H", " ").split()]
    assert [left, right] == pytest.approx([edges[0], edges[3]], abs=0.1), "a panel is as long as its curves"
    height = edges[2] - edges[1]
    assert [top, bottom] == pytest.approx([edges[1] + height * 0.04 / 1.08, edges[2] - height * 0.04 / 1.08], abs=0.2)


def test_the_list_of_figures_has_small_pictures_that_lead_to_them(shared):
    pictures = shared.locator(".gallery a")
    assert pictures.count() == 5, "none for a figure without anything measured"
    drawn = shared.evaluate(
        "[...document.querySelectorAll('.gallery use')].map(use => document.querySelector(use.getAttribute('href')))"
        ".filter(chart => chart.querySelector('.curve')).length"
    )
    assert drawn == 5
    boxes = [picture.bounding_box() for picture in pictures.locator("svg").all()]
    assert all(min(box["width"], box["height"]) > 50 for box in boxes)
    pictures.filter(has_text="Something").click()
    assert shared.url.endswith("#figure-begun")


def test_a_legend_click_hides_all_seeds_and_another_one_shows_them(opened):
    resnet = figure(opened(), "resnet20")
    box = resnet.get_by_role("checkbox", name="C-Nesterov", exact=True)
    box.click()
    assert curves(resnet) == 48 - 4, "three seeds and their median"
    assert not box.is_checked()
    box.press("Space")
    assert curves(resnet) == 48
    box.dblclick()
    assert curves(resnet) == 4, "a double click leaves this one alone"
    resnet.get_by_role("button", name="Show all curves").click()
    assert curves(resnet) == 48


def test_a_legend_click_hides_a_curve_in_all_panels(shared):
    surface = figure(shared, "loss-surface")
    surface.get_by_role("checkbox", name="SGD", exact=True).click()
    assert [curves(panel) for panel in surface.locator(".panel").all()] == [2, 2]


def test_axes_are_switched_in_all_panels(opened):
    resnet = figure(opened(), "resnet20")
    assert resnet.locator(".xtitle").all_text_contents() == ["iterations"] * 2
    assert 50 * POINTS < max(marks(resnet)) <= 100 * POINTS
    resnet.get_by_role("radio", name="seconds").click()
    assert resnet.locator(".xtitle").all_text_contents() == ["seconds"] * 2
    assert 0.15 * POINTS < max(marks(resnet)) <= 0.32 * POINTS
    resnet.get_by_role("radio", name="training accuracy").click()
    assert resnet.locator(".ytitle").all_text_contents() == ["training accuracy"] * 2
    assert max(marks(resnet, direction="y")) <= 1
    assert len(set(steps(marks(resnet, direction="y")))) == 1, "linear, as its axis says"
    resnet.get_by_role("radio", name="iterations").click()
    assert resnet.locator(".xtitle").all_text_contents() == ["iterations"] * 2


def steps(numbers):
    return [round(after - before, 9) for before, after in pairwise(numbers)]


def test_choices_of_other_panels_stay_as_they_are(shared):
    begun = figure(shared, "begun")
    begun.get_by_role("radio", name="another loss").click()
    begun.get_by_role("radio", name="another accuracy").click()
    assert begun.locator(".ytitle").all_text_contents() == ["another loss", "another accuracy"]
    checked = begun.locator("label:has([data-direction]:checked)").all_text_contents()
    assert checked == ["another loss", "another accuracy"]


def test_log_and_linear_scales_are_switched(opened):
    resnet = figure(opened(), "resnet20")
    log = resnet.get_by_role("group", name="Logarithmic scale")
    assert not log.is_visible(), "the first screen goes without"
    page = resnet.page
    page.add_style_tag(content="#lead [aria-label='Logarithmic scale'] { display: flex !important; }")
    vertical, horizontal = log.get_by_role("checkbox", name="vertical"), log.get_by_role("checkbox", name="horizontal")
    assert vertical.is_checked()
    assert all(after / before >= 1.99 for before, after in pairwise(marks(resnet, direction="y")))
    vertical.click()
    assert not vertical.is_checked()
    assert all(len(set(steps(marks(resnet, panel, "y")))) == 1 for panel in (0, 1))
    horizontal.click()
    assert all(after / before >= 1.99 for before, after in pairwise(marks(resnet)))


def test_no_log_scale_for_negative_numbers(shared):
    paths = figure(shared, "output-paths")
    assert paths.locator("[data-log=y]").is_disabled()
    assert paths.locator("[data-log=x]").is_enabled()


def test_dragging_zooms_and_the_zoom_outlives_a_legend_click(opened):
    page = opened()
    resnet = figure(page, "resnet20")
    before = marks(resnet)
    plot = resnet.locator(".plot").first
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 220, box["y"] + 160, steps=5)
    page.mouse.up()
    zoomed = marks(resnet)
    assert max(zoomed) - min(zoomed) < 0.6 * (max(before) - min(before))
    resnet.get_by_role("checkbox", name="C-Adam", exact=True).click()
    assert marks(resnet) == zoomed
    plot.get_by_role("button", name="Reset zoom").click()
    assert marks(resnet) == before


def test_hovering_tells_names_as_they_are(shared):
    odd = figure(shared, "hostile")
    start = odd.locator(".curve .line").get_attribute("d").removeprefix("M").split("L")[0]
    x, y = map(float, start.split(" "))
    odd.locator(".plot").hover(position={"x": x + 3, "y": y - 3})
    assert odd.locator(".tip b").text_content() == HOSTILE
    assert odd.locator(".tip").inner_text().endswith(": 3")
    assert odd.locator(".xtitle").text_content() == odd.locator(".ytitle").text_content() == HOSTILE
    assert odd.locator(".legend label").first.inner_text() == HOSTILE
    assert shared.locator("script").count() == 3


def edges(page):
    """Returns where the pictures are."""
    return page.locator(".plot .chart").evaluate_all("all => all.map(one => one.getBoundingClientRect().toJSON())")


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def stroke(part):
    """That of the first curve; one that is drawn anew at this moment has none, and is asked again."""
    for _ in range(100):
        found = part.locator(".curve .line").first.evaluate("line => getComputedStyle(line).stroke")
        if found:
            return found
        part.page.wait_for_timeout(50)
    raise AssertionError("no curve is drawn")


def test_the_system_decides_on_the_theme(opened):
    page = opened(**DESKTOP, color_scheme="dark")
    surface = figure(page, "loss-surface")
    dark = background(page), stroke(surface)
    page.emulate_media(color_scheme="light")
    light = background(page), stroke(surface)
    assert (dark[0], light[0]) == ("rgb(21, 24, 29)", "rgb(251, 250, 247)")
    assert dark[1] != light[1]


def test_a_phone_needs_no_sideways_scrolling_and_hits_every_button(opened):
    page = opened(**PHONE)
    for name in ("loss-surface", "output-paths", "resnet20", "hostile"):
        figure(page, name)
    for details in page.locator("details").all():
        details.evaluate("details => { details.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert max(edge["right"] for edge in edges(page)) <= 390
    for button in page.locator("main :is(button, label):visible").all():
        assert button.bounding_box()["height"] >= 40, button.inner_text()
    assert not cut_off(page)


def cut_off(page):
    """Returns the tables that are wider than their boxes."""
    return page.locator(".table-box").evaluate_all("all => all.filter(box => box.scrollWidth > box.clientWidth)")


def test_no_table_is_cut_off(shared):
    for details in shared.locator("details.runs").all():
        details.evaluate("details => { details.open = true; }")
    assert shared.locator(".table-box").count() == 4
    assert not cut_off(shared)


def test_a_click_on_a_column_head_sorts_and_what_is_missing_comes_last(shared):
    table = shared.locator("#experiment-hostile table")
    head = table.locator("th").nth(1)

    def column():
        return table.locator("tbody td:nth-child(2)").all_text_contents()

    assert column() == ["1", "–", "10", "2"]
    head.get_by_role("button").click()
    assert column() == ["1", "2", "10", "–"]
    assert head.get_attribute("aria-sort") == "ascending"
    head.get_by_role("button").click()
    assert column() == ["10", "2", "1", "–"]
    assert head.get_attribute("aria-sort") == "descending"


def test_statements_of_one_verdict_are_shown_alone(shared):
    listed = shared.locator(".statement:visible")
    assert listed.count() == 6
    shared.locator(".count.no").click()
    assert listed.count() == 1
    assert listed.locator(".verdict").inner_text().strip() == "does not hold"
    shared.locator(".count.no").click()
    assert listed.count() == 6


def test_paper_gets_everything_in_light_and_the_screen_is_as_before(opened):
    page = opened(**DESKTOP, color_scheme="dark")
    before = background(page)
    assert len(page.pdf(format="A4")) > 10_000
    assert curves(page) == 63, "all figures, also those that nobody has looked at"
    assert background(page) == before
    page.set_viewport_size({"width": 680, "height": 960})
    page.emulate_media(media="print", color_scheme="dark")
    assert background(page) == "rgb(255, 255, 255)"
    assert max(edge["right"] for edge in edges(page)) <= 680
