"""What a survival model was fitted for, and whether it is used for that: a drafter, a sampler, a verifier."""

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dspark_jax.protocols import Drafter
from dspark_jax.sampling import Sampling
from dspark_jax.typing import Params

VERIFIERS = ("token", "block")
TOLERANCE = 1e-6


class CalibratorWarning(UserWarning):
    """A survival model is used where its numbers need not hold. Outputs stay exact; what is verified may be far from the best."""


@dataclasses.dataclass(frozen=True)
class CalibratorIdentity:
    """What a survival model was fitted for.

    Attributes:
      drafter: its `drafter_fingerprint`.
      temperatures: of the sampler, one or several.
      top_k, top_p: the sampler's filter (as in `Sampling`); it says nothing at temperature 0.
      verifier: "token" or "block": the two accept different prefixes of the same drafts.
    """

    drafter: str
    temperatures: tuple[float, ...]
    top_k: int = 0
    top_p: float = 1.0
    verifier: str = "token"

    def __post_init__(self) -> None:
        if not self.drafter:
            raise ValueError("drafter is empty; allowed is the fingerprint of a drafter")
        if not self.temperatures or not all(0 <= value < float("inf") for value in self.temperatures):
            raise ValueError(f"temperatures is {self.temperatures}; allowed are finite numbers of at least 0, one or more")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; allowed are integers of at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; allowed are numbers above 0, up to 1")
        if self.verifier not in VERIFIERS:
            raise ValueError(f"verifier is {self.verifier!r}; allowed are {VERIFIERS}")

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**dataclasses.asdict(self), "temperatures": list(self.temperatures)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "CalibratorIdentity":
        """What `as_dict` stored. Raises ValueError for a missing or unknown field."""
        expected = {field.name for field in dataclasses.fields(cls)}
        if set(stored) != expected:
            raise ValueError(f"fitted_for is stored with the fields {sorted(stored)}; allowed are {sorted(expected)}")
        return cls(**{**stored, "temperatures": tuple(stored["temperatures"])})


def drafter_fingerprint(drafter: Drafter, params: Params, draft_ids: Any | None = None) -> str:
    """SHA-256 (hexadecimal) of a drafter: its kind, its config, its parameters and the ids it can draft.

    Parameters count as bfloat16, in which drafters are stored: a float32 drafter has the fingerprint of its stored copy. Fields of the
    config count where they are not the default, so that a later version with one more option has the same fingerprint.
    """
    digest = hashlib.sha256()
    config: Any = getattr(drafter, "config", drafter)
    fields = _chosen_fields(config) if dataclasses.is_dataclass(config) else {}
    digest.update(json.dumps([type(drafter).__name__, fields], sort_keys=True, default=str).encode())
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    if draft_ids is not None:
        leaves.append(("draft_ids", np.asarray(jax.device_get(draft_ids), np.int32)))
    for name, leaf in sorted(leaves, key=lambda entry: entry[0]):
        values = np.asarray(jax.device_get(leaf))
        if not np.issubdtype(values.dtype, np.integer):
            values = values.astype(ml_dtypes.bfloat16)
        digest.update(f"{name} {values.shape} {values.dtype.name}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def _chosen_fields(config: Any) -> dict[str, Any]:
    chosen = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != (field.default if field.default_factory is dataclasses.MISSING else field.default_factory()):
            chosen[field.name] = _chosen_fields(value) if dataclasses.is_dataclass(value) else value
    return chosen


def check_calibrator(fitted_for: CalibratorIdentity | None, fingerprint: str, sampling: Sampling, verifier: str = "token") -> None:
    """Whether a survival model holds for a run; to be called once, outside of jit.

    Warns (`CalibratorWarning`) for another temperature or filter of the sampler, which may change from request to request, and where
    nobody recorded what the model was fitted for (None).

    Args:
      fingerprint: `drafter_fingerprint` of the run's drafter.
      sampling: of the run's requests.

    Raises:
      ValueError: for another drafter or another verifier: such numbers mean nothing.
    """
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier is {verifier!r}; allowed are {VERIFIERS}")
    if fitted_for is None:
        _warn("the survival model does not say which drafter, sampler and verifier it was fitted for")
        return
    if fitted_for.drafter != fingerprint:
        raise ValueError(f"drafter is {fingerprint}; allowed is the one that the survival model was fitted for, {fitted_for.drafter}")
    if fitted_for.verifier != verifier:
        raise ValueError(f"verifier is {verifier!r}; allowed is the one that the survival model was fitted for, {fitted_for.verifier!r}")
    temperature = np.asarray(sampling.temperature, np.float64)
    known = np.abs(temperature[:, None] - np.asarray(fitted_for.temperatures)).min(axis=1) <= TOLERANCE
    if not known.all():
        others = sorted(set(np.round(temperature[~known], 6).tolist()))
        _warn(f"the survival model was fitted at the sampler temperatures {fitted_for.temperatures}, and requests are drawn at {others}")
    top_k, top_p = np.asarray(sampling.top_k), np.asarray(sampling.top_p, np.float64)
    filtered_else = (temperature > 0) & ((top_k != fitted_for.top_k) | (np.abs(top_p - fitted_for.top_p) > TOLERANCE))
    if filtered_else.any():
        row = int(np.argmax(filtered_else))
        _warn(
            f"the survival model was fitted at top_k {fitted_for.top_k} and top_p {fitted_for.top_p}, "
            f"and requests are drawn at top_k {top_k[row]} and top_p {top_p[row]:.6g}"
        )


def _warn(message: str) -> None:
    warnings.warn(message, CalibratorWarning, stacklevel=3)
