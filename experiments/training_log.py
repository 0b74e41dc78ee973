"""What a training run tells: JSON lines, TensorBoard, and a progress bar or plain lines in the terminal."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

COLUMNS = (
    TextColumn("train"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
    TextColumn("{task.fields[note]}"),
)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; none where it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record by names that TensorBoard groups: "held_out/greedy/agreement/1" is the first of a list."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list | tuple):
            yield from scalars({str(place): item for place, item in enumerate(value, start=1)}, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)


class TrainingLog:
    """The records of a run in its folder: `metrics.jsonl`, `held_out.jsonl` and, with the package tensorboardX, `tensorboard/`.

    A context; the progress bar lives as long as it does. Of several hosts the first one alone writes and prints.
    """

    def __init__(self, folder: Path, console: Console, done: int, last: int, writes: bool = True):
        """A log that goes on behind step `done`, whatever it held of later ones, up to step `last`."""
        self.folder, self.console, self._last, self._writes = folder, console, last, writes
        self._board: Any = None
        self.anchors = 0.0
        if writes:
            for file in ("metrics.jsonl", "held_out.jsonl"):
                _drop_behind(folder / file, done)
            self.anchors = sum(record["blocks"] for record in read_lines(folder / "metrics.jsonl"))
            self._board = _board(folder / "tensorboard", done)
        self._progress = Progress(*COLUMNS, console=console, disable=not writes)
        self._task = self._progress.add_task("train", total=last, completed=done, note="")

    def __enter__(self) -> "TrainingLog":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()
        if self._board is not None:
            self._board.close()

    def step(self, step: int, record: Mapping[str, Any]) -> None:
        """Numbers of one step: those of `train.train_step`, and what the loop adds."""
        self.anchors += float(record["blocks"])
        known = {name: _rounded(value) for name, value in record.items() if value is not None}
        self._write("metrics", {"step": step, "anchors": self.anchors} | known)
        rates = " ".join(f"{rate:.2f}" for rate in record["accept_rate"])
        speed = f"{record['seconds']:.1f} s, {record['tokens_per_second']:,.0f} tokens/s"
        used = record.get("flops_utilisation")
        speed += "" if used is None else f", {used:.0%} of the peak"
        note = f"loss {record['loss']:.3f}  accept {rates}  accepted length ~{record['accepted_length']:.2f}  {speed}"
        self._progress.update(self._task, completed=step, note=note)
        if not self.console.is_terminal:
            self.say(f"step {step}/{self._last}  {note}")

    def held_out(self, step: int, record: Mapping[str, Any]) -> None:
        """Estimates on held-out texts by temperature, and under `measured` accepted lengths of real decoding where there are any."""
        self._write("held_out", {"step": step, "anchors": self.anchors} | dict(record))
        greedy, sampled = record["greedy"]["accepted_length_greedy"], record["sampled"]["accepted_length_sampled"]
        note = f"accepted length {greedy:.3f} at temperature 0, {sampled:.3f} at 1"
        if "measured" in record:
            note += f"; decoding: {record['measured']['greedy']:.3f}, {record['measured']['sampled']:.3f}"
        self.say(f"held out after {step} steps, {self.anchors / 1e6:.2f} M anchors: {note}")

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        if self._writes:
            self.console.print(text)

    def _write(self, kind: str, record: dict[str, Any]) -> None:
        if not self._writes:
            return
        with (self.folder / f"{kind}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        if self._board is not None:
            for name, value in scalars(record, f"{kind}/"):
                self._board.add_scalar(name, value, record["step"])


def _rounded(value: Any) -> Any:
    return value if isinstance(value, str | int) else np.round(np.asarray(value, np.float64), 6).tolist()


def _board(folder: Path, done: int) -> Any:
    """A writer for TensorBoard that hides what an earlier run wrote behind step `done`; None without the package."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=done + 1 if folder.exists() else None)


def _drop_behind(path: Path, step: int) -> None:
    """Forget the records behind a checkpoint, which a resumed run writes again."""
    if path.exists():
        kept = [record for record in read_lines(path) if record["step"] <= step]
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(json.dumps(record) + "\n" for record in kept))
        unfinished.replace(path)
