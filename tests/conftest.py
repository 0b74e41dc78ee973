"""The platform every test runs on: eight virtual CPU devices, strict dtypes, reproducible properties."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# All of these are read once, by jax or by its first backend.
assert "jax" not in sys.modules, "jax was imported before tests/conftest.py could set the platform up"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
# The thread pool of the CPU backend is as large as the machine has cores, and collectives of two programs in flight on eight
# virtual devices dead-lock in a small one. 32 threads were enough in every case tried, 8 were not.
os.environ["NPROC"] = "32"

import jax  # noqa: E402
from hypothesis import settings  # noqa: E402

# No silent mixing of bf16, f32 and integers. (A compilation cache on disk is left to JAX_COMPILATION_CACHE_DIR.)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# No deadline: the first example pays for compilation. Derandomised and without a database: every run draws the same examples.
settings.register_profile("dspark", deadline=None, derandomize=True, database=None)
settings.load_profile("dspark")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs() -> Iterator[None]:
    """Every compiled program holds memory mappings, of which Linux allows a process 65,530: a run of all tests came to that and crashed."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def golden() -> Path:
    """Numbers of the reference implementation that are part of the repository."""
    return ROOT / "tests" / "golden"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Larger material that may lie beside the repository; where it does not, the test is skipped."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("needs ../shared (beside the repository), which is not here")
    return path
