"""Conversations as a TFDS data set: written as ArrayRecord files from JSONL, read back by number, without TensorFlow.

The module can be imported without TFDS, which belongs to the extra `data`: the builder's class is made when it is first asked for.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.model_files import require
from dspark_jax.prompt_files import Conversation, Message, check_messages, read_conversations

NAME, SPLIT = "prompt_conversations", "train"


def _tfds() -> Any:
    return require("tensorflow_datasets", "data", "a data set of prompts")


@functools.cache
def conversations_builder() -> Any:
    """The class of the `tfds.core.GeneratorBasedBuilder` over conversations.

    Its keyword argument `paths` names the JSONL files and folders that `read_conversations` takes; the others are TFDS's. The config's
    name is a hash of what the files hold, so that other prompts are another data set.
    """
    tfds = _tfds()

    class PromptConversations(tfds.core.GeneratorBasedBuilder):
        """Prompts and chats, a conversation an example, in the order of their files."""

        name = NAME
        VERSION = tfds.core.Version("1.0.0")
        # Where TFDS would look for checksums of downloads, of which there are none; its search needs a package that it does not require.
        code_path = None

        def __init__(self, *, paths: Sequence[str | Path], **options: Any) -> None:
            self._conversations = read_conversations([str(path) for path in paths])
            content = json.dumps([dataclasses.asdict(conversation) for conversation in self._conversations])
            config = tfds.core.BuilderConfig(name=hashlib.sha256(content.encode()).hexdigest()[:16])
            super().__init__(config=config, file_format="array_record", **options)

        def _info(self) -> Any:
            text = tfds.features.Text
            return tfds.core.DatasetInfo(
                builder=self,
                description="Prompts and chats from JSONL files.",
                features=tfds.features.FeaturesDict(
                    {
                        "id": text(),
                        "source": text(),
                        "line": tfds.features.Scalar(dtype=np.dtype(np.int64)),
                        "category": text(),
                        "messages": tfds.features.Sequence({"role": text(), "content": text()}),
                    }
                ),
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            return {SPLIT: self._generate_examples()}

        def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
            for number, conversation in enumerate(self._conversations):
                example = dataclasses.asdict(conversation)
                yield number, {**example, "messages": list(example["messages"])}

    return PromptConversations


def build_prompt_dataset(paths: Sequence[str | Path], data_dir: str | Path) -> Path:
    """Write the conversations of JSONL files as a data set; one that is there already stays.

    Args:
      paths: as for `read_conversations`.
      data_dir: folder of data sets; each has a folder inside.

    Returns:
      the folder of the data set, for `load_prompt_dataset` or `tfds.builder_from_directory`.

    Raises:
      ValueError: naming file, line and field of the first bad line.
    """
    builder = conversations_builder()(paths=paths, data_dir=str(data_dir))
    builder.download_and_prepare(file_format="array_record")
    return Path(builder.data_dir)


def load_prompt_dataset(folder: str | Path, split: str = SPLIT) -> list[Conversation]:
    """The conversations of a data set, in their order.

    Args:
      split: in TFDS's notation: "train", "train[:100]", "train[90%:]".

    Raises:
      ValueError: there is no data set of conversations in the folder, or what one says is out of order.
    """
    if not (Path(folder) / "dataset_info.json").is_file():
        raise ValueError(f"{folder} has no dataset_info.json; allowed: the folder of a data set of conversations")
    builder = _tfds().builder_from_directory(str(folder))
    missing = {"id", "source", "line", "category", "messages"} - set(builder.info.features)
    if missing:
        raise ValueError(
            f"{folder} holds the data set {builder.name!r} without {', '.join(sorted(missing))}; allowed: one of conversations"
        )
    return [_conversation(example) for example in builder.as_data_source(split=split)]


def _conversation(example: dict[str, Any]) -> Conversation:
    turns = example["messages"]
    pairs = zip(turns["role"], turns["content"], strict=True)
    messages = tuple(Message(role.decode(), content.decode()) for role, content in pairs)
    name, source, line = example["id"].decode(), example["source"].decode(), int(example["line"])
    if (problem := check_messages(messages)) is not None:
        raise ValueError(f"{name} from {source}, line {line}: {problem}")
    return Conversation(name, messages, source, line, example["category"].decode())


__all__ = ["build_prompt_dataset", "conversations_builder", "load_prompt_dataset"]
