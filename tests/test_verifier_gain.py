"""The gain of joint over single acceptance: what is expected of a round, and how it is summed up."""

import dataclasses

import jax
import numpy as np
import pytest

from dspark_jax.calibrate import RawSurvival
from dspark_jax.decode import DecodeParams, DecodePlan, step
from dspark_jax.policies import FixedLength
from dspark_jax.prefill import start
from dspark_jax.sampling import Sampling
from dspark_jax.targets.toy import ToyTarget
from experiments.result_files import write_csv
from experiments.verifier_gain import GainOptions, Walk, agreement, expected_accepted, gain_rows, plot_gain, walk
from tests.toy_drafter import BLOCK, VOCAB, ToyDrafter

ROWS, ROUNDS = 400, 3


@pytest.fixture(scope="module")
def toy():
    """Plan and parameters."""
    target, drafter = ToyTarget(VOCAB), ToyDrafter()
    params = DecodeParams.of(target, target.init(jax.random.key(0)), drafter.init(jax.random.key(1)))
    return DecodePlan(target, drafter, FixedLength(BLOCK), RawSurvival()), params


@pytest.fixture(scope="module")
def walks(toy):
    plan, params = toy
    return {
        verifier: walk(dataclasses.replace(plan, verifier=verifier), params, [[1, 2]] * ROWS, 1.0, ROUNDS)
        for verifier in ("token", "block")
    }


def test_joint_acceptance_is_expected_to_keep_more_of_every_block(walks):
    """The first draft alike, later ones at least as many; strictly more on many blocks."""
    for taken in walks.values():
        by_token, by_block = taken.expected["token"], taken.expected["block"]
        np.testing.assert_allclose(by_block[..., 0], by_token[..., 0], atol=1e-6)
        assert np.all(by_block >= by_token - 1e-6)
        assert np.mean(by_block[..., 1:] > by_token[..., 1:] + 1e-3) > 0.1
        assert np.all(np.diff(by_block, axis=-1) >= 0) and np.all(by_block <= np.arange(1, BLOCK + 1) + 1e-6)


def test_what_is_expected_follows_from_p_and_q_along_the_block(toy):
    """Against the toy's tables, in plain numpy."""
    plan, params = toy
    state = start(plan, params, [[1, 2]] * ROWS, max_new_tokens=(ROUNDS + 1) * (BLOCK + 1), sampling=Sampling.make(ROWS, 0.7))
    found = jax.device_get(expected_accepted(plan, params, state))
    position = np.asarray(state.length) - 1
    _, stats = step(plan, params, state)
    laws = [np.exp(np.asarray(tables) / 0.7) for tables in (params.target["table"], params.drafter["table"])]
    p_table, q_table = (law / law.sum(axis=-1, keepdims=True) for law in laws)
    drafts = np.asarray(stats.drafts)
    previous, token, weight = np.asarray(stats.anchor), np.ones(ROWS), np.ones(ROWS)
    by_token, by_block = np.zeros(ROWS), np.zeros(ROWS)
    for k in range(BLOCK):
        p, q = p_table[(position + k) % 2, previous, drafts[:, k]], q_table[(position + k) % 2, previous, drafts[:, k]]
        token, weight, previous = token * np.minimum(1, p / q), np.minimum(1, weight * p / q), drafts[:, k]
        by_token, by_block = by_token + token, by_block + weight
        np.testing.assert_allclose(found["token"][:, k], by_token, rtol=1e-4)
        np.testing.assert_allclose(found["block"][:, k], by_block, rtol=1e-4)


def test_real_rounds_accept_what_is_expected(walks):
    """1,200 rounds of either verifier, each within three standard errors of a few hundredths."""
    for verifier, taken in walks.items():
        report = agreement(taken, verifier)
        assert report["rounds"] == ROWS * ROUNDS and report["standard_error"] < 0.04
        assert report["agrees"], report


def test_at_temperature_0_nothing_is_gained(toy):
    """[A8] Both keep the drafts up to the first that argmax would not have written: whole numbers, the same ones."""
    plan, params = toy
    taken = walk(plan, params, [[1, 2]] * ROWS, 0.0, ROUNDS)
    assert np.array_equal(taken.expected["token"], taken.expected["block"])
    assert np.array_equal(taken.expected["token"][..., -1][taken.active], taken.accepted[taken.active])


def test_rounds_are_pooled_over_walks_and_prompts(tmp_path):
    """Rounds that are over count for nothing; a ratio of sums and not a mean of ratios, with an interval around it."""
    rng = np.random.default_rng(0)
    active = np.array([[True, True], [True, False]])
    by_token = rng.uniform(0, 1, (2, 2, 3)).cumsum(axis=-1)
    taken = Walk(active, {"token": by_token, "block": 1.1 * by_token}, np.zeros((2, 2), int))
    rows = gain_rows([taken, taken], np.arange(2))
    whole = rows[-1]
    mean = by_token[active][:, -1].mean()
    assert (whole["verified"], whole["rounds"], whole["prompts"]) == (3, 6, 2)
    assert whole["token"] == pytest.approx(1 + mean, abs=1e-4)
    assert whole["ratio"] == pytest.approx((1 + 1.1 * mean) / (1 + mean), abs=1e-4)
    assert all(row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in rows)
    assert gain_rows([taken], np.array([1]))[0]["rounds"] == 1
    full = [{"temperature": 1.0, "domain": domain, **row} for domain in ("maths", "code", "chat", "all") for row in rows]
    write_csv(tmp_path / "gain.csv", full)
    assert len((tmp_path / "gain.csv").read_text().splitlines()) == 1 + len(full)
    plot_gain(full, tmp_path / "gain.png")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gain.csv", "gain.png"]


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="temperatures is"):
        GainOptions(temperatures=(0.0,))
    with pytest.raises(ValueError, match="prompts_per_domain is 1"):
        GainOptions(prompts_per_domain=1)
    with pytest.raises(ValueError, match="rounds is 0"):
        GainOptions(rounds=0)
