"""The README's code runs as it stands."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.tiny_models import needs_gguf, needs_smollm2

README = (ROOT / "README.md").read_text(encoding="utf-8")


@needs_gguf
@needs_smollm2
@pytest.mark.slow
def test_the_python_of_the_readme_answers_a_question():
    first, second = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    out = subprocess.run([sys.executable, "-c", first + second], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    answered, scheduled = out.split("verified per round")
    assert "42" in answered and float(answered.rsplit("accepted length", 1)[1]) >= 1.0
    assert 0 <= float(scheduled) <= 7


def test_no_placeholder_is_left_in_the_readme():
    assert not re.search(r"[A-Z]+_PLACEHOLDER|TODO|FIXME", README)
