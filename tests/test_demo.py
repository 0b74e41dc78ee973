"""The demo on tiny models: what it shows, what it reports, and what it refuses."""

import dataclasses
import io
import itertools
import json
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from dspark_jax.calibrate import ConstantSurvival, RawSurvival, SurvivalByTemperature, TemperatureScaled, survival_to_dict
from dspark_jax.calibration_identity import CalibratorIdentity, drafter_fingerprint
from dspark_jax.data import DOMAINS
from dspark_jax.decode import RoundStats
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.drafters.mtp import MTPConfig, MTPDrafter
from dspark_jax.protocols import FlatTokens
from dspark_jax.tokenizers import Tokenizer, load_tokenizer
from dspark_jax.weights import LoadedDrafter, save_drafter
from experiments import demo, demo_report, demo_setup, profile_steps
from experiments.demo import Streamer
from experiments.demo_report import ALL, Answered, check_line, figures_of, report_json, rich_table, write_picture
from experiments.demo_rounds import Difference, Kind, Recording, first_difference, record, round_kinds
from experiments.demo_setup import DemoOptions, Job, calibration_notes, continuation_of, jobs_of, settled
from experiments.profile_steps import ProfileOptions, StepProfile
from tests.tiny_models import LLAMA, TINY_DRAFTER, random_params, write_target

VOCAB = LLAMA["vocab_size"]
BLOCK = 3
TINY_BLOCK = 2
STOP = 1

DRAFTER = DSparkConfig(block_size=TINY_BLOCK, **TINY_DRAFTER)

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def write_tokenizer(folder) -> Tokenizer:
    """Words w0, w1, ...; anything else is unknown."""
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": f"w{STOP}", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with its tokenizer, a drafter for it, and a drafter for a wider one."""
    path = tmp_path_factory.mktemp("demo")
    write_target(path / "target", max_position_embeddings=512)
    write_tokenizer(path / "target")
    for name, config in (("drafter", DRAFTER), ("wider", dataclasses.replace(DRAFTER, hidden_size=48))):
        drafter = DSparkDrafter(config)
        save_drafter(path / name, drafter, random_params(drafter, seed=1))
    return path


def stats(drafts, verified: int, accepted: int, next_id: int, emitted: int | None = None) -> RoundStats:
    """One request's round."""
    emitted = accepted + 1 if emitted is None else emitted
    fields: dict[str, Any] = {
        "active": np.array([True]),
        "anchor": np.array([0], np.int32),
        "drafts": np.array([drafts], np.int32).reshape(1, -1),
        "confidence_logits": np.zeros((1, len(drafts)), np.float32),
        "cut": np.array([emitted < accepted + 1]),
        "probe": np.array([False]),
        "drafted": np.array(True),
    }
    for name, value in (("verified", verified), ("num_accepted", accepted), ("next_id", next_id), ("emitted", emitted)):
        fields[name] = np.array([value], np.int32)
    return RoundStats(**fields)


def recording(*rounds: RoundStats, seconds: float = 0.5, first: int = 9) -> Recording:
    tokens = [token for each in rounds for token, _ in round_kinds(each)]
    return Recording((first, *tokens), rounds, (seconds,) * len(rounds))


# A rejection, everything accepted, nothing verified, and a round cut by a stop token after one of two accepted drafts.
ROUNDS = (stats([5, 6, 7], 3, 1, 8), stats([5, 6, 7], 2, 2, 4), stats([5, 6, 7], 0, 0, 3), stats([5, STOP, 7], 3, 2, 8, emitted=2))


def test_the_tokens_of_a_round_are_told_by_how_they_came_about():
    accepted, correction, bonus = Kind.ACCEPTED, Kind.CORRECTION, Kind.BONUS
    assert [round_kinds(each) for each in ROUNDS] == [
        [(5, accepted), (8, correction)],
        [(5, accepted), (6, accepted), (4, bonus)],
        [(3, bonus)],
        [(5, accepted), (STOP, accepted)],
    ]


def test_figures_follow_their_definitions():
    """Accepted length leaves cut rounds out; conditional acceptance counts the rounds that verified and reached a position."""
    one = Answered("maths", 0.0, recording(*[stats([], 0, 0, 3)] * 8, seconds=0.25), recording(*ROUNDS))
    figures = figures_of([one, one], BLOCK)
    assert (figures.answers, figures.rounds, figures.cut_rounds) == (2, 6, 2)
    assert figures.accepted_length == pytest.approx((2 + 3 + 1) / 3)
    assert figures.conditional_acceptance == (1.0, 0.5, None)
    assert figures.verified == pytest.approx((3 + 2 + 0 + 3) / 4)
    assert figures.tokens_per_second_plain == pytest.approx(4.0)
    assert figures.tokens_per_second_speculative == pytest.approx(8 / 2.0)
    assert figures.ratio == pytest.approx(1.0)


def test_an_answer_that_its_first_token_ends_has_no_figures():
    nothing = Recording((STOP,), (), ())
    figures = figures_of([Answered("chat", 0.0, nothing, nothing)], BLOCK)
    assert figures.accepted_length is None and figures.ratio is None and figures.conditional_acceptance == (None,) * BLOCK


STAIRCASE = StepProfile(tuple(range(1, 9)), (0.029, 0.041, 0.042, 0.042, 0.042, 0.051, 0.051, 0.051), 0.0055)


@pytest.mark.parametrize(
    ("profile", "options", "ladder"),
    [
        (STAIRCASE, {}, (1, 5, 8)),
        (STAIRCASE, {"max_buckets": 2}, (5, 8)),
        (STAIRCASE, {"max_buckets": 1}, (8,)),
        (StepProfile((1, 2, 4), (0.03, 0.03, 0.03), 0.0), {}, (4,)),
        (StepProfile((1, 2, 4), (0.03, 0.05, 0.04), 0.0), {}, (1, 4)),
        (StepProfile((8,), (0.03,), 0.0), {}, (8,)),
    ],
)
def test_the_ladder_stands_at_the_edges_of_the_staircase(profile, options, ladder):
    assert profile.ladder(**options) == ladder


def test_no_other_ladder_of_that_size_rounds_up_for_less():
    rng = np.random.default_rng(0)
    for _ in range(20):
        seconds = tuple(np.sort(rng.uniform(0.01, 0.1, 6)).tolist())
        profile = StepProfile(tuple(range(1, 7)), seconds, 0.0)

        def cost(ladder, seconds=seconds):
            return sum(seconds[next(size for size in ladder if size >= need) - 1] for need in range(1, 7))

        best = min(cost((*chosen, 6)) for chosen in itertools.combinations(range(1, 6), 2))
        assert cost(profile.ladder(max_buckets=3, min_gain=0.0)) == pytest.approx(best)


def test_the_curve_of_a_ladder_has_the_measured_costs():
    curve = STAIRCASE.curve((1, 5, 8))
    assert (
        curve.seconds(1) == pytest.approx(0.0345)
        and curve.seconds(2) == pytest.approx(0.0475)
        and curve.seconds(6) == pytest.approx(0.0565)
    )


def test_a_stored_profile_is_kept_while_a_new_measurement_agrees(tmp_path):
    """Relative costs decide: a machine that is slower throughout gives the same schedule, and the same compiled program."""
    file = tmp_path / "rounds.json"
    assert settled(STAIRCASE, file, "key") == STAIRCASE
    slower = StepProfile(STAIRCASE.tokens, tuple(2.1 * each for each in STAIRCASE.target_seconds), 2 * STAIRCASE.draft_seconds)
    assert settled(slower, file, "key") == STAIRCASE
    assert settled(slower, file, "another key") == slower
    steeper = StepProfile(STAIRCASE.tokens, (0.020, *STAIRCASE.target_seconds[1:]), STAIRCASE.draft_seconds)
    assert settled(steeper, file, "key") == steeper == settled(steeper, file, "key")


@pytest.mark.slow
def test_the_profile_of_rounds_is_measured_in_both_ways(folder, tmp_path):
    options = ProfileOptions(target=str(folder / "target"), drafter=folder / "drafter", out=tmp_path / "p.json", max_len=16, repetitions=1)
    found = profile_steps.run(options, console())
    stored = json.loads((tmp_path / "p.json").read_text())
    for name in ("by_layer", "whole"):
        assert stored[name]["tokens"] == [1, 2, 3] and min(stored[name]["target_seconds"]) > 0 and stored[name]["draft_seconds"] > 0
    assert list(stored["plain"]["seconds"]["float32"]) == ["1", "2"]
    assert {(each["out"], each["in"]) for each in stored["products"]} == {(32, 32), (16, 32), (48, 32), (32, 48)}
    assert found["device"]["platform"] == "cpu" and found["ladder"][-1] == 3


def loaded_drafter(survival=None, **changes) -> LoadedDrafter:
    return LoadedDrafter(DSparkDrafter(dataclasses.replace(DRAFTER, **changes)), {}, None, survival)


def test_survival_and_continuation_come_from_beside_the_drafter():
    model = SurvivalByTemperature((0.0, 1.0), (TemperatureScaled((1.0, 1.1)), RawSurvival()))
    stored = {**survival_to_dict(model), "continuation": {"0.0": [0.8, 0.7], "1.0": [0.6, 0.5]}}
    loaded = loaded_drafter(stored)
    assert loaded.survival_model(continuation_of(loaded, (0.0,))) == model
    assert continuation_of(loaded, (0.0,)) == (0.8, 0.7)
    assert continuation_of(loaded, (0.9,)) == (0.6, 0.5)
    assert continuation_of(loaded, (0.0, 1.0)) == (0.7, 0.6)


def test_a_drafter_without_calibration_gets_raw_confidence_or_constants():
    loaded = loaded_drafter()
    usual = continuation_of(loaded, (0.0,))
    assert len(usual) == TINY_BLOCK and loaded.survival_model(usual) == RawSurvival()
    without_head = loaded_drafter(confidence_head=False)
    constants = without_head.survival_model(usual)
    assert isinstance(constants, ConstantSurvival) and constants.continuation == pytest.approx(usual)
    chain = MTPDrafter(MTPConfig(31, 16, 24, 4, 2, 8, num_target_layers=4, block_size=2))
    without_any = LoadedDrafter(chain, {}, None, None)
    assert isinstance(without_any.survival_model(), ConstantSurvival), "a drafter that knows of no confidence at all"
    assert continuation_of(without_any, (0.0,)) == (0.65, 0.65)


def test_where_the_calibration_need_not_hold_the_reader_is_told_once():
    """Another temperature and no record are notes, as is a drafter without calibration; another drafter is refused."""
    bare = loaded_drafter()
    mark = drafter_fingerprint(bare.drafter, bare.params, bare.draft_ids)
    fitted = loaded_drafter(survival_to_dict(RawSurvival(), CalibratorIdentity(mark, (0.0, 1.0))))
    assert calibration_notes(fitted, (0.0, 1.0)) == ()
    (note,) = calibration_notes(fitted, (0.0, 0.7))
    assert "requests are drawn at [0.7]" in note
    (note,) = calibration_notes(loaded_drafter(survival_to_dict(RawSurvival())), (0.0,))
    assert "does not say which drafter" in note
    (note,) = calibration_notes(bare, (0.0,))
    assert "without calibration" in note
    with pytest.raises(ValueError, match="drafter is .* fitted for, abc"):
        calibration_notes(loaded_drafter(survival_to_dict(RawSurvival(), CalibratorIdentity("abc", (0.0,)))), (0.0,))


def test_jobs_show_every_domain_and_temperature_before_they_repeat():
    jobs = jobs_of(DemoOptions(prompts_per_domain=3))
    assert [(job.domain, job.temperature) for job in jobs[:6]] == [(domain, at) for at in (0.0, 1.0) for domain in DOMAINS]
    assert sum(job.temperature == 0 for job in jobs) == 9 and sum(job.temperature == 1 for job in jobs) == 6
    assert [DemoOptions(max_new_tokens=65).budget_of(job) for job in jobs[::3][:2]] == [65, 33]
    assert len({(job.text, job.temperature) for job in jobs}) == 15
    assert DemoOptions(temperature=1.0).budget_of(Job("chat", "Why?", 1.0)) == DemoOptions().max_new_tokens
    assert {job.temperature for job in jobs_of(DemoOptions(temperature=0.7))} == {0.7}
    assert [(job.text, job.temperature) for job in jobs_of(DemoOptions(prompt="Why?", temperature=1.0))] == [("Why?", 1.0)]


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def printed(to: Console) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def tiny_options(folder, out, **changes) -> DemoOptions:
    given = {"target": str(folder / "target"), "drafter": folder / "drafter", "max_new_tokens": 8, "quick": True, **changes}
    return DemoOptions(out=out, **given)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Where the demo of this module writes to."""
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def prepared(folder, out):
    """The demo on the tiny models, ready to answer."""
    options = tiny_options(folder, out)
    return demo_setup.prepare(options, jobs_of(options), console())


@pytest.fixture(scope="module")
def tiny_run(folder, out, prepared):
    """A whole run of the demo on the tiny models."""
    to = console()
    return demo.compare(tiny_options(folder, out), prepared, to, time.monotonic()), printed(to)


def test_the_tokens_of_the_rounds_make_up_the_answer(folder, out, prepared, tiny_run):
    options = tiny_options(folder, out)
    for job, fresh in zip(prepared.jobs, demo_setup.prefilled(prepared, options), strict=True):
        shown = []
        recorded = record(prepared.speculative, prepared.params, fresh()[1], shown.append)
        assert recorded.decoded == options.budget_of(job) - 1 and len(recorded.seconds) == len(recorded.rounds) == len(shown)
        assert recorded.ids[1:] == tuple(token for one in shown for token, _ in round_kinds(one))


def test_where_two_answers_part_comes_with_the_gap_of_the_target(prepared):
    target, params = prepared.speculative.target, prepared.params
    prompt, one, other = [6, 7, 8, 9, 10], (11, 12, 13, 14), (11, 12, 20, 14)
    assert first_difference(target, params, prompt, one, one, 16) is None
    found = first_difference(target, params, prompt, one, other, 16)
    text = jnp.asarray([[*prompt, 11, 12]], jnp.int32)
    tokens = FlatTokens.grid(text, jnp.zeros(1, jnp.int32), jnp.full(1, text.shape[1], jnp.int32))
    hidden = jax.jit(target.forward, static_argnums=3)(params.target, None, tokens, ())[0]
    logits = np.sort(np.asarray(params.head.logits(hidden)[-1]))
    assert found is not None and found.position == 2
    assert found.top_two_gap == pytest.approx(float(logits[-1] - logits[-2]), rel=1e-3)
    shorter = first_difference(target, params, prompt, one, one[:3], 16)
    assert shorter is not None and shorter.position == 3


def test_the_stream_shows_the_text_with_every_kind_told_apart(folder):
    tokenizer = load_tokenizer(folder / "target")
    plain = console()
    streamer = Streamer(plain, tokenizer, 9)
    for each in ROUNDS[:3]:
        streamer(each)
    streamer.close()
    assert printed(plain) == "w9 w5\u2039 w8\u203a w5 w6\u00ab w4\u00bb\u00ab w3\u00bb\n"
    coloured = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="standard", _environ={})
    for kind in Kind:
        coloured.print(demo.styled("x", kind, coloured), end="")
    codes = printed(coloured).split("x")[:-1]
    assert len(set(codes)) == len(Kind)


def test_the_whole_demo_writes_what_it_found(out, tiny_run):
    """Greedy output equals plain decoding; [B1] for the demo's own policy and ladder."""
    report, text = tiny_run
    stored = json.loads((out / "demo.json").read_text())
    assert stored == json.loads(json.dumps(report))
    assert stored["greedy_identical"] is True and stored["first_differences"] == []
    for field in ("accepted_length", "conditional_acceptance"):
        assert list(stored[field]) == list(DOMAINS)
    for domain in DOMAINS:
        assert 1 <= stored["accepted_length"][domain] <= TINY_BLOCK + 1
        assert len(stored["conditional_acceptance"][domain]) == TINY_BLOCK
        assert all(share is None or 0 <= share <= 1 for share in stored["conditional_acceptance"][domain])
    plain, speculative = stored["tokens_per_second_plain"], stored["tokens_per_second_speculative"]
    assert plain > 0 and speculative > 0 and stored["ratio"] == pytest.approx(speculative / plain)
    assert list(stored["by_temperature"]) == ["0", "1"]
    assert all(list(rows) == [*DOMAINS, ALL] for rows in stored["by_temperature"].values())
    times = stored["time"]
    assert list(times["target_ms"]) == [str(bucket) for bucket in stored["ladder"]] and times["draft_ms"] > 0 and times["plain_step_ms"] > 0
    rounds = sum(rows[ALL]["rounds"] + rows[ALL]["cut_rounds"] for rows in stored["by_temperature"].values())
    assert sum(times["rounds"].values()) == rounds
    assert stored["device"].startswith("cpu") and stored["dtype"] in ("float32", "bfloat16")
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG") or (out / "demo.html").is_file()
    assert "greedy output is identical to plain decoding in 3 of 3 answers" in text and text.count("without calibration") == 1
    assert not list(out.glob(".demo*"))


def test_a_time_limit_leaves_prompts_out_and_says_so(folder, prepared, tiny_run, tmp_path):
    to = console()
    report = demo.compare(tiny_options(folder, tmp_path, time_limit=0.0), prepared, to, time.monotonic())
    assert report["prompts_left_out"] == 5 and list(report["accepted_length"]) == ["maths"]
    assert "5 prompts are left out" in printed(to)


def small_report(difference: Difference | None = None) -> dict:
    other = recording(*ROUNDS[:2], first=9 if difference is None else 10)
    answered = [Answered("chat", 0.0, recording(*ROUNDS[:2]), other, difference), Answered("chat", 1.0, other, other)]
    profile = StepProfile((1, 3, 4), (0.03, 0.04, 0.05), 0.006)
    return report_json(answered, profile, (1, 4), BLOCK, device="cpu: <test>", dtype="float32")


def test_a_difference_from_plain_decoding_is_reported_with_its_place_and_gap():
    report = small_report(Difference(0, 0.003))
    assert report["greedy_identical"] is False
    assert report["first_differences"] == [{"domain": "chat", "answer": 0, "position": 0, "top_two_gap": 0.003}]
    assert "chat at token 0 (top-2 gap 0.003)" in check_line(report)


def test_without_matplotlib_the_picture_is_a_page_with_the_same_table(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_report.importlib.util, "find_spec", lambda name: None)
    report = small_report()
    page = write_picture(report, tmp_path).read_text()
    assert "cpu: &lt;test&gt;" in page
    for cell in itertools.chain(*demo_report.table_rows(report)):
        assert f"<td>{cell}</td>" in page
    assert rich_table(report).row_count == page.count("<tr>") - 1 == 2


def test_times_are_those_of_the_rounds_by_bucket():
    times = small_report()["time"]
    assert times["target_ms"] == pytest.approx({"1": 30.0, "4": 50.0}) and times["draft_ms"] == pytest.approx(6.0)
    assert times["rounds"] == {"1": 0, "4": 4} and times["round_ms"] == pytest.approx({"4": 500.0})
    with pytest.raises(ValueError, match="answered is empty"):
        report_json([], StepProfile((4,), (0.05,), 0.0), (4,), BLOCK)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter": "nowhere"}, "'nowhere' is no file or folder"),
        ({"target": "nowhere"}, "'nowhere' is no file or folder"),
        ({"drafter": "wider"}, "hidden_size is 48, and the target's width is 32"),
        ({"drafter": "target"}, "architectures is .*LlamaForCausalLM"),
        ({"prompt": "w3 " * 600}, "prompt has 600 tokens; with a budget of 8 allowed are at most 504"),
    ],
)
def test_bad_input_is_refused_with_what_would_be_right(folder, tmp_path, changes, message):
    located = {name: folder / value if (folder / value).exists() else value for name, value in changes.items() if name != "prompt"}
    options = tiny_options(folder, tmp_path, **{**changes, **{name: str(value) for name, value in located.items()}})
    with pytest.raises(ValueError, match=message):
        demo.run(options, console())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "  "}, "prompt is empty"),
        ({"max_new_tokens": 1}, "max_new_tokens is 1; allowed are integers of at least 2"),
        ({"prompts_per_domain": 0}, "prompts_per_domain is 0; allowed are 1 to"),
        ({"temperature": math.nan}, "temperature is nan; allowed"),
        ({"temperature": -1.0}, "temperature is -1.0; allowed"),
    ],
)
def test_options_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DemoOptions(**changes)


def test_the_command_line_ends_with_a_message_and_no_traceback(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "sys.argv", ["demo", "--target", str(folder / "target"), "--drafter", str(tmp_path / "none"), "--out", str(tmp_path)]
    )
    assert demo.main() == 2
    assert "is no file or folder" in " ".join(capsys.readouterr().out.split())


def test_prompts_come_from_files_a_domain_each(tmp_path):
    file = tmp_path / "riddles.jsonl"
    file.write_text('{"turns": ["What has keys?", "And why?"]}\n{"turns": ["What runs?"]}\n{"turns": []}\n')
    jobs = jobs_of(DemoOptions(prompts=(file,), prompts_per_domain=2, temperature=0.0))
    assert jobs == [Job("riddles", "What has keys?", 0.0), Job("riddles", "What runs?", 0.0)]
    for options, complaint in (
        (DemoOptions(prompts=(file,), prompts_per_domain=3), "line 3 without `turns`"),
        (DemoOptions(prompts=(file,), prompts_per_domain=4), "asks for 4"),
        (DemoOptions(prompts=(tmp_path / "absent.jsonl",)), "existing JSONL files"),
    ):
        with pytest.raises(ValueError, match=complaint):
            jobs_of(options)
