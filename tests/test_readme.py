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
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "42" in out and float(out.rsplit("accepted length", 1)[1]) >= 1.0


def test_no_placeholder_is_left_in_the_readme():
    assert not re.search(r"[A-Z]+_PLACEHOLDER|TODO|FIXME", README)
