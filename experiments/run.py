"""The launcher: `python -m experiments.run COMMAND ...`; `--help` behind any command lists its options."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dspark_jax.sharding import start_multi_host
from experiments.ablations import chosen_sweep
from experiments.add_confidence import AddConfidence, add_confidence
from experiments.calibrate_drafter import CalibrateDrafter, calibrate_drafter
from experiments.calibration_report import CalibrationSpeed, time_calibration
from experiments.card_agreement import Agreement, compare_with_card
from experiments.convert import export_model, import_model
from experiments.overrides import overridden, parsed_overrides
from experiments.plot_training import plot_training
from experiments.presets import PRESETS
from experiments.recalibrate import recalibrate
from experiments.release_drafter import Release, ReleaseFiles, release_drafter
from experiments.sweep import parse_shard, run_sweep
from experiments.sweep_report import report
from experiments.train_drafter import train
from experiments.write_feature_cache import WriteFeatureCache, write_features
from experiments.write_texts import WriteTexts, summary, write_texts


def train_command(
    preset: Annotated[str, tyro.conf.Positional],
    data: tuple[Path, ...] | None = None,
    out: Path | None = None,
    stop_step: int | None = None,
    batch_size: int | None = None,
    micro_batches: int | None = None,
    checkpoint_every: int | None = None,
    keep: int | None = None,
    measure_every: int | None = None,
    mesh: tuple[int, int, int] | None = None,
    compute_dtype: Literal["float32", "bfloat16"] | None = None,
    lengths: tuple[int, ...] | None = None,
    packed: bool | None = None,
    features: Path | None = None,
    algorithm: Literal["adamw", "muon"] | None = None,
    seed: int | None = None,
    multi_host: bool = False,
    coordinator: str | None = None,
    num_hosts: int | None = None,
    host: int | None = None,
    set: tuple[str, ...] = (),
) -> None:
    """Train a drafter by a preset of `experiments/presets.py`; what is left out stays as the preset has it.

    Args:
      mesh: devices along data x fsdp x tensor.
      lengths: tokens that texts may be padded to, ascending.
      packed: put as many texts as fit into a row of the one length.
      features: folder of a cache that the command `cache` wrote for the same target, taps and texts; the target then reads none of them.
      algorithm: of the optimizer.
      measure_every: decode held-out prompts after every so many steps.
      multi_host: this is one of several hosts that execute the same command, on a TPU pod or under SLURM, where they find each other.
      coordinator: the same elsewhere: "address:port" of host 0, with `num_hosts` and the number of this `host`.
      set: any other field of the run by path, such as `drafter.num_layers=3 train.loss.ce=1.0 domains=maths,code`.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset is {preset!r}; known: {', '.join(sorted(PRESETS))}")
    if multi_host or (coordinator, num_hosts, host) != (None, None, None):
        start_multi_host(coordinator, num_hosts, host)
    run = PRESETS[preset]()
    of_run = {
        "data": data,
        "out": out,
        "stop_step": stop_step,
        "batch_size": batch_size,
        "checkpoint_every": checkpoint_every,
        "keep": keep,
        "measure_every": measure_every,
        "mesh": mesh,
        "lengths": lengths,
        "packed": packed,
        "features": features,
        "seed": seed,
    }
    of_step = {"micro_batches": micro_batches, "compute_dtype": compute_dtype}
    step = dataclasses.replace(run.train, **{name: value for name, value in of_step.items() if value is not None})
    if algorithm is not None:
        step = dataclasses.replace(step, optimizer=dataclasses.replace(step.optimizer, algorithm=algorithm))
    run = dataclasses.replace(run, train=step, **{name: value for name, value in of_run.items() if value is not None})
    train(overridden(run, parsed_overrides(run, set)))


def cache_command(config: Annotated[WriteFeatureCache, tyro.conf.OmitArgPrefixes]) -> None:
    """Let the target read the training texts of a preset once and store its features, for `train --features`."""
    manifest = write_features(config)
    print(f"{config.out}: {sum(manifest.shard_lengths)} texts; train on them with --features {config.out}")


def sweep_command(
    sweep: Annotated[str, tyro.conf.Positional],
    out: Path = Path("out/sweeps"),
    shard: str = "0/1",
    seeds: tuple[int, ...] = (),
    only: tuple[str, ...] = (),
    set: tuple[str, ...] = (),
    here: tuple[str, ...] = (),
) -> None:
    """Run a sweep of `experiments/ablations.py`, or this machine's share of it; what is finished is passed over.

    Args:
      out: folder of the records and the trainings.
      shard: place/number of this machine, such as 0/2 and 1/2.
      seeds: run every cell with each of them.
      only: the cells with these values of an axis alone, such as `drafter=dspark,dflash`.
      set: fields of all cells by path, such as `run.train.optimizer.total_steps=200`; those are other cells then.
      here: fields that hold for this machine and do not change the result, such as `run.features=out/small_features`.
    """
    chosen = chosen_sweep(sweep, set, only, seeds)
    run_sweep(chosen, out, parse_shard(shard), here=parsed_overrides(chosen.cells[0].config, here))


def sweep_report_command(
    sweep: Annotated[str, tyro.conf.Positional],
    out: Path = Path("out/sweeps"),
    to: Path | None = None,
    seeds: tuple[int, ...] = (),
    only: tuple[str, ...] = (),
    set: tuple[str, ...] = (),
    page: Path | None = None,
) -> None:
    """Table, CSV file and plot of a sweep's finished cells; `seeds`, `only` and `set` as they were given to `sweep`.

    Args:
      out: folder of the records.
      to: folder of the CSV file and the plot; `out` where absent.
      page: file with the markers `<!-- SWEEP -->`, between which the table is put.
    """
    report(chosen_sweep(sweep, set, only, seeds), out, out if to is None else to, page=page)


def add_confidence_command(options: Annotated[AddConfidence, tyro.conf.OmitArgPrefixes]) -> None:
    """Train a confidence head onto a drafter that has none; the drafter stays as it is."""
    add_confidence(options)


def release_command(release: Annotated[Release, tyro.conf.OmitArgPrefixes]) -> None:
    """Measure a trained drafter, cut its draft vocabulary, calibrate its confidence and write it with its model card."""
    release_drafter(release)


def calibrate_command(options: Annotated[CalibrateDrafter, tyro.conf.OmitArgPrefixes]) -> None:
    """Fit the survival of a drafter's drafts on held-out answers and store it beside the weights, which stay as they are."""
    calibrate_drafter(options)


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
        "cache": cache_command,
        "train": train_command,
        "sweep": sweep_command,
        "sweep-report": sweep_report_command,
        "add-confidence": add_confidence_command,
        "plot": plot_command,
        "agreement": agreement_command,
        "release": release_command,
        "calibrate": calibrate_command,
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
