"""What several ranks cost, on paper: bytes, operations and time of a step for ResNet-50 and a 7B transformer.

Bytes are those of the library's own cost model (`consequent.ranks.traffic`), which the tests compare with what really
goes through sockets; who factorises what is the library's own choice (`consequent.ranks.ownership`). Times follow from
the assumptions there and below; nothing here was measured on so many GPUs.

    python benchmarks/ranks_on_paper.py
"""

from dataclasses import dataclass, field

from consequent.ranks.ownership import ON_GPUS, Division, Matrix, Rates, divided
from consequent.ranks.traffic import bytes_to_gather, bytes_to_sum, packed_length

GPUS = (8, 64, 256, 1024)
PER_NODE = 8
WITHIN_NODE = 300e9  # bytes per second that a GPU sends over NVLink
PRODUCTS = 400e12  # operations per second in half precision, TF32 at half of that


@dataclass(frozen=True)
class Layer:
    """A kind of layer: how often it occurs, and one GPU's rows and input numbers."""

    name: str
    count: int
    features: int
    outputs: int
    rows: int
    inputs: int


def resnet50(images: int) -> list[Layer]:
    """The convolutions of ResNet-50 for images of 224 × 224 pixels."""
    found = [Layer("7 × 7, 3 → 64", 1, 3 * 49, 64, images * 112**2, images * 3 * 224**2)]
    channels = 64
    for width, blocks, size in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        before = size if width == 64 else 2 * size
        out = 4 * width
        positions = images * size**2
        found.append(
            Layer(f"1 × 1, {channels} → {width}", 1, channels, width, images * before**2, images * channels * before**2)
        )
        found.append(Layer(f"1 × 1, {channels} → {out}", 1, channels, out, positions, images * channels * before**2))
        found.append(Layer(f"1 × 1, {out} → {width}", blocks - 1, out, width, positions, positions * out))
        found.append(Layer(f"3 × 3, {width} → {width}", blocks, 9 * width, width, positions, positions * width))
        found.append(Layer(f"1 × 1, {width} → {out}", blocks, width, out, positions, positions * width))
        channels = out
    return [*found, Layer("dense, 2048 → 1000", 1, 2049, 1000, images, images * 2048)]


def transformer(
    tokens: int, width: int = 4096, hidden: int = 11008, depth: int = 32, words: int = 32000
) -> list[Layer]:
    """The dense layers of a transformer of 7 · 10⁹ parameters."""
    return [
        Layer("q, k, v, out", 4 * depth, width, width, tokens, tokens * width),
        Layer("gate, up", 2 * depth, width, hidden, tokens, tokens * width),
        Layer("down", depth, hidden, width, tokens, tokens * hidden),
        Layer("words", 1, width, words, tokens, tokens * width),
    ]


@dataclass
class Cost:
    """Of one step on one GPU."""

    chosen: dict[str, int]  # how many layers gather their inputs, or rows
    sent: float = 0.0  # bytes
    if_summed: float = 0.0  # bytes, if all moments were
    gathered: float = 0.0  # bytes of inputs and rows
    products: float = 0.0  # operations for moments and for the corrected gradient
    unshared: float = 0.0  # operations for the factorisations of what is gathered, which every rank makes
    moments: list[Matrix] = field(default_factory=list)  # that are summed
    plain: float = 0.0  # operations of the forward and backward pass

    def division(self, gpus: int) -> Division:
        """Who factorises the moments."""
        return divided(tuple(self.moments), gpus, rates(gpus))

    def seconds(self, gpus: int) -> dict[str, float]:
        """Time for each part, none of them hidden behind another."""
        anyway = self.unshared / rates(gpus).factorising + self.gathered / rates(gpus).sending
        division = self.division(gpus)
        return {
            "plain": self.plain / PRODUCTS,
            "products": self.products / (PRODUCTS / 2),
            "repeated": anyway + division.repeated,
            "shared": anyway + min(division.shared, division.repeated),
        }


def rates(gpus: int) -> Rates:
    """The library's assumptions, and a faster network inside of a node."""
    return ON_GPUS._replace(sending=WITHIN_NODE) if gpus <= PER_NODE else ON_GPUS


def cost(layers: list[Layer], gpus: int) -> Cost:
    """The cheapest exact choice for every layer."""
    total = Cost({"inputs": 0, "rows": 0, "moment": 0})
    for layer in layers:
        rows, n = layer.rows * gpus, layer.features
        moment = bytes_to_sum(4 * packed_length(n), gpus)
        inputs = bytes_to_gather(2 * layer.inputs * gpus, gpus)
        total.plain += layer.count * 6 * layer.rows * n * layer.outputs
        if rows < n:
            sent = inputs + bytes_to_gather(2 * rows * layer.outputs, gpus)
            total.chosen["rows"] += layer.count
            total.gathered += layer.count * sent
            total.products += layer.count * (rows**2 * n + 2 * rows * n * layer.outputs)
            total.unshared += layer.count * rows**3
        else:
            sent = min(moment, inputs)
            total.chosen["moment" if moment <= inputs else "inputs"] += layer.count
            if inputs < moment:
                total.gathered += layer.count * inputs
                total.unshared += layer.count * n**3
            else:
                total.moments += layer.count * [Matrix(1, n, 4 * packed_length(n))]
            total.products += layer.count * (
                (rows if inputs < moment else layer.rows) * n**2 + 4 * n**2 * layer.outputs
            )
        total.sent += layer.count * sent
        total.if_summed += layer.count * moment
    return total


def main() -> None:
    """Prints the tables."""
    for title, layers in (
        ("ResNet-50, 32 images per GPU", resnet50(32)),
        ("Transformer of 7 · 10⁹ parameters, 8,192 tokens per GPU", transformer(8192)),
    ):
        print(f"\n{title}\n")
        print(
            "| GPUs | each sends | if all moments were summed | inputs / rows gathered, of layers | shared out "
            "| forward + backward | products | sending and factorising, all repeated | shared out |"
        )
        print("|---:|---:|---:|---|---:|---:|---:|---:|---:|")
        for gpus in GPUS:
            found = cost(layers, gpus)
            gathered = f"{found.chosen['inputs']} / {found.chosen['rows']} of {sum(found.chosen.values())}"
            shared = sum(owner is not None for owner in found.division(gpus).owners)
            times = " | ".join(f"{1e3 * seconds:,.1f} ms" for seconds in found.seconds(gpus).values())
            sizes = f"{found.sent / 1e6:,.0f} MB | {found.if_summed / 1e6:,.0f} MB"
            print(f"| {gpus:,} | {sizes} | {gathered} | {shared} | {times} |")


if __name__ == "__main__":
    main()
