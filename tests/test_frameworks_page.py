"""The snippets of docs/frameworks.md run as printed."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradientmail as gm

PAGE = Path(__file__).parents[1] / "docs" / "frameworks.md"


def test_the_code_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A reader's session may look once a second; a test need not wait so long.
    quick = {**(gm.Session.__init__.__kwdefaults__ or {}), "poll_interval": 0.02}
    monkeypatch.setattr(gm.Session.__init__, "__kwdefaults__", quick)
    mlx, train, merge = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(mlx, names)
    assert names["session"].rounds_seen >= 10
    assert float(np.abs(np.array(names["model"].weight) - 1.0).max()) < 0.5
    names.clear()
    exec(train, names)
    model = names["model"]
    assert names["session"].rounds_seen >= 10
    assert {name: array.dtype.name for name, array in model.items()} == {
        "weight": "float32",
        "bias": "float32",
    }
    assert float(np.abs(model["weight"] - 1.0).max()) < 0.5
    committed = {name: array.copy() for name, array in model.items()}
    exec(merge, names)
    assert all((model[name] == array).all() for name, array in committed.items())
    assert names["session"].rounds_seen >= 10
