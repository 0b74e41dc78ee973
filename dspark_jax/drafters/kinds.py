"""The kinds of drafters: which class each class of config describes."""

from collections.abc import Mapping
from typing import Any

from dspark_jax.drafters.dflash import DFlashConfig, DFlashDrafter
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from dspark_jax.drafters.mtp import MTPConfig, MTPDrafter

DRAFTER_KINDS: Mapping[type, type] = {
    DSparkConfig: DSparkDrafter,
    DFlashConfig: DFlashDrafter,
    Eagle3Config: Eagle3Drafter,
    MTPConfig: MTPDrafter,
}
"""From the class of a config to the class of its drafter."""


def drafter_from(config: Any) -> Any:
    """The drafter that `config` describes; its parameters come from `init` or from a file.

    Raises:
      ValueError: the config is of no kind in the table.
    """
    kind = DRAFTER_KINDS.get(type(config))
    if kind is None:
        raise ValueError(f"drafter is a {type(config).__name__}; allowed: {', '.join(each.__name__ for each in DRAFTER_KINDS)}")
    return kind(config)


__all__ = ["DRAFTER_KINDS", "drafter_from"]
