"""The report's page in a real headless Chromium, opened from disk as a reader would."""

import pytest
from chromium import launched, needs_chromium, opener, playwright
from sample_findings import HOSTILE, findings

from consequent_lab.report.check import checked
from consequent_lab.report.page import page as make_page

pytestmark = needs_chromium

DESKTOP = {"viewport": {"width": 1400, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
POINTS = 30
POINT = (("xaxis", 2), ("yaxis", 4))  # of the hostile curve


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_bytes(make_page(checked(findings(POINTS))).encode())
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
    """Opens a page of a test's own."""
    open_page, check = opening
    pages = []

    def open_own_page(**options):
        pages.append(open_page(**(options or DESKTOP)))
        return pages[-1]

    yield open_own_page
    for page in pages:
        page.context.close()
    check()


@pytest.fixture(scope="module")
def common(opening):
    """One page for tests that leave each other's parts alone: opening it takes seconds."""
    open_page, _ = opening
    return open_page(**DESKTOP, permissions=["clipboard-read", "clipboard-write"])


@pytest.fixture
def shared(common, opening):
    _, check = opening
    yield common
    check()


def figure(page, name):
    """Scrolls to a figure, which has it drawn."""
    found = page.locator(f"#figure-{name}")
    found.scroll_into_view_if_needed()
    found.locator(".scatterlayer").first.wait_for()
    return found


def curves(part):
    return part.locator(".scatterlayer .trace").count()


def state(part, expression, panel=0):
    """Asks plotly about a panel."""
    return part.locator(".plot").nth(panel).evaluate(f"plot => plot.{expression}")


def test_all_figures_are_drawn(opened):
    page = opened()
    expected = {"loss-surface": 3 + 3, "output-paths": 4 + 2, "resnet20": 36 + 12, "hostile": 1, "begun": 2}
    for name, count in expected.items():
        assert curves(figure(page, name)) == count
        for path in page.locator(f"#figure-{name} .trace path.js-line").all():
            assert path.get_attribute("d").startswith("M"), "a line that goes somewhere"
    assert page.locator(".contourlayer .contour").count() == 2
    assert page.get_by_text("No runs yet.").count() == 1 + 1, "for the whole of a figure, and for a panel"


def test_a_legend_click_hides_all_seeds_and_another_one_shows_them(opened):
    resnet = figure(opened(), "resnet20")
    button = resnet.get_by_role("button", name="C-Nesterov", exact=True)
    button.click()
    assert curves(resnet) == 48 - 4, "three seeds and their median"
    assert button.get_attribute("aria-pressed") == "false"
    button.press("Enter")
    assert curves(resnet) == 48
    button.dblclick()
    assert curves(resnet) == 4, "a double click leaves this one alone"
    resnet.get_by_role("button", name="Show all curves").click()
    assert curves(resnet) == 48


def test_a_legend_click_hides_a_curve_in_all_panels(shared):
    surface = figure(shared, "loss-surface")
    surface.get_by_role("button", name="SGD", exact=True).click()
    assert [curves(panel) for panel in surface.locator(".panel").all()] == [2, 2]


def test_axes_are_switched_in_all_panels(opened):
    resnet = figure(opened(), "resnet20")
    assert resnet.locator(".xtitle").all_text_contents() == ["iterations"] * 2
    assert state(resnet, "data[0].x").pop() == 100 * POINTS
    resnet.get_by_role("button", name="seconds").click()
    assert resnet.locator(".xtitle").all_text_contents() == ["seconds"] * 2
    assert state(resnet, "data[0].x").pop() == pytest.approx(0.3 * POINTS)
    assert state(resnet, "_fullLayout.xaxis.range")[1] < 100 * POINTS
    resnet.get_by_role("button", name="training accuracy").click()
    assert resnet.locator(".ytitle").all_text_contents() == ["training accuracy"] * 2
    assert max(filter(None, state(resnet, "data[0].y"))) <= 1
    assert state(resnet, "_fullLayout.yaxis.type") == "linear", "as its axis says"
    resnet.get_by_role("button", name="iterations").click()
    assert resnet.locator(".xtitle").all_text_contents() == ["iterations"] * 2


def test_choices_of_other_panels_stay_as_they_are(shared):
    begun = figure(shared, "begun")
    begun.get_by_role("button", name="another loss").click()
    begun.get_by_role("button", name="another accuracy").click()
    assert begun.locator(".ytitle").all_text_contents() == ["another loss", "another accuracy"]
    pressed = begun.locator("[data-column][aria-pressed=true]").all_text_contents()
    assert pressed == ["another loss", "another accuracy"]


def test_log_and_linear_scales_are_switched(opened):
    resnet = figure(opened(), "resnet20")
    log = resnet.get_by_role("group", name="Logarithmic scale")
    vertical, horizontal = log.get_by_role("button", name="vertical"), log.get_by_role("button", name="horizontal")
    assert vertical.get_attribute("aria-pressed") == "true"
    assert state(resnet, "_fullLayout.yaxis.type") == "log"
    vertical.click()
    assert vertical.get_attribute("aria-pressed") == "false"
    assert [state(resnet, "_fullLayout.yaxis.type", panel) for panel in (0, 1)] == ["linear"] * 2
    horizontal.click()
    assert state(resnet, "_fullLayout.xaxis.type") == "log"


def test_no_log_scale_for_negative_numbers(shared):
    paths = figure(shared, "output-paths")
    assert paths.locator("[data-log=y]").is_disabled()
    assert paths.locator("[data-log=x]").is_enabled()


def test_dragging_zooms_and_the_zoom_outlives_a_legend_click(opened):
    page = opened()
    resnet = figure(page, "resnet20")
    before = state(resnet, "_fullLayout.xaxis.range")
    box = resnet.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 80, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 160, steps=5)
    page.mouse.up()
    page.wait_for_timeout(500)
    zoomed = state(resnet, "_fullLayout.xaxis.range")
    assert zoomed[1] - zoomed[0] < 0.6 * (before[1] - before[0])
    resnet.get_by_role("button", name="C-Adam", exact=True).click()
    assert state(resnet, "_fullLayout.xaxis.range") == zoomed


def test_hovering_tells_names_as_they_are(shared):
    odd = figure(shared, "hostile")
    x, y = (state(odd, f"_fullLayout.{axis}._offset + plot._fullLayout.{axis}.d2p({value})") for axis, value in POINT)
    odd.locator(".plot").hover(position={"x": x, "y": y})
    odd.locator(".hovertext").first.wait_for()
    assert HOSTILE in odd.locator(".hovertext").first.text_content()
    assert odd.locator(".xtitle").text_content() == odd.locator(".ytitle").text_content() == HOSTILE
    assert odd.locator(".legend button").first.inner_text() == HOSTILE
    assert shared.locator("script").count() == 3


def test_nothing_offers_to_send_data_away(shared):
    buttons = figure(shared, "resnet20").locator(".modebar-btn")
    titles = {button.get_attribute("data-title") for button in buttons.all()}
    assert titles == {"Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"}


def edges(page):
    """Returns where the pictures are."""
    return page.locator(".plot .main-svg").evaluate_all("all => all.map(one => one.getBoundingClientRect().toJSON())")


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def stroke(part):
    return part.locator(".trace path.js-line").first.evaluate("line => getComputedStyle(line).stroke")


def test_theme_switch_reaches_the_figures_and_is_remembered(opened):
    page = opened()
    surface = figure(page, "loss-surface")
    light = background(page), stroke(surface)
    page.get_by_role("button", name="Dark").click()
    dark = background(page), stroke(surface)
    assert all(one != other for one, other in zip(light, dark, strict=True))
    page.reload()
    assert (background(page), stroke(figure(page, "loss-surface"))) == dark
    page.get_by_role("button", name="Dark").click()
    assert (background(page), stroke(figure(page, "loss-surface"))) == light


def test_the_system_decides_on_the_theme_at_first(opened):
    page = opened(**DESKTOP, color_scheme="dark")
    assert background(page) == "rgb(21, 24, 29)"
    assert page.get_by_role("button", name="Dark").get_attribute("aria-pressed") == "true"
    page.emulate_media(color_scheme="light")
    assert background(page) == "rgb(251, 250, 247)"


def test_a_phone_needs_no_sideways_scrolling_and_hits_every_button(opened):
    page = opened(**PHONE)
    for name in ("loss-surface", "output-paths", "resnet20", "hostile"):
        figure(page, name)
    for details in page.locator("details").all():
        details.evaluate("details => { details.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert max(edge["right"] for edge in edges(page)) <= 390
    for button in page.locator("main button:visible, header button").all():
        assert button.bounding_box()["height"] >= 40, button.inner_text()
    box = page.locator("#experiment-resnet20 .table-box")
    assert box.evaluate("box => box.scrollWidth > box.clientWidth"), "a wide table scrolls inside its own box"


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


def test_commands_are_copied(shared):
    command = shared.locator("#experiment-hostile .command")
    command.get_by_role("button").click()
    playwright.expect(command.get_by_role("button")).to_have_text("Copied")
    assert shared.evaluate("navigator.clipboard.readText()") == HOSTILE


def test_the_overview_shows_statements_of_one_verdict_and_leads_to_them(shared):
    listed = shared.locator(".summary-list li[data-mark]:visible")
    assert listed.count() == 6
    shared.locator(".count.no").click()
    assert listed.count() == 1
    listed.get_by_role("link").click()
    assert shared.url.endswith("#loss-surface-statement-2")
    assert shared.locator(":target .verdict").inner_text().strip() == "does not hold"
    shared.locator(".count.no").click()
    assert listed.count() == 6


def test_paper_gets_everything_in_light_and_the_screen_is_as_before(opened):
    page = opened(**DESKTOP, color_scheme="dark")
    before = background(page)
    assert len(page.pdf(format="A4")) > 10_000
    assert curves(page) == 63, "all figures, also those that nobody has looked at"
    assert background(page) == before
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert background(page) == "rgb(251, 250, 247)"
    assert max(edge["width"] for edge in edges(page)) <= 680
