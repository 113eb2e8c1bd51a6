"""The command as a shell sees it: how it is started, what it returns, what it says."""

import errno
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

import gradientmail
from gradientmail.commands import main
from gradientmail.errors import MailboxUnavailable
from gradientmail.mailbox.memory import MemoryMailbox


def test_the_module_and_the_script_are_one_command() -> None:
    for start in (
        [sys.executable, "-m", "gradientmail"],
        [Path(sys.executable).with_name("gradientmail")],
    ):
        shown = subprocess.run([*start, "--help"], capture_output=True, text=True, check=True)
        assert shown.stdout.startswith("usage: gradientmail ")
        assert "doctor" in shown.stdout


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["doctor"], ["doctor", "--nothing", "x"]])
def test_a_command_line_that_cannot_be_understood(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: gradientmail")


@pytest.mark.parametrize("arguments", [["--help"], ["verify", "memory://nothing"]])
def test_who_reads_the_output_may_go(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "gradientmail", *arguments]
    pipe, buffered = subprocess.PIPE, {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=buffered) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_an_error_of_the_system_names_the_path_and_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tmp_path / "mistyped")]) == 1
    shown = capsys.readouterr().err
    assert shown == f"gradientmail: {tmp_path / 'mistyped'}: there is no such folder\n"


def test_a_folder_that_may_not_be_looked_at_is_not_called_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, stat = str(tmp_path / "closed"), os.stat

    def refusing(path: object, **how: Any) -> os.stat_result:
        if str(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", closed)
        return stat(cast("str", path), **how)

    monkeypatch.setattr(os, "stat", refusing)
    assert main(["verify", closed]) == 1
    assert capsys.readouterr().err == f"gradientmail: {closed}: Permission denied\n"


def test_a_store_that_does_not_answer_is_one_line_with_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise MailboxUnavailable("listing: connection refused")

    monkeypatch.setattr(MemoryMailbox, "list", away)
    assert main(["verify", "memory://away"]) == 1
    assert capsys.readouterr().err == (
        "gradientmail: listing: connection refused; check the address, that the store "
        "is up, and what its own log says\n"
    )


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"gradientmail {gradientmail.__version__}\n"
    assert gradientmail.__version__ == importlib.metadata.version("gradientmail")
    with pytest.raises(AttributeError, match="__versions__"):
        _ = gradientmail.__versions__


def test_a_malformed_url_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "s3:/b/x"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("gradientmail: s3:/ needs two slashes")
    assert shown.err.count("\n") == 1
