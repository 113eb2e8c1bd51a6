"""Every backend, for the tests that compute in one."""

import pytest
from tests.backend.arrays import BACKENDS

from gradientmail.backend.base import Backend


@pytest.fixture(scope="session", params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param
