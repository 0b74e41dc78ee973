"""Text survives the way to ids and back, and chats read as their models were trained on them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.tokenizers import Tokenizer, load_tokenizer
from tests.tiny_models import needs_gguf, needs_smollm2

library = pytest.importorskip("tokenizers", reason="needs the package tokenizers (extra `models`)")
pytest.importorskip("jinja2", reason="needs the package jinja2 (extra `models`)")

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two leading spaces and two trailing  ",
    "\n\n\ttabs\tand\r\nnewlines\n",
    "12345 + 67,890 = 80,235.00",
    "def f(x):\n    return {'a': x[0] ** 2}  # code\n",
    "naïve café — “quotes” … ½ ٣",
    "日本語と中文 한국어",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 😀",
    "e\u0301 is not \u00e9",
    "<|im_start|>user\nhi<|im_end|>\n",
    "\x00\x7f\u200b\ufffd",
]
CORPUS = [*TEXTS, "the cat sat on the mat and the dog sat on the log", "numbers 1 22 333 4444 and it's we'll they've"]


def trained_backend(normalizer=None):
    """A tiny byte-level BPE tokenizer."""
    backend = library.Tokenizer(library.models.BPE())
    backend.normalizer = normalizer
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def write_folder(folder: Path, backend=None, **config) -> Path:
    """A Hugging Face folder that holds nothing but a tokenizer."""
    folder.mkdir()
    (backend or trained_backend()).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_gguf(path: Path, pre: str = "gpt-2", model: str = "gpt2", backend=None, drop: tuple[str, ...] = (), **fields) -> Path:
    """The same tokenizer as GGUF metadata."""
    import gguf

    stored = json.loads((backend or trained_backend()).to_str())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].__getitem__)
    writer = gguf.GGUFWriter(path, "llama")
    content = {
        "model": model,
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in stored["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | fields
    for key, value in content.items():
        if key in drop:
            continue
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_string(f"tokenizer.ggml.{key}", value)
    writer.add_chat_template(CHATML)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("tokenizer") / "m"))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer("smollm2")


# --- round trips


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_went_in(tiny, text):
    assert tiny.decode(tiny.encode(text)) == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_as_it_went_in(tiny, text):
    assert tiny.decode(tiny.encode(text)) == text


def test_special_tokens_are_one_id_each_and_can_be_left_out(tiny):
    ids = tiny.encode("<|im_start|>user\nhi<|im_end|>")
    assert ids[0] == tiny.id_of("<|im_start|>") == 1 and ids[-1] == tiny.id_of("<|im_end|>") == 2
    assert tiny.decode(ids, skip_special=True) == "user\nhi"


def test_ids_that_are_no_tokens_are_refused(tiny):
    assert tiny.vocab_size == 400
    assert tiny.decode(np.array([5, 6])) == tiny.decode([5, 6])
    for wrong in (400, -1):
        with pytest.raises(ValueError, match=f"ids holds {wrong}, which is no token; allowed: 0..399"):
            tiny.decode([5, wrong])
    with pytest.raises(ValueError, match="token 'nonsense-token' is not in the vocabulary of 400 tokens"):
        tiny.id_of("nonsense-token")


# --- chats


def test_a_chat_is_rendered_with_the_default_system_turn_or_the_given_one(tiny):
    default = tiny.apply_chat_template([{"role": "user", "content": "hi"}])
    assert default == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "system", "content": "Shout."}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "HI"}]
    given_turns = tiny.apply_chat_template(messages, add_generation_prompt=False)
    assert given_turns == "<|im_start|>system\nShout.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHI<|im_end|>\n"
    assert tiny.encode_chat(messages, add_generation_prompt=False) == tiny.encode(given_turns)


def test_a_template_gets_special_tokens_options_and_the_functions_of_hugging_face(tmp_path):
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ tools }}"
    )
    folder = write_folder(tmp_path / "m")
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(folder)
    text = tokenizer.apply_chat_template([{"role": "tool"}, {"role": "user", "content": "<é>"}], enable_thinking=False, tools=["t"])
    assert text == '<|im_start|>{"role": "user", "content": "<é>"}<think></think>[\'t\']'


def test_a_named_template_list_means_its_default(tmp_path):
    named = [{"name": "tool_use", "template": "wrong"}, {"name": "default", "template": "right"}]
    assert load_tokenizer(write_folder(tmp_path / "m", chat_template=named)).apply_chat_template([]) == "right"


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (None, "chat_template is None: this model has none"),
        ("{% if %}", "chat_template is not valid Jinja"),
        ("{{ raise_exception('roles must alternate') }}", "the chat template refuses these messages: roles must alternate"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "the chat template refuses these messages: .*unsafe"),
        ("{{ 'a' + 1 }}", "the chat template refuses these messages: can only concatenate"),
        ("{{ messages.append(1) }}", "the chat template refuses these messages: .*append.*unsafe"),
    ],
)
def test_templates_that_are_absent_broken_or_refuse_raise(tmp_path, template, complaint):
    tokenizer = load_tokenizer(write_folder(tmp_path / "m", chat_template=template))
    with pytest.raises(ValueError, match=complaint):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


# --- stop ids


def test_the_generation_config_decides_what_stops_an_answer(tmp_path):
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load_tokenizer(folder).stop_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert load_tokenizer(folder).stop_ids == (2, 0)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert load_tokenizer(folder).stop_ids == (0,)
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).stop_ids == (7,)
    (folder / "config.json").unlink()
    assert load_tokenizer(folder).stop_ids == ()


# --- streams


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.integers(1, 5))
def test_a_stream_gives_whole_characters_that_add_up_to_the_text(tiny, text, step):
    ids = tiny.encode(text)
    stream, pieces = tiny.stream(), []
    for start in range(0, len(ids), step):
        stream, piece = stream.push(ids[start : start + step])
        pieces.append(piece)
        assert text.startswith("".join(pieces)), "what was given out stays true"
    assert "".join(pieces) + stream.rest == text


def test_a_stream_holds_a_character_back_until_its_last_byte(tiny):
    ids = [tiny.id_of(symbol) for symbol in "ðŁĺĢ"]  # the four bytes of 😀 in the byte-level alphabet
    assert tiny.decode(ids) == "😀"
    stream = tiny.stream()
    for i in ids[:3]:
        stream, piece = stream.push([i])
        assert piece == ""
    assert stream.rest == "\ufffd"
    assert stream.push([ids[3]])[1] == "😀"
    assert stream.push([])[1] == ""
    again, piece = stream.push(tiny.encode("a"))
    assert piece == "\ufffda" and again.rest == "", "bytes that can't become a character any more are given out"
    assert stream.push([ids[3]])[1] == "😀", "a stream is a value: pushing leaves it alone"


def test_a_stream_keeps_a_short_window(tiny):
    stream = tiny.stream()
    for i in tiny.encode("the cat sat on the mat " * 20):
        stream, _ = stream.push([i])
        assert len(stream.window) <= 2


def test_a_stream_may_leave_special_tokens_out(tiny):
    stream, text = tiny.stream(skip_special=True), ""
    for i in tiny.encode("<|im_start|>hi there<|im_end|>"):
        stream, piece = stream.push([i])
        text += piece
    assert text == "hi there"


# --- vocabularies in GGUF files


@needs_gguf
def test_a_gguf_vocabulary_gives_the_ids_of_the_hugging_face_folder(tmp_path):
    backend = trained_backend()
    folder = load_tokenizer(write_folder(tmp_path / "m", backend))
    file = load_tokenizer(write_gguf(tmp_path / "m.gguf", backend=backend))
    for text in CORPUS:
        assert file.encode(text) == folder.encode(text)
        assert file.decode(file.encode(text)) == text
    assert file.vocab_size == folder.vocab_size and file.stop_ids == (2,)
    assert file.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    messages = [{"role": "user", "content": "hi"}]
    assert file.encode_chat(messages) == folder.encode_chat(messages)
    assert file.decode(file.encode("<|im_start|>hi"), skip_special=True) == "hi"


@needs_gguf
@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", "Ġ1234", "Ġ", "Ġx"]),
        ("smollm", "it's 1234  x", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
        ("qwen2", "it'S 1234\n\n x!\n", ["it", "'S", "Ġ", "1", "2", "3", "4", "ĊĊ", "Ġx", "!Ċ"]),
        ("llama-bpe", "it's 1234\n\n x!\n", ["it", "'s", "Ġ", "123", "4", "ĊĊ", "Ġx", "!Ċ"]),
    ],
)
def test_text_is_cut_before_merging_as_the_model_was_trained(tmp_path, pre, text, pieces):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", pre))
    assert [piece for piece, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)] == pieces
    for text in CORPUS:
        if pre != "qwen2" or text.isascii():
            assert tokenizer.decode(tokenizer.encode(text)) == text


@needs_gguf
def test_qwen2_composes_its_characters(tmp_path):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", "qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


@needs_gguf
def test_a_begin_token_is_added_on_request_where_the_model_has_one(tmp_path):
    without = load_tokenizer(write_gguf(tmp_path / "a.gguf"))
    assert without.encode("hi", add_special=True) == without.encode("hi")
    stated = load_tokenizer(write_gguf(tmp_path / "b.gguf", add_bos_token=True))
    assert stated.encode("hi", add_special=True) == [1, *stated.encode("hi")]
    llama3 = load_tokenizer(write_gguf(tmp_path / "c.gguf", "llama-bpe"))
    assert llama3.encode("hi", add_special=True) == [1, *llama3.encode("hi")]


@needs_gguf
def test_user_defined_tokens_are_matched_whole_but_are_not_special(tmp_path):
    backend = trained_backend()
    tokens = json.loads(backend.to_str())["model"]["vocab"]
    sat = next(token for token in tokens if len(token) > 2 and token.isalpha() and token.isascii())
    kinds = [3 if token in SPECIAL else 4 if token == sat else 1 for token in sorted(tokens, key=tokens.__getitem__)]
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", backend=backend, token_type=kinds))
    ids = tokenizer.encode(f"x{sat}x")
    assert tokens[sat] in ids
    assert tokenizer.decode(ids, skip_special=True) == f"x{sat}x"


@needs_gguf
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": "bert"}, r"tokenizer.ggml.model is 'bert'; supported: 'gpt2' \(byte-level BPE\), 'llama' \(SentencePiece BPE\)"),
        ({"drop": ("model",)}, "tokenizer.ggml.model is None"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'; supported: 'smollm', 'qwen2', 'llama-bpe', 'gpt-2'"),
        ({"drop": ("pre",)}, "tokenizer.ggml.pre is ''; supported"),
        ({"drop": ("merges",)}, "has no tokenizer.ggml.merges"),
    ],
)
def test_a_vocabulary_that_is_not_supported_is_refused_by_name(tmp_path, changes, complaint):
    path = write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(ValueError, match=complaint):
        load_tokenizer(path)


def test_missing_and_damaged_tokenizer_files_are_refused_by_name(tmp_path):
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json is no tokenizer"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        load_tokenizer(folder)
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="is no file or folder"):
        load_tokenizer(folder)


# --- SmolLM2


@needs_gguf
@needs_smollm2
@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_text_comes_back_as_it_went_in(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text


@needs_gguf
@needs_smollm2
def test_smollm2_has_its_chat_template_and_stop_token(smollm2):
    assert smollm2.vocab_size == 49152 and smollm2.stop_ids == (2,)
    ids = smollm2.encode_chat([{"role": "user", "content": "What is 12 + 30?"}])
    assert smollm2.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
    )
    start = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198]
    assert ids == [*start, 1, 4093, 198, 1780, 314, 216, 33, 34, 1232, 216, 35, 32, 47, 2, 198, 1, 520, 9531, 198]


@needs_gguf
@needs_smollm2
def test_smollm2_prompts_of_the_recorded_text_are_made_again_id_by_id(smollm2, shared):
    """Maths and code prompts, which were tokenised from text (chat prompts were sampled, and need not be what a tokenizer writes)."""
    with np.load(shared / "smollm2" / "smollm2_onpolicy_0.npz") as data:
        tokens, offsets, answer_start, domain = (data[key] for key in ("tokens", "offsets", "answer_start", "domain"))
    rows = np.flatnonzero(domain < 2)[:600:2]
    system = smollm2.apply_chat_template([{"role": "user", "content": ""}]).split("<|im_start|>user")[0]
    for row in rows:
        ids = tokens[offsets[row] : offsets[row] + answer_start[row]].tolist()
        question = smollm2.decode(ids).removeprefix(f"{system}<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        assert smollm2.encode_chat([{"role": "user", "content": question}]) == ids
