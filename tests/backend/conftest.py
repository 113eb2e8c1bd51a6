"""The contract suite is shipped in the package; its assertions are to show values here too."""

import pytest

pytest.register_assert_rewrite("gradientmail.testing")
