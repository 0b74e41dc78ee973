"""Conversations come out of JSONL files as they stand there, through a TFDS data set too, and a bad line is named."""

import dataclasses
import json
from typing import Any

import pytest

from dspark_jax.data import complete_chat, qwen_template
from dspark_jax.prompt_dataset import build_prompt_dataset, load_prompt_dataset
from dspark_jax.prompt_files import Message, read_conversations

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A model.\n"},
    {"role": "user", "content": "Really? \u00e9\u4e16\u2028"},
]


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def prompts(tmp_path):
    """A folder of two files, in folders of their own."""
    write(tmp_path / "prompts" / "b.jsonl", {"turns": ["One", "Two"], "category": "writing", "question_id": 81})
    write(
        tmp_path / "prompts" / "a" / "chats.jsonl",
        {"messages": CHAT, "id": "first", "extra": [1]},
        {"turns": ["Again"]},
        {"turns": ["Again"]},
        {"messages": [{"role": "user", "content": "Again"}]},
    )
    (tmp_path / "prompts" / "notes.txt").write_text("no prompts")
    return tmp_path / "prompts"


# JSONL


def test_turns_and_messages_become_conversations_in_the_order_of_files_and_lines(prompts):
    read = read_conversations([prompts])
    assert [(one.source, one.line) for one in read] == [*(("a/chats.jsonl", line) for line in (1, 2, 3, 4)), ("b.jsonl", 1)]
    assert [dataclasses.asdict(message) for message in read[0].messages] == CHAT
    assert read[0].system == (Message("system", "Be brief."),)
    assert read[0].user_turns == ("Who are you?", "Really? \u00e9\u4e16\u2028")
    assert read[4].messages == (Message("user", "One"), Message("user", "Two"))
    assert (read[4].system, read[4].category, read[0].category) == ((), "writing", "")
    assert complete_chat([dataclasses.asdict(message) for message in read[0].messages], qwen_template()) == CHAT


def test_ids_are_the_files_own_or_hashes_that_do_not_depend_on_the_place(prompts, tmp_path):
    ids = [conversation.id for conversation in read_conversations([prompts])]
    assert (ids[0], ids[4]) == ("first", "81")
    assert ids[2:4] == [ids[1] + "-2", ids[1] + "-3"]
    moved = write(tmp_path / "moved.jsonl", {"turns": ["Before"]}, {"turns": ["Again"]})
    assert read_conversations([moved])[1].id == ids[1] != read_conversations([moved])[0].id


def test_files_and_folders_are_read_one_after_another(prompts, tmp_path):
    other = write(tmp_path / "other.jsonl", {"turns": ["Other"]})
    sources = [conversation.source for conversation in read_conversations([other, prompts / "b.jsonl", prompts / "a"])]
    assert sources == ["other.jsonl", "b.jsonl", *["chats.jsonl"] * 4]


def test_blank_lines_and_a_missing_last_newline_are_no_prompts(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"turns": ["x"]}\r\n  \n{"turns": ["y"]}')
    assert [(one.line, one.user_turns) for one in read_conversations([path])] == [(2, ("x",)), (4, ("y",))]


def user(content):
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "is no JSON"),
        (b"\xff", "is no JSON"),
        ("[1]", r"the line is \[1\]; allowed: an object"),
        ({}, r"its fields is \[\]; allowed: one of turns and messages"),
        ({"turns": ["x"], "messages": [user("x")]}, r"its fields is \['messages', 'turns'\]; allowed: one of"),
        ({"turns": "x"}, "turns is 'x'; allowed: a list that is not empty"),
        ({"turns": []}, r"turns is \[\]; allowed: a list that is not empty"),
        ({"turns": ["x", 3]}, r"turns\[1\] is 3; allowed: a text that is not blank"),
        ({"turns": [" \n"]}, r"turns\[0\] is ' \\n'; allowed"),
        ({"messages": ["x"]}, r"messages\[0\] is 'x'; allowed: an object with role and content"),
        ({"messages": [user("x"), {"role": "gpt", "content": "y"}]}, r"messages\[1\].role is 'gpt'; allowed: system, user, assistant"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content is None; allowed: a text"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"messages\[0\].role is \['user'\]"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, r"messages\[0\].role is 'assistant'; allowed: an assistant turn behind a"),
        ({"messages": [*CHAT[:3], CHAT[2]]}, r"messages\[3\].role is 'assistant'"),
        ({"messages": [user("x"), CHAT[0]]}, r"messages\[1\].role is 'system'; allowed: a system turn first"),
        ({"messages": CHAT[:1]}, "messages has 1 turns; allowed: at least one of them by the user"),
        ({"turns": ["x"], "id": []}, r"id is \[\]; allowed: a name or a number"),
        ({"turns": ["x"], "id": True}, "id is True; allowed: a name or a number"),
        ({"turns": ["x"], "category": 1.5}, "category is 1.5; allowed"),
    ],
)
def test_a_bad_line_is_refused_by_file_line_and_field(tmp_path, line, error):
    path = write(tmp_path / "good" / "prompts.jsonl", {"turns": ["x"]}, {"turns": ["y"]})
    raw = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
    path.write_bytes(path.read_bytes() + raw + b"\n")
    with pytest.raises(ValueError, match=f"prompts.jsonl, line 3.{{1,2}}{error}"):
        read_conversations([tmp_path / "good"])


def test_one_name_for_two_conversations_is_refused_with_both_places(tmp_path):
    first = write(tmp_path / "a.jsonl", {"turns": ["x"], "id": 7})
    second = write(tmp_path / "b.jsonl", {"turns": ["y"]}, {"turns": ["z"], "id": "7"})
    with pytest.raises(ValueError, match="b.jsonl, line 2: id is '7', which a.jsonl, line 1 has already"):
        read_conversations([first, second])


def test_paths_with_nothing_to_read_are_refused(tmp_path):
    with pytest.raises(ValueError, match="paths is empty"):
        read_conversations([])
    with pytest.raises(ValueError, match="absent.jsonl'; allowed: a file, or a folder"):
        read_conversations([tmp_path / "absent.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty'; allowed: a file, or a folder with"):
        read_conversations([tmp_path / "empty"])
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="blank.jsonl.*allowed: files with at least one conversation"):
        read_conversations([tmp_path / "blank.jsonl"])


# TFDS


@pytest.fixture
def tfds():
    return pytest.importorskip("tensorflow_datasets", reason="needs the extra `data`")


def test_a_data_set_holds_the_conversations_as_the_files_do(tfds, prompts, tmp_path):
    folder = build_prompt_dataset([prompts], tmp_path / "data")
    assert load_prompt_dataset(folder) == read_conversations([prompts])
    assert load_prompt_dataset(folder, "train[3:]") == read_conversations([prompts])[3:]
    assert list(folder.glob("*.array_record*")) and not list(folder.glob("*.tfrecord*"))


def test_plain_tfds_reads_a_data_set_of_conversations(tfds, prompts, tmp_path):
    builder: Any = tfds.builder_from_directory(str(build_prompt_dataset([prompts], tmp_path / "data")))
    assert builder.info.splits["train"].num_examples == 5
    example = builder.as_data_source(split="train")[0]
    assert [role.decode() for role in example["messages"]["role"]] == ["system", "user", "assistant", "user"]


def test_a_data_set_is_written_once_and_other_prompts_are_another_one(tfds, prompts, tmp_path):
    folder = build_prompt_dataset([prompts], tmp_path / "data")
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert build_prompt_dataset([prompts], tmp_path / "data") == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    write(prompts / "c.jsonl", {"turns": ["Three"]})
    other = build_prompt_dataset([prompts], tmp_path / "data")
    assert other != folder and len(load_prompt_dataset(other)) == 6 and len(load_prompt_dataset(folder)) == 5


def test_a_folder_without_conversations_is_refused(tfds, tmp_path):
    with pytest.raises(ValueError, match="has no dataset_info.json"):
        load_prompt_dataset(tmp_path)
