"""`python -m tools.pytorch_tests` finds what fails with this backend alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ort_backend.runtime import capabilities
from tools.pytorch_tests import main

TESTS = """
import torch
from torch._dynamo.testing import CompileCounter
from torch.testing._internal.common_utils import TestCase, run_tests


def on_ort(backend=None):
    import ort_backend
    x = torch.randn(3)
    before = len(ort_backend.report().graphs)
    result = torch.compile(lambda x: x.sin() + 1, **({"backend": backend} if backend else {}))(x)
    torch.testing.assert_close(result, x.sin() + 1)
    return len(ort_backend.report().graphs) > before


class Tests(TestCase):
    def test_inductor(self):
        self.assertFalse(on_ort(), "by default")

    def test_named(self):
        self.assertFalse(on_ort("eager"), "by name")

    def test_counter(self):
        counter = CompileCounter()
        self.assertFalse(on_ort(counter) and counter.frame_count == 1, "counted")

    def test_wrong_in_both(self):
        self.fail("of the test's own")

    def test_right(self):
        on_ort()

    def test_left_out(self):
        self.assertFalse(on_ort())
"""


@pytest.mark.skipif(not capabilities.has_training(), reason="half a minute, the same with either package")
@pytest.mark.cpu_only(reason="processes of their own, which make their tensors on the CPU")
def test_what_fails_here_alone_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "test_of_pytorch.py"
    file.write_text(TESTS)
    assert main([str(file), "-k", "not left_out"]) == 1
    told = capsys.readouterr().out
    assert all(text in told for text in ("by default", "by name", "counted", "4 failed, 3 of them not with aot_eager"))
    assert "of the test's own" not in told and "test_right" not in told
