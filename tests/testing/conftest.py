"""Assertions of the shipped suites are to show values here too."""

import pytest

pytest.register_assert_rewrite("gradientmail.testing")
