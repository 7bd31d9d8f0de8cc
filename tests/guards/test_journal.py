from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_version import LIMIT, NEEDS_BACKEND

from ort_backend.guards import diagnosis, journal, records
from ort_backend.guards.__main__ import main

MakeBackend = Callable[..., Callable[..., Any]]

PROGRAM = """
    import dataclasses, os, signal, sys
    import torch
    from ort_backend.guards import records

    @dataclasses.dataclass(frozen=True)
    class Options:
        guard_log: str = sys.argv[1]

    def backend(gm, inputs):
        compilation = records.start(gm, Options())
        compilation.finish(None)
        return gm.forward

    def f(x):
        return x + 1

    f = torch.compile(f, backend=backend, dynamic=False)
"""


def program(tmp_path: Path, body: str) -> Path:
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(PROGRAM) + textwrap.dedent(body))
    return file


def run_loop(backend: Callable[..., Any], sizes: range = range(2, 6)) -> None:
    f = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)
    for step, size in enumerate(sizes):
        assert step >= 0
        f(torch.ones(size))


@pytest.fixture
def run_log(tmp_path: Path, make_backend: MakeBackend) -> Path:
    path = tmp_path / "logs" / "run.jsonl"
    run_loop(make_backend(guard_log=str(path)))
    return path


def test_the_file_says_what_memory_says(run_log: Path) -> None:
    told, kept = diagnosis.from_journals([str(run_log)]), diagnosis.report()
    assert len(told.records) == 4 and told.recompiles == 3
    assert [record.cause for record in told.records] == [record.cause for record in kept.records]
    assert [dict(record.seconds) for record in told.records] == [dict(record.seconds) for record in kept.records]
    assert str(told) == str(kept)
    assert told.records[0].graph_report == {"nodes": 3}


@NEEDS_BACKEND
def test_the_option_of_the_backend(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    log = tmp_path / "run.jsonl"
    f = torch.compile(torch.nn.Linear(2, 2), backend="ort_training", options={"guard_log": str(log)})
    for size in (2, 3):
        f(torch.ones(size, 2)).sum().backward()
    told = diagnosis.from_journals([str(log)])
    assert [record.recompile for record in told.records] == [False, True]
    assert {"dynamo", "aot", "lowering", "session"} <= set(told.records[0].seconds)
    assert isinstance(told.records[0].graph_report, dict) and told.records[0].graph_report["fx_nodes"] > 0


def test_every_line_is_an_object_by_itself(run_log: Path) -> None:
    events = [json.loads(line) for line in run_log.read_text().splitlines()]
    assert {event["event"] for event in events} == {"compile", "seconds"}
    assert len({event["session"] for event in events}) == 1
    assert events[0]["function"].endswith("<lambda>") and events[0]["pid"] == os.getpid()


def test_lines_cut_short_are_left_out(run_log: Path) -> None:
    whole = run_log.read_bytes()
    for length in (len(whole) - 1, len(whole) - 40, len(whole) // 2, 10):
        run_log.write_bytes(whole[:length])
        diagnosis.from_journals([str(run_log)])  # reads what is whole
    run_log.write_bytes(whole + b'{"event": 3}\n[1]\nnot json\n\xff\xfe\n')
    assert len(diagnosis.from_journals([str(run_log)]).records) == 4


def test_killed_in_the_middle(tmp_path: Path) -> None:
    """What was compiled before the kill is in the file, whole."""
    log = tmp_path / "run.jsonl"
    file = program(tmp_path, "for size in range(2, 5):\n    f(torch.ones(size))\nos.kill(os.getpid(), signal.SIGKILL)\n")
    result = subprocess.run([sys.executable, str(file), str(log)], capture_output=True, timeout=120)
    assert result.returncode == -9
    assert [record.recompile for record in diagnosis.from_journals([str(log)]).records] == [False, True, True]


def test_one_file_per_rank(tmp_path: Path, make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        torch._dynamo.reset()
        run_loop(make_backend(guard_log=str(tmp_path / "run.jsonl")), range(2, 4))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.rank0.jsonl", "run.rank1.jsonl"]
    told = diagnosis.from_journals([str(tmp_path / "run.jsonl")])  # the name that the option had
    assert len(told.records) == 4 and told.recompiles == 1  # of the rank that has the most
    assert told.causes[0].ranks == (0, 1) and "ranks: 0, 1" in str(told)


def test_concurrent_writers_do_not_mix_lines(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    script = (
        "import sys; from pathlib import Path; from ort_backend.guards import journal\n"
        "for i in range(300): journal.append(Path(sys.argv[1]), {'event': 'compile', 'index': i, 'text': 'x' * 3000})"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(log)]) for _ in range(2)]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert len(journal.read([log])) == 600


def test_a_file_that_cannot_be_written_does_not_stop_the_training(
    tmp_path: Path, make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    run_loop(make_backend(guard_log=str(tmp_path / "file" / "run.jsonl")), range(2, 5))
    assert len(records.all()) > 1
    assert len([entry for entry in caplog.records if "cannot be written" in entry.getMessage()]) == 1  # not for each compile


def test_old_and_newer_lines_are_read(tmp_path: Path) -> None:
    """Fields that this version does not know are left out, missing ones do not matter."""
    log = tmp_path / "run.jsonl"
    log.write_text('{"event":"compile","index":0,"from_the_future":1}\n{"event":"news"}\n{"event":"compile","index":1,"recompile":true,'
                   '"failures":[{"kind":"a new kind","source":"x"}]}\n{"event":"limit","function":"f"}\n')  # fmt: skip
    told = diagnosis.from_journals([str(log)])
    assert len(told.records) == 2 and told.causes[0].kind == "unknown" and told.limits[0].function == "f"
    str(told)


# the command line


def test_text(run_log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_log)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("4 compiles of 1 function took") and "3 recompiles lost" in text
    assert "shape of x.size(0)" in text and "values: 2, 3, 4, 5" in text and "torch._dynamo.mark_dynamic(x, 0)" in text
    assert "steps: 1, 2, 3" in text and "f(torch.ones(size))" in text


def test_json(run_log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_log), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["compiles"], data["recompiles"]) == (4, 3)
    (cause,) = data["causes"]
    assert cause["kind"] == "shape" and cause["values"] == ["2", "3", "4", "5"] and cause["remedy"]["code"] == "torch._dynamo.mark_dynamic(x, 0)"


def test_html_is_self_contained(run_log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from html.parser import HTMLParser

    out = tmp_path / "report.html"
    assert main([str(run_log), "--html", str(out)]) == 0
    page = out.read_text()
    opened: list[str] = []
    loads: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            if tag not in ("meta", "rect", "line", "polyline", "br"):
                opened.append(tag)
            loads.extend(str(value) for name, value in attributes if name in ("src", "href", "srcset"))

        def handle_endtag(self, tag: str) -> None:
            if tag not in ("rect", "line", "polyline"):
                assert opened.pop() == tag

    Reader().feed(page)
    assert opened == [] and loads == [] and "url(" not in page and "@import" not in page
    assert page.count("<rect") == 4 and "training step" in page and "mark_dynamic(x, 0)" in page


@pytest.mark.parametrize("content", [b"not json\n", b'{"loss": 1.5}\n[1]\n', b"\xff\xfe\n"], ids=["text", "other JSON lines", "bytes"])
def test_a_file_that_is_no_guard_log_is_an_error(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.jsonl").write_bytes(content)
    assert main([str(tmp_path / "other.jsonl"), "--max-recompiles", "3"]) == 2  # a check that reads the wrong file must not pass
    assert "other.jsonl is no file that options=" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_an_error(run_log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_log), "--html", str(tmp_path / "nowhere" / "report.html")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_max_recompiles(run_log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_log), "--max-recompiles", "3"]) == 0
    assert main([str(run_log), "--max-recompiles", "2"]) == 1
    assert "3 recompiles, 2 allowed" in capsys.readouterr().err


def test_limit_is_in_the_file_and_fails_the_check(tmp_path: Path, make_backend: MakeBackend, capsys: pytest.CaptureFixture[str]) -> None:
    setattr(torch._dynamo.config, LIMIT, 2)
    log = tmp_path / "run.jsonl"
    run_loop(make_backend(guard_log=str(log)))
    assert main([str(log), "--max-recompiles", "100"]) == 1
    captured = capsys.readouterr()
    assert "RUNS IN EAGER PYTORCH" in captured.out and "fell back to eager" in captured.err


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_as_a_module_in_a_new_process(run_log: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ort_backend.guards", str(run_log), "--max-recompiles", "0"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1 and "shape of x.size(0)" in result.stdout, result.stderr


def test_torch_logs_shows_it_with_dynamo_s_prefix(tmp_path: Path) -> None:
    file = program(tmp_path, "for size in (2, 3):\n    f(torch.ones(size))\n")
    environment = {**os.environ, "TORCH_LOGS": "+ort_backend"}
    result = subprocess.run([sys.executable, str(file), str(tmp_path / "run.jsonl")], capture_output=True, text=True, timeout=120, env=environment)
    lines = [line for line in result.stderr.splitlines() if "shape of x.size(0): 2 -> 3" in line]
    assert lines and "[0/1]" in lines[0], result.stderr
