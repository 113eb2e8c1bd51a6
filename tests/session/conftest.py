"""Sessions that leave at once get their time from the test, not from what the machine has left."""

import pytest

from gradientmail import session


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than 0.8 s for the last words; who hangs sets it again."""
    monkeypatch.setattr(session, "ABANDON_SECONDS", 60.0)
