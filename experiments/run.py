"""The launcher: `python -m experiments.run COMMAND ...`; `--help` behind any command lists its options."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro

from experiments.add_confidence import AddConfidence, add_confidence
from experiments.calibration_report import CalibrationSpeed, time_calibration
from experiments.card_agreement import Agreement, compare_with_card
from experiments.convert import export_model, import_model
from experiments.plot_training import plot_training
from experiments.presets import PRESETS
from experiments.recalibrate import recalibrate
from experiments.release_drafter import Release, ReleaseFiles, release_drafter
from experiments.train_drafter import train
from experiments.write_texts import WriteTexts, summary, write_texts


def train_command(
    preset: Annotated[str, tyro.conf.Positional],
    data: tuple[Path, ...] | None = None,
    out: Path | None = None,
    stop_step: int | None = None,
    batch_size: int | None = None,
    micro_batches: int | None = None,
    checkpoint_every: int | None = None,
    seed: int | None = None,
) -> None:
    """Train a drafter by a preset of `experiments/presets.py`; what is left out stays as the preset has it."""
    if preset not in PRESETS:
        raise ValueError(f"preset is {preset!r}; known: {', '.join(sorted(PRESETS))}")
    run = PRESETS[preset]()
    given = {"data": data, "out": out, "stop_step": stop_step, "batch_size": batch_size, "checkpoint_every": checkpoint_every, "seed": seed}
    run = dataclasses.replace(run, **{name: value for name, value in given.items() if value is not None})
    if micro_batches is not None:
        run = dataclasses.replace(run, train=dataclasses.replace(run.train, micro_batches=micro_batches))
    train(run)


def add_confidence_command(options: Annotated[AddConfidence, tyro.conf.OmitArgPrefixes]) -> None:
    """Train a confidence head onto a drafter that has none; the drafter stays as it is."""
    add_confidence(options)


def release_command(release: Annotated[Release, tyro.conf.OmitArgPrefixes]) -> None:
    """Measure a trained drafter, cut its draft vocabulary, calibrate its confidence and write it with its model card."""
    release_drafter(release)


def recalibrate_command(files: Annotated[ReleaseFiles, tyro.conf.OmitArgPrefixes]) -> None:
    """Fit the released drafter's calibration anew and choose it on held-out answers; the weights stay as they are."""
    recalibrate(files)


def calibration_speed_command(options: Annotated[CalibrationSpeed, tyro.conf.OmitArgPrefixes]) -> None:
    """Time the fit of sequential temperature scaling."""
    time_calibration(options)


def texts_command(config: Annotated[WriteTexts, tyro.conf.OmitArgPrefixes]) -> None:
    """Let the target answer the project's own prompts: texts to train on."""
    path = write_texts(config)
    print(f"{path}: " + ", ".join(f"{count} {name}" for name, count in summary(path).items()))


def plot_command(run: Annotated[Path, tyro.conf.Positional], out: Path) -> None:
    """Draw a training run beside the curve of the released drafter."""
    plot_training(run, out)


def agreement_command(config: Annotated[Agreement, tyro.conf.OmitArgPrefixes]) -> None:
    """Compare our evaluator with the released drafter's original card, on the card's own answers."""
    compare_with_card(config)


def import_command(
    source: Annotated[str, tyro.conf.Positional], out: Annotated[Path, tyro.conf.Positional], dtype: str = "float32"
) -> None:
    """Write a target or a drafter (folder or hub name) in Orbax's format."""
    print(import_model(source, out, dtype))


def export_command(source: Annotated[Path, tyro.conf.Positional], out: Annotated[Path, tyro.conf.Positional]) -> None:
    """Write an imported model as a folder of safetensors again."""
    print(export_model(source, out))


def main() -> int:
    """Read the command line; bad input ends with a line that says what is wrong."""
    commands = {
        "texts": texts_command,
        "train": train_command,
        "add-confidence": add_confidence_command,
        "plot": plot_command,
        "agreement": agreement_command,
        "release": release_command,
        "recalibrate": recalibrate_command,
        "calibration-speed": calibration_speed_command,
        "import": import_command,
        "export": export_command,
    }
    try:
        tyro.extras.subcommand_cli_from_dict(commands)
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
