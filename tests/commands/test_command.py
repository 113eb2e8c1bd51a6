"""The command as a shell sees it: how it is started, what it returns, what it says."""

import subprocess
import sys
from pathlib import Path

import pytest

from gradientmail.commands import main


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


def test_an_error_of_the_system_names_the_path_and_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tmp_path / "mistyped")]) == 1
    shown = capsys.readouterr().err
    assert shown == f"gradientmail: {tmp_path / 'mistyped'}: there is no such folder\n"


def test_a_malformed_url_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "s3:/b/x"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("gradientmail: s3:/ needs two slashes")
    assert shown.err.count("\n") == 1
