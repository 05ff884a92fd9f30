"""`verbatim` whose server gives 1, 2, 3 and so on to requests without a seed, as it does with a
fake engine (to_params.count_seeds): a model's answers are then the same in every run."""

from __future__ import annotations

import gc


def run() -> None:
    gc.set_threshold(100_000, 20, 20)  # collections are an eighth of the time of a start
    from verbatim.cli.main import main
    from verbatim.server.api.common.to_params import count_seeds

    count_seeds()
    main()


if __name__ == "__main__":
    run()
