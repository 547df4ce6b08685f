"""docs/playground.html in a real headless Chromium: its numbers are the library's, and people can use it."""

import pathlib
import re
import time
from itertools import pairwise

import pytest
import torch
from chromium import launched, needs_chromium, opener, own_pages, playwright
from torch import nn
from torch.nn.functional import cross_entropy

import consequent
from consequent.filters import nlms
from consequent.maths import bound, damping
from consequent_lab.paper.findings import Axis, Figure, Panel, Series
from consequent_lab.report.curve_styles import curve_styles

pytestmark = needs_chromium

PATH = pathlib.Path(__file__).parents[2] / "docs" / "playground.html"
DESKTOP = {"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce"}
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "reduced_motion": "reduce"}
SIZES = {360: PHONE, 768: {**DESKTOP, "viewport": {"width": 768, "height": 1000}}, 1280: DESKTOP}
RELATIVE, ABSOLUTE = {"damping": 0.1, "relative": True}, {"damping": 0.01, "relative": False}


@pytest.fixture(scope="module")
def browser():
    with launched() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def opening(browser):
    return opener(browser, PATH.as_uri())


@pytest.fixture
def opened(opening):
    with own_pages(opening, **DESKTOP) as open_own_page:
        yield open_own_page


@pytest.fixture(scope="module")
def shared(opening):
    """One page for tests that leave what is chosen on it alone."""
    return opening[0](**DESKTOP)


@pytest.fixture
def mathematics(shared):
    """Calls a function of the page's mathematical part; matrices go in and come out as tensors."""

    def call(expression, **arguments):
        given = {name: one.tolist() if isinstance(one, torch.Tensor) else one for name, one in arguments.items()}
        result = shared.evaluate(f"({{{', '.join(given)}}}) => {{ const c = consequent; return {expression}; }}", given)
        return torch.tensor(result, dtype=torch.float64) if isinstance(result, list) else result

    return call


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same(ours, theirs, rounding=1e-9):
    """Up to float64's rounding, unless it says otherwise."""
    torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding / 100)


def by_library(relative, damping):
    return {"relative_damping" if relative else "damping": damping}


# ---- its numbers ----


@pytest.mark.parametrize("side", ["samples", "features"])
@pytest.mark.parametrize(("samples", "features"), [(1, 1), (1, 5), (4, 9), (9, 4), (6, 6), (32, 24)])
def test_the_formula(mathematics, samples, features, side):
    inputs, output_grads = random(samples, features), random(samples, 3, seed=1)
    found = mathematics(
        "c.rowsOf(c.consequentialGradient(c.matrix(inputs), c.matrix(grads), 0.03))", inputs=inputs, grads=output_grads
    )
    assert_same(found, consequent.consequential_gradient(inputs, output_grads, 0.03, side=side))


@pytest.mark.parametrize("samples", [1, 5, 12])
def test_who_moves_whom(mathematics, samples):
    inputs = random(samples, 8)
    moved = mathematics("c.rowsOf(c.corrected(c.gram(c.matrix(inputs)), 0.2))", inputs=inputs)
    wishes = torch.eye(samples, dtype=torch.float64)
    assert_same(moved, inputs @ consequent.consequential_gradient(inputs, wishes, 0.2).T)
    assert_same(mathematics("c.rowsOf(c.gram(c.matrix(inputs)))", inputs=inputs), inputs @ inputs.T)


def test_a_damping_that_is_too_small_is_refused(mathematics):
    with pytest.raises(playwright.Error, match="λ = 0 is too small for these inputs: raise the damping"):
        mathematics("c.corrected(c.gram(c.matrix(inputs)), 0)", inputs=torch.zeros(3, 2, dtype=torch.float64))


def make_network(sizes):
    """A network as the page has it, and its weights with the bias in the last column."""
    layers = [nn.Linear(*pair, dtype=torch.float64) for pair in pairwise(sizes)]
    with torch.no_grad():
        for seed, layer in enumerate(layers):
            layer.weight.copy_(random(*layer.weight.shape, seed=seed) * (2 / layer.in_features) ** 0.5)
            layer.bias.copy_(0.1 * random(*layer.bias.shape, seed=100 + seed))
    modules = [module for layer in layers for module in (layer, nn.ReLU())][:-1]
    return nn.Sequential(*modules)


def matrices(model):
    return [
        torch.cat([layer.weight, layer.bias[:, None]], 1).detach() for layer in model if isinstance(layer, nn.Linear)
    ]


def train(model, optimizer, batches):
    """Losses before each step."""
    losses = []
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_in_page(shared, model, method, batches, **options):
    """The same there: losses, weights, and how many layers' steps were shortened."""
    return shared.evaluate(
        """({method, weights, batches, options}) => {
            let network = weights.map(consequent.matrix), shortened = 0;
            const losses = batches.map(([inputs, labels]) => {
                const done = consequent.trainingStep(method, network, consequent.matrix(inputs), labels, options);
                network = done.network;
                shortened += done.shortened;
                return done.loss;
            });
            return [losses, network.map(consequent.rowsOf), shortened];
        }""",
        {
            "method": method,
            "weights": [one.tolist() for one in matrices(model)],
            "batches": [[inputs.tolist(), labels.tolist()] for inputs, labels in batches],
            "options": options,
        },
    )


def assert_trains_alike(shared, model, optimizer, method, batches, rounding=1e-9, **options):
    losses, weights, shortened = train_in_page(shared, model, method, batches, **options)
    assert_same(torch.tensor(losses), torch.tensor(train(model, optimizer, batches)), rounding)
    for found, wanted in zip(weights, matrices(model), strict=True):
        assert_same(torch.tensor(found, dtype=torch.float64), wanted, rounding)
    return shortened


def make_batches(count, samples, features, classes):
    labels = torch.arange(samples) % classes
    return [(1 + random(samples, features, seed=seed), labels.roll(seed)) for seed in range(count)]


@pytest.mark.parametrize("chosen", [RELATIVE, ABSOLUTE], ids=["relative", "absolute"])
@pytest.mark.parametrize("samples", [3, 6, 7, 20], ids=lambda samples: f"{samples} samples")
def test_a_step_of_one_layer_with_its_bias(shared, chosen, samples):
    model = make_network([6, 4])
    optimizer = consequent.CSGD(model, lr=0.7, bound=None, **by_library(**chosen))
    batches = make_batches(1, samples, 6, 4)
    assert_trains_alike(shared, model, optimizer, "C-SGD", batches, rate=0.7, damping=chosen)


@pytest.mark.parametrize("samples", [1, 8, 32], ids=lambda samples: f"{samples} samples")
@pytest.mark.parametrize("chosen", [RELATIVE, ABSOLUTE], ids=["relative", "absolute"])
def test_steps_of_a_deep_network(shared, chosen, samples):
    model = make_network([2, 16, 16, 16, 16, 2])
    optimizer = consequent.CSGD(model, lr=0.05, bound=None, **by_library(**chosen))
    batches = make_batches(8, samples, 2, 2)
    assert_trains_alike(shared, model, optimizer, "C-SGD", batches, rate=0.05, damping=chosen)


def test_steps_that_are_bounded(shared):
    model = make_network([2, 16, 16, 16, 2])
    optimizer = consequent.CSGD(model, lr=0.8)
    batches = make_batches(8, 12, 2, 2)
    limits = {"rate": 0.8, "damping": RELATIVE, "bound": bound.DEFAULT, "rounding": 1e-6}  # it is found in float32
    assert assert_trains_alike(shared, model, optimizer, "C-SGD", batches, **limits) > 0


def test_plain_steps_of_a_deep_network(shared):
    model = make_network([2, 16, 16, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert_trains_alike(shared, model, optimizer, "SGD", make_batches(8, 12, 2, 2), rate=0.1, damping=RELATIVE)


def walk_by_library(method, weights, inputs, targets, *, rate, momentum=0.0, chosen=RELATIVE, batch_size, steps):
    """What ``walk`` of the page is compared with: weights [steps + 1, O, D]."""
    layer = nn.Linear(inputs.shape[1], targets.shape[1], bias=False, dtype=torch.float64)
    layer.weight.data.copy_(weights)
    if method == "C-SGD":
        optimizer = consequent.CSGD(layer, lr=rate, momentum=momentum, bound=None, **by_library(**chosen))
    else:
        optimizer = torch.optim.SGD(layer.parameters(), lr=rate, momentum=momentum)
    history = [layer.weight.detach().clone()]
    for step in range(steps):
        batch = torch.arange(step * batch_size, (step + 1) * batch_size) % len(inputs)
        optimizer.zero_grad()
        (0.5 * (layer(inputs[batch]) - targets[batch]).square().sum() / batch_size).backward()
        optimizer.step()
        history.append(layer.weight.detach().clone())
    return torch.stack(history)


@pytest.mark.parametrize("chosen", [RELATIVE, ABSOLUTE], ids=["relative", "absolute"])
@pytest.mark.parametrize(("method", "momentum"), [("SGD", 0), ("SGD", 0.8), ("C-SGD", 0), ("C-SGD", 0.5)])
@pytest.mark.parametrize(("samples", "features", "outputs"), [(5, 2, 1), (4, 9, 2)])
def test_paths_of_a_linear_layer(mathematics, chosen, method, momentum, samples, features, outputs):
    inputs, targets, weights = random(11, features), random(11, outputs, seed=1), random(outputs, features, seed=2)
    options = {"rate": 0.1, "momentum": momentum, "damping": chosen, "batchSize": samples, "steps": 20}
    found = mathematics(
        "c.walk(method, c.matrix(weights), c.matrix(inputs), c.matrix(targets), options).map(c.rowsOf)",
        **{"method": method, "weights": weights, "inputs": inputs, "targets": targets, "options": options},
    )
    settings = {"rate": 0.1, "momentum": momentum, "chosen": chosen, "batch_size": samples, "steps": 20}
    assert_same(found, walk_by_library(method, weights, inputs, targets, **settings))


@pytest.mark.parametrize("epsilon", [0, 0.3])
def test_nlms(mathematics, epsilon):
    inputs, targets, weights = random(20, 3), random(20, 2, seed=1), random(2, 3, seed=2)
    found = mathematics(
        "c.nlms(c.matrix(weights), c.matrix(inputs), c.matrix(targets), options).map(c.rowsOf)",
        **{"weights": weights, "inputs": inputs, "targets": targets},
        options={"rate": 0.7, "epsilon": epsilon, "steps": 20},
    )
    assert_same(found, nlms(inputs, targets, 0.7, damping=epsilon, weights=weights).weights)


def test_inputs_are_as_correlated_as_the_page_says(mathematics):
    inputs = mathematics("c.rowsOf(c.surfaceProblem({correlation: 0.7, seed: 3, optimum: [1, 2]}).inputs)")
    assert_same(inputs.T @ inputs / len(inputs), torch.tensor([[1, 0.7], [0.7, 1]], dtype=torch.float64))


# ---- what is shown of them ----


def turn(page, **dials):
    """Moves dials to a position, as dragging does."""
    for name, position in dials.items():
        page.locator(f"#{name}").fill(str(position))


def text_of(page, name):
    return page.locator(f"#{name}").text_content()


def state_of(page):
    return page.evaluate("({ ...playground.state, optimum: playground.OPTIMUM, momentum: playground.MOMENTUM })")


def test_it_begins_with_the_defaults_of_the_library(shared):
    chosen = state_of(shared)
    assert damping.Damping(chosen["damping"], chosen["relative"]) == damping.DEFAULT_OF_SGD
    assert shared.evaluate("playground.BOUND") == bound.DEFAULT
    assert chosen["bound"]


@pytest.mark.parametrize("relative", [True, False])
def test_the_paths_on_the_loss_surface_and_their_outcome(opened, relative):
    page = opened()
    turn(page, rate=-0.3, damping=-1.5, batch=5, correlation=0.8)
    if not relative:
        page.get_by_role("button", name="Absolute").click()
    chosen = state_of(page)
    assert (chosen["rate"], chosen["damping"], chosen["batch"]) == (0.5, 0.032, 5)
    problem = page.evaluate("""() => {
        const { inputs, targets } = consequent.surfaceProblem({ ...playground.state, optimum: playground.OPTIMUM });
        return [inputs, targets].map(consequent.rowsOf);
    }""")
    inputs, targets = (torch.tensor(one, dtype=torch.float64) for one in problem)
    paths = page.evaluate("playground.surfacePaths()")
    steps, start = len(paths["SGD"]) - 1, torch.tensor([chosen["start"]], dtype=torch.float64)
    settings = {"rate": 0.5, "batch_size": 5, "steps": steps, "chosen": {"damping": 0.032, "relative": relative}}
    squares = inputs.square().sum(1)
    stream = torch.arange(steps) % len(inputs)
    epsilon = 0.032 * squares.mean().item() if relative else 0.032
    expected = {
        "SGD": walk_by_library("SGD", start, inputs, targets, **settings),
        "Momentum": walk_by_library("SGD", start, inputs, targets, momentum=chosen["momentum"], **settings),
        "NLMS": nlms(inputs[stream], targets[stream], 0.5, damping=epsilon, weights=start).weights,
        "C-SGD": walk_by_library("C-SGD", start, inputs, targets, **settings),
    }
    optimum = torch.tensor(chosen["optimum"], dtype=torch.float64)
    for name, weights in expected.items():
        found = torch.tensor(paths[name], dtype=torch.float64)
        assert_same(found, weights[:, 0])
        away = (weights[:, 0] - optimum).norm(dim=1)
        far = (away > 0.01 * away[0]).nonzero()[-1].item()
        shown = text_of(page, f"outcome-{name.lower()}")
        assert shown == (f"there in {far + 1} steps" if far < steps else f"not in {steps} steps"), name


def test_the_outputs_of_a_mini_batch(shared):
    found = shared.evaluate("""() => {
        const { inputs, weights } = consequent.batchProblem({ ...playground.state, batchSize: playground.state.batch });
        return { ...playground.batchPaths(), inputs: consequent.rowsOf(inputs), weights: consequent.rowsOf(weights) };
    }""")
    inputs, targets, weights = (
        torch.tensor(found[name], dtype=torch.float64) for name in ("inputs", "targets", "weights")
    )
    settings = {"rate": state_of(shared)["rate"], "batch_size": len(inputs), "steps": 100}
    for which, method in (("plain", "SGD"), ("corrected", "C-SGD")):
        history = walk_by_library(method, weights, inputs, targets, **settings)
        outputs = torch.tensor(found[which]["outputs"], dtype=torch.float64)
        assert_same(outputs, inputs @ history.mT)
        left = ((outputs[-1] - targets).norm() / (outputs[0] - targets).norm()).item()
        told = "< 0.1 %" if left < 0.0005 else f"{round(100 * left)} %"
        assert text_of(shared, f"left-{which}") == f"{told} of the way left"


def test_the_network_on_the_page_trains_as_in_the_library(opened):
    page = opened()
    turn(page, rate=0, share=1)
    begun = page.evaluate("""() => {
        const { seed, depth, set } = playground.state, { uniform } = consequent.randomNumbers(seed + 1);
        const { inputs, labels, nets } = playground.training();
        const first = nets.plain.network.map(consequent.rowsOf);
        playground.learn(25);
        playground.measure();
        const { plain, corrected } = playground.training().nets;
        return { inputs: consequent.rowsOf(inputs), labels, first, order: consequent.shuffled(labels.length, uniform),
                 losses: [plain.loss, corrected.loss], shortened: corrected.shortened,
                 right: [plain.right, corrected.right] };
    }""")
    assert begun["shortened"] > 0
    chosen = state_of(page)
    inputs, labels = torch.tensor(begun["inputs"], dtype=torch.float64), torch.tensor(begun["labels"])
    order = torch.tensor(begun["order"])[: 25 * chosen["batch"]].split(chosen["batch"])
    for place, rate in enumerate((0.1, 1.0)):
        model = make_network([2, *[16] * chosen["depth"], 2])
        layers = [layer for layer in model if isinstance(layer, nn.Linear)]
        for layer, matrix in zip(layers, begun["first"], strict=True):
            layer.weight.data, layer.bias.data = torch.tensor(matrix, dtype=torch.float64).split(
                [layer.in_features, 1], 1
            )
            layer.bias.data = layer.bias.data.flatten()
        optimizer = consequent.CSGD(model, lr=rate) if place else torch.optim.SGD(model.parameters(), lr=rate)
        train(model, optimizer, [(inputs[batch], labels[batch]) for batch in order])
        outputs = model(inputs)
        assert begun["losses"][place] == pytest.approx(cross_entropy(outputs, labels).item(), rel=1e-6)
        assert begun["right"][place] == pytest.approx((outputs.argmax(1) == labels).double().mean().item())


def test_methods_have_the_colours_of_the_lab(shared):
    names = {"c-sgd": "C-SGD", "sgd": "SGD", "momentum": "SGD with momentum", "nlms": "NLMS"}
    axis = Axis("x", "x")
    series = [Series(name, {"x": [0.0]}, style="line+markers") for name in names.values()]
    lab = curve_styles(Figure("surface", "", "", [Panel("", series, [axis], [axis])]))
    text = PATH.read_text()
    for variable, name in names.items():
        light, dark = re.search(rf"--{variable}: light-dark\((#\w+), (#\w+)\);", text).groups()
        assert (light, dark) == (lab[name].colour.light, lab[name].colour.dark)
        assert bool(lab[name].dash == "solid") == (name == "C-SGD")


# ---- what people do with it ----


def pictures(page):
    """What is drawn on each canvas, as text."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('canvas')].map((c) => [c.id, c.toDataURL()]))"
    )


def changed(before, after):
    return {name for name in before if before[name] != after[name]}


def test_it_is_small_and_refers_to_files_that_exist():
    assert PATH.stat().st_size < 150_000
    links = re.findall(r'href="([^"#:]+)"', PATH.read_text())
    assert len(links) >= 4
    assert [link for link in links if not (PATH.parent / link).exists()] == []


def test_the_keyboard_turns_every_dial_and_the_pictures_follow(opened):
    page = opened()
    batch = {"outputs-plain", "outputs-corrected", "matrix-plain", "matrix-corrected"}
    follows = {
        "rate": {"surface", "outputs-plain", "outputs-corrected"},
        "damping": {"surface", "outputs-corrected", "matrix-corrected"},
        "batch": {"surface"} | batch,
        "correlation": {"surface", "regions-plain", "regions-corrected", "losses"} | batch,
    }
    notes = [text_of(page, "note")]
    for name, expected in follows.items():
        dial = page.locator(f"#{name}")
        before, told = pictures(page), text_of(page, f"{name}-shown")
        dial.focus()
        for _ in range(4):
            dial.press("ArrowRight")
        assert changed(before, pictures(page)) == expected, name
        assert text_of(page, f"{name}-shown") != told
        assert dial.get_attribute("aria-valuetext") == text_of(page, f"{name}-shown")
        notes.append(text_of(page, "note"))
    assert len(set(notes)) == 5, "each dial says what it means"


def test_everything_has_a_name(shared):
    names = shared.evaluate("""[...document.querySelectorAll('input, canvas, button')].map((one) =>
        one.getAttribute('aria-label') || one.labels?.[0]?.textContent || one.textContent)""")
    assert len(names) > 30
    assert all(name.strip() for name in names)
    live = shared.locator(".dials output")
    assert live.count() == 4
    assert {one.get_attribute("aria-live") for one in live.all()} == {"polite"}


@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_screen_needs_sideways_scrolling_and_all_are_drawn_finely(opened, width, scheme):
    page = opened(**SIZES[width], color_scheme=scheme, device_scale_factor=2)
    pictures(page)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    sizes = page.locator("canvas").evaluate_all(
        "all => all.map((one) => [one.width, one.clientWidth, one.height, one.clientHeight])"
    )
    for across, wide, down, high in sizes:
        assert (across, down) == (2 * wide, 2 * high)
        assert wide > 100
    assert (
        page.evaluate("getComputedStyle(document.body).backgroundColor")
        == {
            "light": "rgb(251, 250, 247)",
            "dark": "rgb(21, 24, 29)",
        }[scheme]
    )


def test_on_a_phone_the_dials_stay_within_reach(opened):
    page = opened(**PHONE)
    page.locator("#network-title").scroll_into_view_if_needed()
    for name in ("rate", "damping", "batch", "correlation"):
        box = page.locator(f"#{name}").bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= 740
    for button in page.locator("main button:visible, .chips button").all():
        assert button.bounding_box()["height"] >= 40, button.inner_text()


def test_the_start_is_dragged_and_moved_by_keys(opened):
    page = opened()
    handle = page.locator("#start")
    before, box = pictures(page), handle.bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 120, box["y"] + 60, steps=4)
    page.mouse.up()
    after = pictures(page)
    assert changed(before, after) == {"surface"}
    moved = handle.bounding_box()
    assert (moved["x"] - box["x"], moved["y"] - box["y"]) == (pytest.approx(100, abs=2), pytest.approx(40, abs=2))
    handle.press("ArrowLeft")
    assert changed(after, pictures(page)) == {"surface"}
    for _ in range(100):
        handle.press("Shift+ArrowUp")
    assert handle.bounding_box()["y"] >= page.locator("#surface").bounding_box()["y"] - 20


def test_a_path_is_hidden_and_shown_again(opened):
    page = opened()
    button = page.locator("#legend button", has_text="Momentum")
    before = pictures(page)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert changed(before, pictures(page)) == {"surface"}
    button.press("Enter")
    page.mouse.move(0, 0)
    assert changed(before, pictures(page)) == set()


def test_with_one_sample_nlms_and_c_sgd_are_one(opened):
    page = opened()
    page.get_by_role("button", name="One sample").click()
    paths = page.evaluate("playground.surfacePaths()")
    assert_same(torch.tensor(paths["NLMS"]), torch.tensor(paths["C-SGD"]))
    assert text_of(page, "outcome-nlms") == text_of(page, "outcome-c-sgd")
    assert text_of(page, "damping-symbol") == "λ"
    page.get_by_role("button", name="Default").click()
    assert text_of(page, "damping-symbol") == "ρ"
    assert text_of(page, "rate-shown") == "0.3"


def test_one_stride_is_one_step(opened):
    page = opened()
    page.get_by_role("button", name="One stride").click()
    pictures(page)
    assert text_of(page, "outcome-c-sgd") == "there in 1 step"
    assert text_of(page, "left-corrected") == "< 0.1 % of the way left"
    page.locator("#step").fill("1")
    pictures(page)
    assert text_of(page, "left-corrected") == "< 0.1 % of the way left"
    assert float(text_of(page, "left-plain").split()[0]) > 50


def test_a_pair_of_samples_is_pointed_at(opened):
    page = opened()
    pictures(page)
    quiet = text_of(page, "told")
    matrix = page.locator("#matrix-plain")
    matrix.scroll_into_view_if_needed()
    side = matrix.bounding_box()["width"] / 8
    matrix.hover(position={"x": 6.5 * side, "y": 2.5 * side})
    pictures(page)
    moves = page.evaluate(
        "[playground.batchPaths().plain, playground.batchPaths().corrected].map((one) => one.moves.values[2 * 8 + 6])"
    )
    plain, corrected = (f"{value:.2f}".replace("-", "−") for value in moves)
    assert (
        text_of(page, "told")
        == f"What sample 3 wants moves sample 7 by {plain} of that with SGD, by {corrected} with C-SGD."
    )
    page.mouse.move(0, 0)
    pictures(page)
    assert text_of(page, "told") == quiet
    page.locator("#matrix-corrected").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    pictures(page)
    assert text_of(page, "told").startswith("What sample 2 wants moves itself by ")
    page.keyboard.press("Escape")
    pictures(page)
    assert text_of(page, "told") == quiet


def step_of(page):
    return page.evaluate("playground.training().step")


def wait_for_steps(page, steps):
    """Asks again and again: the page forbids playwright's own way, which evaluates text in it."""
    end = time.monotonic() + 30
    while step_of(page) < steps:
        assert time.monotonic() < end
        page.wait_for_timeout(20)


def test_the_network_is_started_paused_and_reset(opened):
    page = opened()
    page.locator("#regions-plain").scroll_into_view_if_needed()
    run, before = page.locator("#run"), pictures(page)
    run.click()
    assert run.text_content() == "Pause"
    wait_for_steps(page, 60)
    run.click()
    rested, drawn = step_of(page), pictures(page)
    assert changed(before, drawn) == {"regions-plain", "regions-corrected", "losses"}
    page.wait_for_timeout(200)
    assert step_of(page) == rested
    page.get_by_role("button", name="Step", exact=True).click()
    assert step_of(page) == rested + 1
    page.get_by_role("button", name="Reset").click()
    assert step_of(page) == 0
    assert changed(before, pictures(page)) == set(), "the same first weights"
    page.get_by_role("button", name="Rings").click()
    assert changed(before, pictures(page)) == {"regions-plain", "regions-corrected", "losses"}


def test_it_starts_by_itself_when_it_is_seen_unless_motion_is_not_wanted(opened):
    moving, still = opened(viewport=DESKTOP["viewport"]), opened()
    for page in (moving, still):
        assert step_of(page) == 0
        page.locator("#regions-plain").scroll_into_view_if_needed()
    wait_for_steps(moving, 10)
    still.wait_for_timeout(300)
    assert step_of(still) == 0
    moving.evaluate("scrollTo(0, 0)")
    moving.wait_for_timeout(300)
    out_of_sight = step_of(moving)
    moving.wait_for_timeout(300)
    assert step_of(moving) == out_of_sight


def test_what_diverges_says_so(opened):
    page = opened()
    turn(page, rate=0.4, correlation=0.9, share=4)
    page.locator("#bound").uncheck()
    pictures(page)
    assert text_of(page, "outcome-sgd") == text_of(page, "outcome-c-sgd") == "diverges"
    page.evaluate("playground.learn(400); playground.measure()")
    page.get_by_role("button", name="Step", exact=True).click()
    pictures(page)
    assert "diverged" in text_of(page, "state-plain")


def test_the_theme_is_switched_and_remembered(opened):
    page = opened(**DESKTOP, color_scheme="light")
    before = pictures(page)
    page.get_by_role("button", name="Dark").click()
    assert changed(before, pictures(page)) == set(before)
    page.reload()
    pictures(page)
    assert page.get_by_role("button", name="Dark").get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="Dark").click()
    assert changed(before, pictures(page)) == set()
