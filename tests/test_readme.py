"""The README's code runs as it stands."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.tiny_models import needs_gguf, needs_smollm2

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@needs_gguf
@needs_smollm2
@pytest.mark.slow
def test_the_python_of_the_readme_answers_a_question():
    decoded, scheduled, served = BLOCKS
    out = subprocess.run([sys.executable, "-c", decoded + scheduled + served], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    answered, rest = out.split("verified per round")
    assert "42" in answered and float(answered.rsplit("accepted length", 1)[1]) >= 1.0
    verified, answers = rest.strip().split("\n", 1)
    assert 0 <= float(verified) <= 7
    first, second, rate = answers.rsplit("|", 2)
    assert "42" in first and second.strip() and float(rate.split()[0]) >= 1.0


def test_the_readme_is_read_in_five_minutes():
    """At 250 words a minute, code aside."""
    assert len(re.sub(r"```.*?```", "", README, flags=re.DOTALL).split()) <= 1250


def test_links_of_the_readme_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_no_placeholder_is_left_in_the_readme():
    assert not re.search(r"[A-Z]+_PLACEHOLDER|TODO|FIXME", README)
