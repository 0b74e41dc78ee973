"""Training texts from nothing but the target: the project's own prompts, answered by the target itself.

Maths problems come from a seeded grammar, code tasks from the standard library's own docstrings, and chat prompts from the target:
given only the system turn and the user header it writes what a user might ask (Magpie). Every stage is a log that an interruption
leaves whole; started again, the run goes on where it stopped.
"""

import dataclasses
from pathlib import Path

import numpy as np

from dspark_jax.data import chatml_template, complete_chat, save_token_sequences
from dspark_jax.tokenizers import load_tokenizer
from experiments.answers import (
    RECOMMENDED_TEMPERATURE,
    RECOMMENDED_TOP_P,
    AnswerConfig,
    AnswerLog,
    answer_requests,
    fill_answers,
    sampled_turns,
    sequences_from_answers,
    turn_requests,
)
from experiments.prompts import chat_prompts, code_prompts, maths_prompts, user_header
from experiments.served_answers import serve_with


@dataclasses.dataclass(frozen=True)
class WriteTexts:
    """How many texts, and how they are sampled.

    Attributes:
      target: folder, GGUF file or name of the model that answers.
      out: the run's folder; `texts.npz` in it is what `train --data` takes.
      prompts_per_domain: training prompts of each domain; a sixteenth as many held-out ones come on top.
      temperatures: each prompt is answered once at each of them; the first is what the target's makers recommend.
      top_p: share of the probability that is sampled from, at temperatures below 1.
      max_length: tokens of prompt and answer.
      max_turn_tokens: tokens after which a user turn that the target writes is cut.
      batch_size: requests answered at a time.
    """

    target: str = "smollm2"
    out: Path = Path("out/smollm2_texts")
    prompts_per_domain: int = 64
    temperatures: tuple[float, ...] = (RECOMMENDED_TEMPERATURE, 0.0, 1.0)
    top_p: float = RECOMMENDED_TOP_P
    max_length: int = 512
    max_turn_tokens: int = 192
    batch_size: int = 32
    seed: int = 0


def write_texts(config: WriteTexts) -> Path:
    """Sample the prompts and their answers; gives the path of `texts.npz`.

    Raises:
      ValueError: a count below 1, or whatever the stages say of their input.
    """
    if config.prompts_per_domain < 1:
        raise ValueError(f"prompts_per_domain is {config.prompts_per_domain}; it must be at least 1")
    config.out.mkdir(parents=True, exist_ok=True)
    tokenizer, template = load_tokenizer(config.target), chatml_template()
    stop_ids = tuple(sorted({*tokenizer.stop_ids, tokenizer.id_of("<|im_start|>"), tokenizer.id_of("<|endoftext|>")}))
    sampling = AnswerConfig(
        temperature=1.0,
        max_length=config.max_length,
        max_new_tokens=config.max_turn_tokens,
        stop_ids=stop_ids,
        closing_id=tokenizer.id_of("<|im_end|>"),
        seed=config.seed,
    )
    write = serve_with(config.target, stop_ids, config.max_length, config.top_p, config.batch_size)

    def render(messages: list[dict[str, str]]) -> str:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=False)

    held_out = max(1, config.prompts_per_domain // 16)
    header = tokenizer.encode(user_header(render, template))
    turns = AnswerLog.open(config.out / "turns.jsonl")
    turns = fill_answers(turns, turn_requests(header, 2 * (config.prompts_per_domain + held_out)), write, sampling)
    chat = chat_prompts(sampled_turns(turns.read()), tokenizer.decode, stop_ids, seed=config.seed)
    prompts = []
    for split, count in (("train", config.prompts_per_domain), ("heldout", held_out)):
        prompts += maths_prompts(count, split, seed=config.seed)
        prompts += code_prompts(split, seed=config.seed)[:count]
        prompts += [prompt for prompt in chat if prompt.split == split][:count]

    def encode(text: str) -> list[int]:
        return tokenizer.encode_chat(complete_chat([{"role": "user", "content": text}], template))

    log = AnswerLog.open(config.out / "answers.jsonl")
    for temperature in config.temperatures:
        settings = dataclasses.replace(sampling, temperature=temperature, max_new_tokens=config.max_length)
        log = fill_answers(log, answer_requests(prompts, encode), write, settings)
    path = config.out / "texts.npz"
    save_token_sequences(path, sequences_from_answers(sorted(log.read(), key=lambda answer: answer.id)))
    return path


def summary(path: Path) -> dict[str, int]:
    """Counts of a file of texts, for the terminal."""
    with np.load(path) as archive:
        return {
            "sequences": len(archive["domain"]),
            "held_out": int(archive["heldout"].sum()),
            "tokens": len(archive["tokens"]),
            "answer_tokens": int((archive["answer_end"] - archive["answer_start"]).sum()),
        }
