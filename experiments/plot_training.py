"""A training run against the released drafter's own curve: `python -m experiments.run plot RUN_FOLDER --out PICTURE.png`."""

import json
from pathlib import Path

RELEASED_CURVE = (
    (0.08, 1.08, 1.16),
    (0.12, 1.14, 1.24),
    (0.20, 1.23, 1.32),
    (0.32, 1.39, 1.42),
    (0.52, 1.53, 1.51),
    (0.87, 1.75, 1.61),
    (1.39, 1.90, 1.73),
    (2.23, 2.11, 1.82),
    (3.58, 2.44, 1.91),
    (5.72, 3.01, 2.02),
    (9.18, 3.43, 2.11),
    (11.02, 3.46, 2.12),
)
"""Of the released drafter's run on an H200, from its model card: million anchors, held-out accepted length at temperature 0 and 1."""


def read_curve(run: Path) -> list[tuple[float, float, float]]:
    """(million anchors, accepted length at temperature 0, at 1) of every held-out evaluation of a run.

    Raises:
      ValueError: the folder has no evaluation.
    """
    file = run / "held_out.jsonl"
    if not file.is_file() or not file.read_text().strip():
        raise ValueError(f"run is {run}; a folder with held_out.jsonl and at least one evaluation in it is needed")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        (record["anchors"] / 1e6, record["greedy"]["accepted_length_greedy"], record["sampled"]["accepted_length_sampled"])
        for record in records
    ]


def plot_training(run: Path, out: Path) -> None:
    """Loss and accept rates by step on the left, held-out accepted length by anchors beside the released run's on the right."""
    curve = read_curve(run)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    steps = [record["step"] for record in metrics]
    left.plot(steps, [record["loss"] for record in metrics], color="black", label="loss")
    left.set(xlabel="step", ylabel="loss")
    rates = left.twinx()
    for position in range(len(metrics[0]["accept_rate"])):
        rates.plot(steps, [record["accept_rate"][position] for record in metrics], label=f"draft {position + 1}", alpha=0.7)
    rates.set(ylabel="accept rate 1 - TV", ylim=(0, None))
    rates.legend(fontsize="small", loc="center right")
    for column, name, color in ((1, "temperature 0", "tab:blue"), (2, "temperature 1", "tab:orange")):
        right.plot(*zip(*((row[0], row[column]) for row in RELEASED_CURVE), strict=True), color=color, label=f"released run, {name}")
        right.plot(*zip(*((row[0], row[column]) for row in curve), strict=True), "o", color=color, label=f"this run, {name}")
    right.set(xlabel="million anchors", ylabel="held-out accepted length (uniform anchors)", xscale="log")
    right.legend(fontsize="small")
    unfinished = out.with_suffix(".unfinished.png")
    figure.savefig(unfinished, dpi=130)
    pyplot.close(figure)
    unfinished.replace(out)
