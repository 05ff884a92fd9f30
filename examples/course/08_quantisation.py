"""Page 8 of the course: quantisation, bits per weight against error.

Quantises a random weight matrix to each block format and back, and measures the error of the
weights and of a matrix-vector product.

    python examples/course/08_quantisation.py [--plot quantisation.svg]
"""

from __future__ import annotations

import numpy as np
from course_plot import BLUE, arguments, panels, save

from verbatim.formats.conversion import dequantise, quantise
from verbatim.formats.registry import BLOCKS

TYPES = ("q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0", "f16")
ROWS, COLUMNS = 64, 1024


def main(words: list[str] | None = None) -> dict[str, tuple[float, float]]:
    """Type -> (bits per weight, relative error of a product)."""
    options = arguments(__doc__, words)
    random = np.random.default_rng(0)
    weights = random.normal(size=(ROWS, COLUMNS)).astype(np.float32) * 0.02
    x = random.normal(size=COLUMNS).astype(np.float32)
    out: dict[str, tuple[float, float]] = {}
    print("type   bits per weight  error of weights  error of a product")
    for name in TYPES:
        back = dequantise(name, quantise(name, weights), weights.shape)
        count, size = BLOCKS[name]
        error = np.linalg.norm(back - weights) / np.linalg.norm(weights)
        product = np.linalg.norm(back @ x - weights @ x) / np.linalg.norm(weights @ x)
        print(f"{name:5}  {8 * size / count:15.2f}  {error:15.2%}   {product:17.2%}")
        out[name] = (8 * size / count, float(product))
    if options.plot:
        figure, [one] = panels(1)
        for name, (bits, error) in out.items():
            if bits < 16:
                one.plot(bits, 100 * error, "o", color=BLUE)
                below = name.endswith("_k")  # two formats may have the same number of bits
                place = {"xytext": (5, -11 if below else 4), "textcoords": "offset points"}
                one.annotate(name.upper(), (bits, 100 * error), **place)
        one.set(xlabel="bits per weight", ylabel="error of a product, %", yscale="log")
        save(figure, options.plot)
    return out


if __name__ == "__main__":
    main()
